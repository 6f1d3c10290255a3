"""The drainer: carries out a thread's journal, strictly in order, each entry exactly once.

A write whose outcome is unknown is looked for before it is repeated: the newest items are read back, at once and with
growing pauses, and only when the list's delay is over without the `post_id` is the item posted again (protocol §1).
For a while after Redis may have forgotten what was posted, every item is looked for before it is posted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fleet import lifecycle, metrics
from fleet.context import Fleet
from fleet.envelope import WORKER_ALIAS, State, parse, with_state
from fleet.errors import ThreadFailedError
from fleet.hostfiles import log_name
from fleet.journal import Entry
from fleet.platform.client import PAGE_ROWS, SessionRef
from fleet.platform.errors import AccessDeniedError, NotExecutedError, OutcomeUnknownError, RefusedError, TransientError
from fleet.platform.paging import LIST_DELAY_S
from fleet.refs import ThreadRef
from fleet.truncation import LOWER_CAP_BYTES, fit

log = logging.getLogger(__name__)

Json = dict[str, Any]
#: What lists showed, by alias and by since when Redis has forgotten nothing: `post_id` → id.
Looks = dict[tuple[str, int], dict[str, str]]

#: Seconds for which one call of the drainer puts up with a platform that does not answer.
PATIENCE_S = 10.0
#: Pauses in seconds between attempts: the first, the factor, the longest.
PAUSE_FIRST_S, PAUSE_FACTOR, PAUSE_MAX_S = 0.1, 2.0, 5.0
#: Newest items that are read back. All that we posted since the lost answer stand before it; persons' may too.
READ_BACK_ROWS = 50
#: ms for which items are looked for before they are posted, once Redis may have forgotten that they were: whatever it
#: forgot is done again sooner.
DOUBT_MS = 60_000
#: ms until reconcile calls a drainer again after one gave up.
GIVEN_UP_MS = 3000


async def drain(fleet: Fleet, ref: ThreadRef) -> None:
    """Post what waits in a thread's journal, until it is empty or the platform has not answered for a while."""
    at = await fleet.at(ref.session)
    begun = await fleet.journal.begin(ref) if at is not None else None
    if at is None or begun is None:
        return
    token, entry = begun
    posting = asyncio.create_task(_post_all(fleet, at, ref, token, entry))
    keeper = asyncio.create_task(fleet.journal.keep(ref, token))
    try:
        await asyncio.wait({posting, keeper}, return_when=asyncio.FIRST_COMPLETED)
        if keeper.done() and not posting.done():
            log.warning("%s: posting is given up, for its lease could not be renewed", ref)
            return
        await posting
    except BaseException as error:
        await fleet.journal.release(ref, token)
        if not isinstance(error, TransientError):
            raise
        log.warning("%s: posting waits for the platform: %s", ref, error)
        await fleet.add_due(ref, "journal", GIVEN_UP_MS)
    finally:
        for task in (posting, keeper):
            task.cancel()
        # What the kernel still holds of a request that is given up must be gone before anybody else posts.
        await asyncio.gather(posting, keeper, return_exceptions=True)


async def _post_all(fleet: Fleet, at: SessionRef, ref: ThreadRef, token: str, entry: Entry | None) -> None:
    looks: Looks = {}
    while entry is not None:
        with metrics.POST_SECONDS.labels(fleet.host).time():
            stored_id = await _carry_out(fleet, at, ref, entry, looks)
        if stored_id:
            metrics.POSTED.labels(fleet.host, entry.kind).inc()
        entry = await fleet.journal.stored(ref, token, entry, stored_id)


async def _carry_out(fleet: Fleet, at: SessionRef, ref: ThreadRef, entry: Entry, looks: Looks) -> str:
    """Carry out one entry and return the id of the item that it became, if it did."""
    if entry.kind == "state":
        await _write_state(fleet, at, ref, entry.body)
        return ""
    alias = WORKER_ALIAS if entry.kind == "audit" else ref.alias
    try:
        return await _stored_before(fleet, at, alias, entry, looks) or await _post(fleet, at, alias, entry)
    except RefusedError as error:
        if error.code == "thread_item_too_large":
            return await _post_smaller(fleet, at, ref, alias, entry)
        if isinstance(error, AccessDeniedError) and not await fleet.platform.is_open(at):
            raise NotExecutedError(f"the session can't be written: {error}") from error
        await _refused(fleet, ref, entry, error)
        return ""


async def _post(fleet: Fleet, at: SessionRef, alias: str, entry: Entry) -> str:
    """Post an item exactly once.

    Raises:
        TransientError: the platform did not answer for `PATIENCE_S`; the entry may have been posted.
        RefusedError: the platform refuses the item.
    """
    deadline = time.monotonic() + PATIENCE_S
    unknown = entry.again
    for pause in _pauses():
        if unknown and (found := await _read_back(fleet, at, alias, entry.post_id)):
            return found
        try:
            return str((await fleet.platform.post_item(at, alias, entry.body)).get("id", ""))
        except NotExecutedError:
            unknown = False
            metrics.POST_RETRIES.labels(fleet.host).inc()
            if time.monotonic() + pause > deadline:
                raise
            await asyncio.sleep(pause)
        except OutcomeUnknownError:
            unknown = True
            metrics.POST_RETRIES.labels(fleet.host).inc()
            if time.monotonic() > deadline:
                raise
    raise AssertionError("the pauses never end")


