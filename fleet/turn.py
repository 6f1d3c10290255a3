"""One turn, as the holder of the lease of the step `run`.

An attempt runs for as long as the lease is kept; it stops its agent when it is asked to, and at once when the lease
can't be renewed.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from redis.exceptions import RedisError

from fleet import lapse, lifecycle, metrics
from fleet.asker import ParkedError
from fleet.attempt import AgentRuntime, Attempt, Outcome, crashed
from fleet.context import Fleet
from fleet.emitter import LeaseLostError, RedisBehindError
from fleet.errors import ThreadFailedError
from fleet.events import AgentDiedError
from fleet.hostfiles import HostFiles, HostUnwritableError
from fleet.leases import RENEWALS, Lease
from fleet.platform.client import SessionRef
from fleet.rebuild import checkpoint_of, consumed
from fleet.record import INTERRUPTED, Record
from fleet.refs import ThreadRef
from fleet.start import say_unwritable
from fleet.terms import on_terms

log = logging.getLogger(__name__)

#: Why an attempt is ended although its turn has not ended.
UNFINISHED = frozenset({"lost", "superseded", "shutdown", INTERRUPTED})
#: The turn gives its place back without a `turn_end`: a person's answer starts a new one in the same agent session.
PARKED = Outcome("parked")


async def run_turn(
    fleet: Fleet, runtime: AgentRuntime, ref: ThreadRef, epoch: int, turn: int, shutdown: asyncio.Event
) -> None:
    """Run the turn `turn` of `epoch`, if it is still to be run here and nobody runs it.

    When `shutdown` is set, the turn is interrupted so that it is gone on with when the host is back. A turn whose host
    can't write its state folder waits.
    """
    record = await fleet.records.read(ref)
    if (record.epoch, record.turn, record.step, record.host) != (epoch, turn, "run", fleet.host):
        return
    at = await fleet.at(ref.session)
    if at is None or await fleet.hosts.is_draining(fleet.host):
        return
    try:
        await asyncio.to_thread(HostFiles(fleet.environment.home, ref).check_room)
        await _run(fleet, runtime, record, at, shutdown)
    except HostUnwritableError as error:
        await say_unwritable(fleet, record, error)


async def _run(fleet: Fleet, runtime: AgentRuntime, record: Record, at: SessionRef, shutdown: asyncio.Event) -> None:
    """Run one attempt of a turn and go on with the thread, if the turn has a place and nobody runs it.

    Raises:
        HostUnwritableError: the host's disk took no more; the attempt does not count.
    """
    ref = record.ref
    if record.agent in fleet.agents:  # what is slow to import would keep the lease from being renewed
        await asyncio.to_thread(runtime.load, record.agent)
    if not await _counted(fleet, record):
        return
    lease = await fleet.leases.take(record)
    if lease is None:
        return
    try:
        taken = await fleet.records.read(ref)
        if not await lapse.recovered(fleet, taken):
            attempt = Attempt(fleet, runtime, lease, on_terms(taken, fleet.environment.home) or taken, at)
            outcome = await _supervised(fleet, lease, attempt, shutdown)
            if outcome is not None:
                await _over(fleet, lease, attempt, outcome)
    except HostUnwritableError:
        await fleet.records.set_held(record, lease.token, attempt=record.attempt)
        raise
    finally:
        await fleet.leases.release(lease)
        first_in_line = await fleet.hosts.turn_over(fleet.host, record.work_folder, ref)
    if not shutdown.is_set() and await fleet.at(ref.session) is not None:
        await lifecycle.dispatch(fleet, await fleet.records.read(ref))
        if first_in_line is not None:
            await _call_up(fleet, record.work_folder, first_in_line)


async def _counted(fleet: Fleet, record: Record) -> bool:
    """Count a turn as running here, unless its work folder has no place left (`concurrency.per_work_folder`)."""
    per_folder = fleet.config.concurrency.per_work_folder
    return await fleet.hosts.turn_runs(fleet.host, record.work_folder, record.ref, fleet.leases.ttl_ms, per_folder)


async def _call_up(fleet: Fleet, folder: str, ref: ThreadRef) -> None:
    """Let the thread that is first in line for a folder try again; one that needs no place any more leaves the line."""
    waiting = await fleet.records.read(ref)
    if waiting.step != "run":
        await fleet.hosts.leave_line(fleet.host, folder, ref)
    await lifecycle.dispatch(fleet, waiting)


async def _supervised(fleet: Fleet, lease: Lease, attempt: Attempt, shutdown: asyncio.Event) -> Outcome | None:
    """Run an attempt for as long as its lease is kept. None: the turn has not ended, or is not ours any more.

    Raises:
        HostUnwritableError: the host's disk took no more.
    """
    name = f"{lease.record.ref} turn {lease.record.turn}"
    keeper = asyncio.create_task(_keep(fleet, lease))
    running = asyncio.create_task(attempt.run())
    leaving = asyncio.create_task(shutdown.wait())
    await asyncio.wait({keeper, running, leaving}, return_when=asyncio.FIRST_COMPLETED)
    stopped_by = keeper.result() if keeper.done() else "shutdown"
    for task in (keeper, running, leaving):
        task.cancel()
    try:
        return await running
    except asyncio.CancelledError:
        log.info("%s was stopped: %s", name, stopped_by)
        if stopped_by == "lost":
            metrics.count_lost_lease(fleet, lease.record)
        if stopped_by in UNFINISHED:
            attempt.excuse()
        return None if stopped_by in UNFINISHED else Outcome("stopped")
    except ParkedError as error:
        log.info("%s: %s", name, error)
        return PARKED
    except ThreadFailedError as error:
        return Outcome("failed", error.detail, error.code)
    except LeaseLostError as error:
        metrics.count_lost_lease(fleet, lease.record)
        log.warning("%s: %s", name, error)
        attempt.excuse()
        return None
    except RedisError as error:
        log.warning("%s: Redis is lost: %s", name, error)
        attempt.excuse()
        return None
    except HostUnwritableError:
        raise
    except RedisBehindError as error:
        log.warning("%s: %s", name, error)
        await lapse.start_anew(fleet, lease.record)
        return None
    except AgentDiedError as error:
        log.warning("%s, attempt %d: %s", name, attempt.record.attempt, error)
    except Exception:
        log.exception("%s, attempt %d", name, attempt.record.attempt)
    # An agent dies of a full disk too.
    await asyncio.to_thread(HostFiles(fleet.environment.home, lease.record.ref).check_room)
    return crashed(attempt.number) if attempt.number >= fleet.config.turns.attempts else None


async def _keep(fleet: Fleet, lease: Lease) -> str:
    counting = asyncio.create_task(_count(fleet, lease))
    try:
        return await fleet.leases.keep(lease)
    finally:
        counting.cancel()


async def _count(fleet: Fleet, lease: Lease) -> None:
    """Keep the turn counted among those of the host."""
    while True:
        await asyncio.sleep(lease.ttl_ms / 1000 / RENEWALS)
        with suppress(RedisError):
            await _counted(fleet, lease.record)


async def _over(fleet: Fleet, lease: Lease, attempt: Attempt, outcome: Outcome) -> None:
    if outcome is PARKED:
        await _park(fleet, lease, attempt)
        return
    ended: dict[str, Any] = {
        "turn_status": outcome.status,
        "error": outcome.error,
        "fail_code": outcome.code,
        "stats": {**asdict(attempt.tokens), "duration_ms": await attempt.duration_ms()},
    }
    _write_down(fleet, replace(attempt.record, step="publish", **ended))
    # An attempt that ended before it had read the log knows less than the journal does.
    said = max(attempt.said, await fleet.journal.last_of(lease.record))
    await fleet.records.transition(
        lease.record,
        "turn_ran",
        token=lease.token,
        release=True,
        said=said,
        **ended,
        **_noted(attempt.record),
    )


async def _park(fleet: Fleet, lease: Lease, attempt: Attempt) -> None:
    """Give the thread's place back: what the turn was given counts as consumed, the prompt stays open."""
    record = consumed(attempt.record)
    _write_down(fleet, record)
    await fleet.records.transition(
        lease.record,
        "turn_parked",
        token=lease.token,
        release=True,
        consumed_ids=record.turn_items,
        consumed_at=record.consumed_at,
        consumed=record.consumed,
        **_noted(record),
    )


def _noted(record: Record) -> dict[str, Any]:
    """Return what was noted of a turn while it ran: a Redis that came back older has forgotten it."""
    return {name: getattr(record, name) for name in ("agent_session", "turn_items", "turn_newest", "began_ms")}


def _write_down(fleet: Fleet, record: Record) -> None:
    checkpoint_of(record).write(HostFiles(fleet.environment.home, record.ref).checkpoint)
