"""What persons say: from the thread's items into its inbox, and from the inbox into a prompt.

An item is ours, an echo, when its `user_id` is the worker's own (protocol §3, self-filter). The others wait in the
inbox until a turn that was given them ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fleet import lifecycle
from fleet.attachments import Place
from fleet.context import Fleet
from fleet.inbox import order
from fleet.items import clean
from fleet.platform.client import SessionRef, Timestamp
from fleet.platform.errors import RefusedError
from fleet.platform.paging import overlapped
from fleet.prompts import prompt_of_item
from fleet.record import Record
from fleet.refs import ThreadRef

Json = dict[str, Any]


async def catch_up(
    fleet: Fleet, at: SessionRef, record: Record, *, rebuild: bool = False, unposted: Iterable[Json] = ()
) -> None:
    """Read a thread's list behind what was consumed last, and take in what persons said.

    With `rebuild`, an open prompt is read back from the thread's own items, `unposted` ones last: Redis has lost it.
    """
    since = overlapped(record.consumed_at) if record.consumed_at is not None else None
    own = await fleet.user_id()
    rebuild = rebuild and await fleet.prompts.read(record.ref) is None
    async for page in fleet.platform.items(at, record.ref.alias, since):
        for item in page:
            if item.get("user_id") == own:
                if rebuild:
                    await _replay(fleet, record.ref, item)
                continue
            if rebuild:
                await _hear_again(fleet, record, item)
            await _take_in(fleet, record, item)
    for item in unposted if rebuild else ():
        await _replay(fleet, record.ref, item)


async def _hear_again(fleet: Fleet, record: Record, item: Json) -> None:
    """Let an item be taken in as if for the first time: what it answers may have been lost when it came."""
    if item.get("id") in record.consumed:
        await fleet.prompts.forget(record.ref)  # it has answered the question before it, if there is one
    else:
        await fleet.inbox.forget(record.ref, str(item.get("id")))


async def _replay(fleet: Fleet, ref: ThreadRef, item: Json) -> None:
    """Do again to the thread's prompt what one of our own items says."""
    prompt = prompt_of_item(item)
    metadata = item.get("metadata") or {}
    cancelled = (metadata.get("prompt") or {}).get("prompt_state") in ("cancelled", "failed")
    if metadata.get("type") == "pending_prompt_resolved":
        await fleet.prompts.was_resolved(ref, str((metadata.get("prompt") or {}).get("prompt_id")))
    if prompt is not None:
        await fleet.prompts.open(ref, prompt)
    elif cancelled or metadata.get("type") == "turn_end":
        await fleet.prompts.forget(ref)


async def ingest(fleet: Fleet, ref: ThreadRef) -> None:
    """Look at the items that events named, take in those of persons, and begin a turn when none runs.

    Each is read by its id, since a list may lag behind the event. An item stays due until it was seen. What was said
    before the thread was ours, and so was passed over, is found by reading the list once more after its start.

    Raises:
        TransientError: the platform did not answer; what was not seen stays due.
    """
    at = await fleet.at(ref.session)
    if at is None:
        return
    keys = fleet.store.session(ref.session)
    own = await fleet.user_id()
    done: dict[str, str] = {}
    lag_over = await fleet.store.redis.hget(keys.due, f"list {ref.alias}")
    if lag_over is not None and await fleet.store.now_ms() >= int(lag_over):
        record = await fleet.records.read(ref)
        if record.live:
            await catch_up(fleet, at, record)
        done[f"list {ref.alias}"] = str(lag_over)
    try:
        for item_id in await fleet.due_items(ref):
            record = await fleet.records.read(ref)
            if record.live:
                item = await _item(fleet, at, ref, item_id)
                if item is not None and item.get("user_id") != own:
                    await _take_in(fleet, record, item)
            done[f"item {ref.alias} {item_id}"] = "1"
    finally:
        # Struck off only now, so that a crash in between does not leave a message in the inbox of an idle thread.
        await lifecycle.advance(fleet, ref)
        await fleet.store.run("due_done", [keys.due], [part for pair in done.items() for part in pair])


async def _item(fleet: Fleet, at: SessionRef, ref: ThreadRef, item_id: str) -> Json | None:
    try:
        return await fleet.platform.item(at, ref.alias, item_id)
    except RefusedError as error:
        if error.code == "not_found":
            return None
        raise


async def _take_in(fleet: Fleet, record: Record, item: Json) -> None:
    """Take in a person's item, once: it answers the open prompt, or waits in the inbox for a turn."""
    id_ = item.get("id")
    if not isinstance(id_, str) or id_ in record.consumed:
        return
    kept = {name: item.get(name) for name in ("id", "created_at", "user_id", "content", "metadata")}
    if await fleet.prompts.answer(record.ref, kept):
        return
    await fleet.inbox.add(record.ref, kept)


def prompt_of(items: Iterable[Json], attached: Mapping[Place, str]) -> str:
    """Coalesce items into one prompt: in order, blank-line separated (protocol §3.3).

    `attached` is what the prompt says where a `file` block stands.
    """
    return clean("\n\n".join(text for item in items for text in _texts(item, attached)))


def _texts(item: Json, attached: Mapping[Place, str]) -> Iterator[str]:
    content = item.get("content")
    for index, block in enumerate(content if isinstance(content, list) else []):
        if isinstance(block, dict) and (text := attached.get((item["id"], index)) or _block_text(block)):
            yield text


def _block_text(block: Json) -> str:
    if block.get("type") == "json":
        return json.dumps(block.get("json"), ensure_ascii=False, indent=2)
    text = block.get("text")
    return text.strip() if isinstance(text, str) else ""


def newest_time(items: Iterable[Json], before: Timestamp | None) -> Timestamp | None:
    """Return the latest `created_at` of items in the platform's own order, `before` when there is none."""
    times = [item.get("created_at") for item in items]
    known = [time for time in (before, *times) if time is not None]
    return max(known, key=lambda time: order({"created_at": time, "id": ""}), default=None)