async def _read_back(fleet: Fleet, at: SessionRef, alias: str, post_id: str) -> str | None:
    """Look for an item that may have been stored; None when the list's delay is over without it.

    Raises:
        TransientError: the list can't be read for `PATIENCE_S`.
    """
    started = time.monotonic()
    for pause in _pauses():
        if found := (await _shown(fleet, at, alias, READ_BACK_ROWS)).get(post_id):
            return found
        if time.monotonic() - started >= LIST_DELAY_S:
            return None
        await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")


async def _stored_before(fleet: Fleet, at: SessionRef, alias: str, entry: Entry, looks: Looks) -> str | None:
    """Look for an item that was stored before Redis forgot it; None when there is none, or no reason to look.

    Once the list's delay is over, one look shows all of them.

    Raises:
        TransientError: the list can't be read for `PATIENCE_S`.
    """
    if entry.since_ms > DOUBT_MS:
        return None
    if (alias, entry.since) not in looks:
        await asyncio.sleep(max(0.0, LIST_DELAY_S - entry.since_ms / 1000))
        looks[alias, entry.since] = await _shown(fleet, at, alias, PAGE_ROWS)
    return looks[alias, entry.since].get(entry.post_id)


async def _shown(fleet: Fleet, at: SessionRef, alias: str, rows: int) -> dict[str, str]:
    """Return the newest items of a thread: `post_id` → id.

    Raises:
        TransientError: the list can't be read for `PATIENCE_S`.
    """
    started = time.monotonic()
    for pause in _pauses():
        try:
            newest = await fleet.platform.newest_items(at, alias, rows)
        except TransientError:
            if time.monotonic() - started > PATIENCE_S:
                raise
            await asyncio.sleep(pause)
        else:
            return {str((item.get("metadata") or {}).get("post_id")): str(item.get("id", "")) for item in newest}
    raise AssertionError("the pauses never end")


def _pauses() -> Iterator[float]:
    pause = PAUSE_FIRST_S
    while True:
        yield pause
        pause = min(pause * PAUSE_FACTOR, PAUSE_MAX_S)


async def _post_smaller(fleet: Fleet, at: SessionRef, ref: ThreadRef, alias: str, entry: Entry) -> str:
    """Post an item again under the lower cap (protocol §4, budget, step 5)."""
    await fleet.learn_item_cap(LOWER_CAP_BYTES)
    try:
        body = fit(entry.body, LOWER_CAP_BYTES, log_name(ref))
        return await _post(fleet, at, alias, replace(entry, body=body, again=False))
    except (ThreadFailedError, RefusedError) as error:
        await _refused(fleet, ref, entry, error, code="THREAD_ITEM_TOO_LARGE")
        return ""


async def _refused(
    fleet: Fleet, ref: ThreadRef, entry: Entry, error: Exception, code: str = "THREAD_POST_FAILED"
) -> None:
    """Pass over an entry that can never be stored, and fail its thread with a code."""
    metrics.REFUSED.labels(fleet.host).inc()
    kind = entry.body.get("metadata", {}).get("type", "")
    log.error("%s: the platform refuses an item of type %r for good: %s", ref, kind, error)
    record = await fleet.records.read(ref)
    if entry.kind == "item" and record.live:
        await lifecycle.fail(fleet, record, code, f"an item of type {kind!r} was refused: {error}")


async def _write_state(fleet: Fleet, at: SessionRef, ref: ThreadRef, body: Json) -> None:
    """Write `instance.state`, unless a newer epoch was claimed or the user has asked for something else meanwhile.

    Raises:
        TransientError: the platform did not answer for `PATIENCE_S`. Writing a state twice is harmless.
    """
    record = await fleet.records.read(ref)
    if record.epoch != body["epoch"]:
        return
    state: State = body["state"]
    deadline = time.monotonic() + PATIENCE_S
    for pause in _pauses():
        try:
            value = (await fleet.platform.download_object(at, ref.alias)).get("value")
            thread = parse(value)
            wanted = thread is not None and (body.get("force") or thread.state in ("pending", "active"))
            if thread is not None and wanted and thread.state != state:
                await fleet.platform.upload_object(at, ref.alias, with_state(value, state))
            break
        except RefusedError as error:
            log.warning("%s: the state %s can't be written: %s", ref, state, error)
            break
        except TransientError:
            if time.monotonic() + pause > deadline:
                raise
            await asyncio.sleep(pause)
    await fleet.records.set_told(record, state)
