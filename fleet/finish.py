"""What follows the run of a turn: its artifacts are published, then it is closed with its `turn_end`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from fleet import artifacts, items, lapse, lifecycle, metrics
from fleet.context import Fleet
from fleet.emitter import Emitter, LeaseLostError
from fleet.hostfiles import HostFiles, HostUnwritableError
from fleet.leases import Lease
from fleet.rebuild import checkpoint_of, consumed, say_again
from fleet.record import Record, Step
from fleet.refs import ThreadRef
from fleet.start import say_unwritable
from fleet.terms import on_terms

log = logging.getLogger(__name__)


async def publish_artifacts(fleet: Fleet, ref: ThreadRef, epoch: int, turn: int) -> None:
    """Publish what the turn left in the outbox, and say so (protocol §4, artifacts)."""
    async with _step(fleet, ref, epoch, turn, "publish") as lease:
        if lease is None:
            return
        record = lease.record
        terms = on_terms(record, fleet.environment.home)
        block = terms and terms.settings["artifacts"]
        at = await fleet.at(ref.session)
        if at is None:
            return
        said = record.said
        if terms and block:
            published = await artifacts.publish(
                fleet.platform,
                at,
                Path(terms.work_folder),
                block["prefix"],
                block["source"],
                fleet.config.artifacts.upload,
            )
            said = await _say(fleet, lease, said, items.artifacts_published(published))
        await fleet.records.transition(record, "published", token=lease.token, release=True, said=said)


async def close_turn(fleet: Fleet, ref: ThreadRef, epoch: int, turn: int) -> None:
    """Say `turn_end`, record what was consumed, and go on: with the next turn, or with the end of the thread."""
    async with _step(fleet, ref, epoch, turn, "close") as lease:
        if lease is None:
            return
        record = lease.record
        end = items.turn_end(record.turn_status, record.stats, record.error)
        await _say(fleet, lease, record.said, end)
        await _close(fleet, lease)
    await lifecycle.advance(fleet, ref)


async def _close(fleet: Fleet, lease: Lease) -> None:
    record = on_terms(lease.record, fleet.environment.home) or lease.record
    await fleet.prompts.forget(record.ref)
    files = HostFiles(fleet.environment.home, record.ref)
    attempts = record.attempt - files.excused(record.epoch, record.turn)
    if record.fail_code:
        checkpoint_of(replace(record, step="idle")).write(files.checkpoint)
        await lifecycle.fail(fleet, record, record.fail_code, record.error, token=lease.token)
        metrics.count_turn(fleet, record, attempts)
        files.forget_excused()
        return
    closed = consumed(record)
    checkpoint_of(closed).write(files.checkpoint)
    if await fleet.records.transition(
        record,
        "turn_closed",
        token=lease.token,
        release=True,
        consumed_ids=record.turn_items,
        consumed_at=closed.consumed_at,
        consumed=closed.consumed,
    ):
        metrics.count_turn(fleet, record, attempts)
        files.forget_excused()


async def _say(fleet: Fleet, lease: Lease, said: int, item: items.Item) -> int:
    if _was_said(fleet, lease.record, item):
        # Whoever said it had lost its lease by then, perhaps, and the thread's start had read the log before.
        ref = lease.record.ref
        if at := await fleet.at(ref.session):
            await say_again(fleet, at, ref)
        return said
    emitter = Emitter(fleet, lease, said)
    try:
        await emitter.emit(item)
        return emitter.said
    finally:
        emitter.close()


def _was_said(fleet: Fleet, record: Record, item: items.Item) -> bool:
    """Whether an earlier epoch has said it: Redis was lost in this step, and the thread's start posted it from the log.

    Epochs and `began_ms` are times of Redis; a turn that began in its own epoch need not read the log.
    """
    if record.began_ms >= record.epoch:
        return False
    said = HostFiles(fleet.environment.home, record.ref).said_in(record.turn)
    kinds = [entry["item"]["metadata"].get("type") for entry in said if entry["epoch"] < record.epoch]
    return item["metadata"]["type"] in kinds


@asynccontextmanager
async def _step(fleet: Fleet, ref: ThreadRef, epoch: int, turn: int, step: Step) -> AsyncIterator[Lease | None]:
    """Hold the lease of a short step, renewed as long as the step takes. None: it is not to be done here and now."""
    record = await fleet.records.read(ref)
    due = (record.epoch, record.turn, record.step, record.host) == (epoch, turn, step, fleet.host)
    lease = await fleet.leases.take(record) if due else None
    if lease is None:
        yield None
        return
    async with fleet.leases.kept(lease):
        behind = await lapse.recovered(fleet, record)
        try:
            yield None if behind else lease
        except LeaseLostError as error:
            metrics.count_lost_lease(fleet, record)
            log.warning("%s: %s", ref, error)
        except HostUnwritableError as error:
            await say_unwritable(fleet, record, error)
    if behind:
        await lifecycle.dispatch(fleet, await fleet.records.read(ref))
