"""The short moves of a thread between its turns: go on, stop, fail, and the nudge that its step is waiting for."""

from __future__ import annotations

from fleet import items
from fleet.context import Fleet
from fleet.journal import audit_draft, item_draft, state_draft
from fleet.record import Record
from fleet.refs import ThreadRef


async def advance(fleet: Fleet, ref: ThreadRef) -> None:
    """Begin the next turn of an idle thread when persons have said or answered something, or carry out a stop."""
    record = await fleet.records.read(ref)
    if record.step != "idle":
        return
    if record.stop:
        await stop(fleet, record, record.stop)
        return
    prompt = await fleet.prompts.read(ref)
    answered = prompt is not None and prompt.parked and prompt.answer is not None
    waiting = [item["id"] for item in await fleet.inbox.waiting(ref)]
    # Taken in once more while the record was being restored: a turn of these would have nothing to say.
    spent = set(waiting).intersection(record.consumed)
    if spent:
        await fleet.inbox.drop(ref, spent)
    if not answered and len(spent) == len(waiting):
        return
    begun = await fleet.records.transition(
        record,
        "turn_begun",
        turn=record.turn + 1,
        attempt=0,
        turn_items=[],
        turn_newest=None,
        prompted=False,
        said=0,
        began_ms=0,
        stats={},
        turn_status="",
        error="",
        fail_code="",
    )
    if begun:
        await fleet.nudges.run_turn(await fleet.records.read(ref))


async def say_registered(fleet: Fleet, record: Record) -> None:
    """Say once, in the first epoch of a thread, that it is known. A drainer is left for the caller to call."""
    if record.first:
        audit = audit_draft(items.audit("thread_registered", record.ref.alias))
        await fleet.journal.append_once(record.ref, f"registered:{record.epoch}", audit, epoch=record.epoch)


async def dispatch(fleet: Fleet, record: Record) -> None:
    """Give the nudge that the step of `record` is waiting for."""
    match record.step:
        case "wait_host":
            await fleet.nudges.activate(record.ref)
        case "start":
            await fleet.nudges.start_thread(record)
        case "idle":
            await advance(fleet, record.ref)
        case "run":
            await fleet.nudges.run_turn(record)
        case "publish" | "close":
            await fleet.nudges.finish_turn(record)
        case _:
            pass


async def stop(fleet: Fleet, record: Record, outcome: str) -> None:
    """Take a thread out of our hands because its user did: `completed`, or `removed` with its object.

    A turn that runs is asked to stop; one that only waits for a place is ended here.
    """
    if record.step in ("wait_host", "start", "idle"):
        await end_stopped(fleet, record, outcome)
        return
    await fleet.records.request_stop(record, outcome)
    if record.step == "run" and (lease := await fleet.leases.take(record)):
        said = await fleet.journal.last_of(record)
        await fleet.records.transition(
            record, "turn_ran", token=lease.token, release=True, said=said, turn_status="stopped", stats={}
        )
        await fleet.nudges.finish_turn(await fleet.records.read(record.ref))


async def end_stopped(fleet: Fleet, record: Record, outcome: str, *, token: str = "") -> None:
    """End a thread that its user took out of our hands, with the audit item, or one that failed while a turn ran.

    What is to be said of it is appended before the record moves, so that a crash in between repeats it.
    """
    ref = record.ref
    call = await fleet.prompts.say_cancelled(ref, f"the thread is {outcome}", record.epoch)
    if outcome != "failed":
        audit = items.audit("thread_removed" if outcome == "removed" else "thread_completed", ref.alias)
        call |= await fleet.journal.append_once(ref, f"stopped:{record.epoch}", audit_draft(audit), epoch=record.epoch)
    if call:
        await fleet.nudges.post_items(ref)
    name = "failed" if outcome == "failed" else "stopped"
    if not await fleet.records.transition(record, name, token=token, release=bool(token), outcome=outcome):
        await fleet.records.request_stop(record, outcome)
        return
    await fleet.prompts.forget(ref)
    if outcome == "removed":
        keys = fleet.store.thread(ref)
        await fleet.store.redis.delete(keys.inbox, keys.seen)
        await fleet.store.redis.hdel(keys.record, "agent_session", "consumed", "consumed_at")


async def fail(fleet: Fleet, record: Record, code: str, detail: str, *, token: str = "") -> None:
    """Fail a thread (protocol §3.5): the error item, then `failed` in the envelope, then the audit item.

    The words are appended before the record moves, so that a crash in between repeats rather than swallows them. A
    turn that runs is asked to stop, and its end ends the thread.
    """
    call = await fleet.journal.append_once(
        record.ref,
        f"failed:{record.epoch}",
        item_draft(items.error(code, detail)),
        state_draft("failed", record.epoch),
        audit_draft(items.audit("thread_failed", record.ref.alias, code=code, message=detail)),
        epoch=record.epoch,
    )
    failed = await fleet.records.transition(
        record, "failed", token=token, release=bool(token), outcome="failed", error=code
    )
    if not failed:
        await fleet.records.request_stop(record, "failed")
    if call:
        await fleet.nudges.post_items(record.ref)
