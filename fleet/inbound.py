"""What persons say: from the thread's items into its inbox, and from the inbox into a prompt.

An item is ours, an echo, when its `user_id` is the worker's own (protocol §3, self-filter). The others wait in the
inbox until a turn that was given them ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fleet import lifecycle
from fleet.context import Fleet
from fleet.platform.client import SessionRef, Timestamp
from fleet.platform.errors import RefusedError
from fleet.platform.paging import overlapped
from fleet.prompts import answer_open
from fleet.record import Record
from fleet.refs import ThreadRef

Json = dict[str, Any]

#: Ids of persons' items that are remembered per thread: more than can stand within one overlap.
SEEN_KEPT = 5000


async def catch_up(fleet: Fleet, at: SessionRef, record: Record) -> None:
    """Read a thread's list behind what was consumed last, and take in what persons said."""
    since = overlapped(record.consumed_at) if record.consumed_at is not None else None
    own = await fleet.user_id()
    async for page in fleet.platform.items(at, record.ref.alias, since):
        await _take_in(fleet, record, [item for item in page if item.get("user_id") != own])


async def ingest(fleet: Fleet, ref: ThreadRef) -> None:
    """Look at the items that events named, take in those of persons, and begin a turn when none runs.

    Each is read by its id, since a list may lag behind the event. An item stays due until it was seen.

    Raises:
        TransientError: the platform did not answer; what was not seen stays due.
    """
    at = await fleet.at(ref.session)
    if at is None:
        return
    keys = fleet.store.session(ref.session)
    own = await fleet.user_id()
    for item_id in await fleet.due_items(ref):
        record = await fleet.records.read(ref)
        if record.live:
            item = await _item(fleet, at, ref, item_id)
            person = item is not None and item.get("user_id") != own
            if item is not None and person and not await answer_open(fleet, ref, item):
                await _take_in(fleet, record, [item])
        await fleet.store.run("due_done", [keys.due], [f"item {ref.alias} {item_id}", "1"])
    await lifecycle.advance(fleet, ref)


async def _item(fleet: Fleet, at: SessionRef, ref: ThreadRef, item_id: str) -> Json | None:
    try:
        return await fleet.platform.item(at, ref.alias, item_id)
    except RefusedError as error:
        if error.code == "not_found":
            return None
        raise


async def _take_in(fleet: Fleet, record: Record, found: Iterable[Json]) -> None:
    fresh = [item for item in found if isinstance(item.get("id"), str) and item["id"] not in record.consumed]
    if not fresh:
        return
    pairs: list[str | int] = [SEEN_KEPT]
    for item in fresh:
        kept = {name: item.get(name) for name in ("id", "created_at", "content", "metadata")}
        pairs += [item["id"], json.dumps(kept)]
    keys = fleet.store.thread(record.ref)
    await fleet.store.run("inbox_add", [keys.inbox, keys.seen], pairs)


async def waiting(fleet: Fleet, ref: ThreadRef) -> list[Json]:
    """Return what waits in a thread's inbox, in the order in which it was said."""
    rows = await fleet.store.hash(fleet.store.thread(ref).inbox)
    return sorted((json.loads(text) for text in rows.values()), key=_order)


def _order(item: Json) -> tuple[float, str, str]:
    """Sort by the platform's own time, a number or an ISO string by version, and the id within one instant."""
    created = item.get("created_at")
    if isinstance(created, int | float):
        return (created, "", item["id"])
    return (0, str(created), item["id"])


def prompt_of(items: Iterable[Json]) -> str:
    """Coalesce items into one prompt: in order, blank-line separated (protocol §3.3)."""
    return "\n\n".join(text for item in items if (text := _text_of(item.get("content"))))


def _text_of(content: object) -> str:
    blocks = content if isinstance(content, list) else []
    return "\n\n".join(text for block in blocks if isinstance(block, dict) and (text := _block_text(block)))


def _block_text(block: Json) -> str:
    if block.get("type") == "json":
        return json.dumps(block.get("json"), ensure_ascii=False, indent=2)
    text = block.get("text")
    return text.strip() if isinstance(text, str) else ""


def newest_time(items: Iterable[Json], before: Timestamp | None) -> Timestamp | None:
    """Return the latest `created_at` of items in the platform's own order, `before` when there is none."""
    latest = max(items, key=_order, default=None)
    return latest.get("created_at") if latest else before
