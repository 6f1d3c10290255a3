"""What a thread's envelope asks for, and the claim of a new epoch for the host that owns its folder."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Literal

from fleet import items, lifecycle
from fleet.context import Fleet
from fleet.envelope import Thread, parse
from fleet.hosts import owner
from fleet.journal import item_draft
from fleet.platform.client import SessionRef
from fleet.platform.errors import AccessDeniedError, RefusedError
from fleet.record import TURN_STEPS, Record
from fleet.refs import ThreadRef

Verdict = Literal["none", "start", "recover", "restart", "stop"]


def verdict(record: Record, thread: Thread | None, *, force: bool = False) -> Verdict:
    """Say what an envelope asks for, given the record as it was read before the envelope.

    `pending` on a running thread restarts it, but only once the envelope is known to have said `active` in this
    epoch: until then the `pending` that is read is the very one that is being served.
    """
    if thread is None or not thread.is_ours:
        return "stop" if record.live else "none"
    if force:
        return "restart" if record.live else "start"
    match thread.state:
        case "pending":
            if record.step == "wait_host":
                return "start"
            if not record.live:
                return "none" if record.outcome == "failed" and record.told != "failed" else "start"
            return "restart" if record.told == "active" else "none"
        case "active":
            return "recover" if not record.exists or record.step == "wait_host" else "none"
        case "failed" if record.stop == "failed":
            return "none"  # our own word, said while the turn is still being stopped
        case _:
            return "stop" if record.live else "none"


async def activate(fleet: Fleet, ref: ThreadRef, *, force: bool = False) -> None:
    """Compare a thread's envelope with its record, and do what it asks for.

    Raises:
        TransientError: the platform did not answer; the thread stays due.
    """
    at = await fleet.at(ref.session)
    if at is None:
        return
    due = fleet.store.session(ref.session).due
    noticed = await fleet.store.redis.hget(due, f"object {ref.alias}")
    record = await fleet.records.read(ref)
    thread = await read_envelope(fleet, at, ref)
    if thread is not None and thread.is_ours and not record.exists:
        await fleet.store.redis.hdel(fleet.store.session(ref.session).kinds, ref.alias)
    match verdict(record, thread, force=force):
        case "start" | "restart" | "recover" as asked if thread is not None:
            await _claim(fleet, record, thread, asked, force=force)
        case "stop":
            await lifecycle.stop(fleet, record, "removed" if thread is None else "completed")
        case _:
            if record.step == "start":
                await fleet.nudges.start_thread(record)
    if noticed is not None:
        await fleet.store.run("due_done", [due], [f"object {ref.alias}", str(noticed)])


async def read_envelope(fleet: Fleet, at: SessionRef, ref: ThreadRef) -> Thread | None:
    """Return a thread's envelope, None when there is no such thread."""
    try:
        found = await fleet.platform.download_object(at, ref.alias)
    except RefusedError as error:
        deleted = isinstance(error, AccessDeniedError) and await fleet.platform.is_open(at)
        if deleted or error.code == "not_found":
            return None
        raise
    return parse(found.get("value"))


async def _claim(
    fleet: Fleet, seen: Record, thread: Thread, asked: Literal["start", "restart", "recover"], *, force: bool
) -> None:
    path = PurePosixPath(thread.work_folder)
    host = owner(thread.work_folder, await fleet.hosts.all(), seen.host) if path.is_absolute() else fleet.host
    waits_on = host is None and seen.step == "wait_host" and seen.work_folder == thread.work_folder
    if not waits_on:
        moves = host is not None and bool(seen.host) and host != seen.host
        await _say_what_ends(fleet, seen, asked, f"from {seen.host} to {host}" if moves else "")
        forgotten: dict[str, Any] = {"agent_session": ""} if moves else {}
        epoch = await fleet.records.claim(
            seen,
            "start" if host else "wait_host",
            host=host or seen.host,
            work_folder=thread.work_folder,
            agent=thread.agent_type,
            forced=force,
            first=not seen.exists and asked != "recover",
            **forgotten,
        )
        if epoch is None:
            await fleet.nudges.activate(seen.ref)
            return
        if asked != "recover":
            await fleet.prompts.cancel(seen.ref, "the thread was started again")
    record = await fleet.records.read(seen.ref)
    await lifecycle.say_registered(fleet, record)
    if not host and asked != "recover":
        detail = f"No host that takes turns owns {thread.work_folder}. The thread starts by itself when one comes."
        no_host = item_draft(items.status("no_host", detail))
        await fleet.journal.append_once(seen.ref, f"no_host:{record.epoch}", no_host, epoch=record.epoch)
    if await fleet.store.journal_depth(seen.ref):
        await fleet.nudges.post_items(seen.ref)
    if host:
        await fleet.nudges.start_thread(record)


async def _say_what_ends(fleet: Fleet, seen: Record, asked: str, moves: str) -> None:
    """Say what a new epoch ends: before the record moves, so that a crash in between repeats it."""
    drafts = []
    if asked == "restart" and seen.step in TURN_STEPS:
        detail = f"Turn {seen.turn} was interrupted: the thread was started again."
        drafts.append(item_draft(items.status("restarted", detail)))
    if moves and seen.agent_session:
        detail = f"The thread moves {moves}, where the agent begins anew."
        drafts.append(item_draft(items.status("new_session", detail)))
    if drafts:
        await fleet.journal.append_once(seen.ref, f"ended:{seen.epoch}", *drafts, epoch=seen.epoch)
