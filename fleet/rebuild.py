"""What Redis has lost is taken from the host's checkpoint, its log, and the platform."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import fields, replace
from typing import Any

from fleet.context import Fleet
from fleet.hostfiles import Checkpoint, HostFiles, log_name
from fleet.journal import DEPTH_LIMIT, item_draft
from fleet.platform.client import PAGE_ROWS, SessionRef
from fleet.platform.paging import LIST_DELAY_S
from fleet.record import Record
from fleet.refs import ThreadRef
from fleet.truncation import fit

log = logging.getLogger(__name__)

#: Ids of consumed items that a record remembers: more than can stand within one overlap of the list.
CONSUMED_KEPT = 50
#: Lines of the log that may not have been posted: a journal holds no more, for a turn waits when it is full.
UNPOSTED_MAX = DEPTH_LIMIT + 200


def checkpoint_of(record: Record) -> Checkpoint:
    """Return what a host must remember of `record`."""
    values = {field.name: getattr(record, field.name) for field in fields(Checkpoint)}
    return Checkpoint(**values | {"step": record.step if record.step in ("run", "publish") else ""})


def consumed(record: Record) -> Record:
    """Return `record` with the items that its turn was given counted as consumed, and no turn under way."""
    return replace(
        record,
        step="idle",
        consumed_at=record.consumed_at if record.turn_newest is None else record.turn_newest,
        consumed=(*record.consumed, *record.turn_items)[-CONSUMED_KEPT:],
    )


def restored(record: Record, checkpoint: Checkpoint) -> tuple[Record, str]:
    """Return `record` with what the host remembers where Redis remembers less, and the turn's step to go on with."""
    if checkpoint.turn <= record.turn:
        return record, ""
    values: dict[str, Any] = {field.name: getattr(checkpoint, field.name) for field in fields(Checkpoint)}
    del values["epoch"], values["step"]
    return replace(record, **values), checkpoint.step


async def say_again(fleet: Fleet, at: SessionRef, ref: ThreadRef) -> list[dict[str, Any]]:
    """Let the journal have what the log has and the platform has not, and return it, the oldest first.

    Items are posted in the order of the log, so they are those behind the last one that the platform shows.
    """
    files = HostFiles(fleet.environment.home, ref)
    if not files.log.exists():
        return []
    waiting = await fleet.journal.waiting(ref)
    await asyncio.sleep(LIST_DELAY_S)
    # Only now: an attempt that has just lost its lease may have written a last line.
    entries = deque(files.said(), maxlen=UNPOSTED_MAX)
    newest = await fleet.platform.newest_items(at, ref.alias, PAGE_ROWS)
    stored = {(item.get("metadata") or {}).get("post_id") for item in newest}
    unposted: list[dict[str, Any]] = []
    for entry in reversed(entries):
        if entry["item"]["metadata"]["post_id"] in stored:
            break
        unposted.append(entry["item"])
    unposted.reverse()
    budget = await fleet.item_budget()
    lost = [item for item in unposted if item["metadata"]["post_id"] not in waiting]
    for item in lost:
        cause = f"again:{item['metadata']['post_id']}"
        await fleet.journal.append_once(ref, cause, item_draft(fit(item, budget, log_name(ref))))
    if lost:
        log.warning("%s: %d items that Redis had lost are posted from the log", ref, len(lost))
    return unposted
