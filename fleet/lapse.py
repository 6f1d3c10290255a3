"""A Redis that came back older than its clients: it has lost its last moments, and a host may know more than it does.

The append-only file is written to the disk once a second, and a replica that takes over lags behind. What a host has
written down since, its checkpoint and the terms of an epoch, tells that a record is older; then the thread is started
anew from what the host has, as if Redis had forgotten all of it.
"""

from __future__ import annotations

import asyncio
import logging

from fleet.context import Fleet
from fleet.hostfiles import Checkpoint, HostFiles
from fleet.record import Record
from fleet.terms import Terms

log = logging.getLogger(__name__)

#: Steps that nobody holds a lease for.
NOT_HELD = frozenset({"wait_host", "idle", "end"})
#: How far a turn has come, by the step of its record and by that of its checkpoint; what is not named has not begun.
_RECORD = {"run": 1, "publish": 2, "close": 2, "idle": 3, "end": 3}
_CHECKPOINT = {"run": 1, "publish": 2, "": 3}


def is_behind(record: Record, checkpoint: Checkpoint, terms: Terms | None) -> bool:
    """Whether `record` is older than what a host has written down of its thread.

    A host writes down what Redis knows already, but for what a crash has kept from it: then Redis has to be told, too.
    """
    if terms is not None and terms.epoch > record.epoch:
        return True
    known = (checkpoint.epoch, checkpoint.turn, _CHECKPOINT[checkpoint.step], len(checkpoint.turn_items))
    return known > (record.epoch, record.turn, _RECORD.get(record.step, 0), len(record.turn_items))


async def recovered(fleet: Fleet, record: Record) -> bool:
    """Let a thread start anew when its record is behind what this host knows; the caller dispatches it then.

    The caller holds the lease of the record's step, or nobody need hold one: whoever does writes down what comes next
    before Redis knows it.
    """
    files = HostFiles(fleet.environment.home, record.ref)
    checkpoint = await asyncio.to_thread(Checkpoint.read, files.checkpoint)
    terms = await asyncio.to_thread(Terms.read, files)
    if not is_behind(record, checkpoint, terms):
        return False
    now = await fleet.records.read(record.ref)  # it may only have been read too early
    if not is_behind(now, checkpoint, terms):
        return False
    await start_anew(fleet, now, max(checkpoint.epoch, terms.epoch if terms else 0))
    return True


async def start_anew(fleet: Fleet, record: Record, above: int = 0) -> None:
    """Claim a new epoch of a thread for this host, whose start is to take from its files what `record` lacks.

    It is one above `above`, which this host knows of, though the clock of another Redis may be behind.
    """
    log.warning("%s: Redis has lost its last moments; the thread is started anew from what this host has", record.ref)
    # Without its turn, the record counts as older than the checkpoint (`fleet.rebuild.restored`).
    await fleet.records.claim(record, "start", above=above, host=fleet.host, turn=0)
