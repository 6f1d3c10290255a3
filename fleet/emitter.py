"""What a turn says: numbered, written to the host's log, then appended to the journal, in this order.

The turn is the only writer under its lease. Its numbers make every append idempotent: what an answer that was lost or
a Redis that came back older has not taken, is sent again from the log.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fleet.context import Fleet
from fleet.hostfiles import HostFiles, LogWriter, log_name
from fleet.journal import stamped
from fleet.leases import Lease
from fleet.refs import post_id
from fleet.truncation import fit

Json = dict[str, Any]

#: Seconds between two looks at a journal that is too full.
BACKPRESSURE_PAUSE_S = 0.1


class LeaseLostError(Exception):
    """The journal refused an append: the lease is somebody else's by now."""


class Emitter:
    """Says the items of one turn, as the holder of its lease."""

    def __init__(self, fleet: Fleet, lease: Lease, said: int = 0) -> None:
        self._fleet = fleet
        self._lease = lease
        record = lease.record
        self._files = HostFiles(fleet.environment.home, record.ref)
        self._log = LogWriter(self._files)
        self._local_log = log_name(record.ref)
        self.said = said

    def close(self) -> None:
        """Close the log, asking the disk to keep it."""
        self._log.close()

    async def recover(self) -> None:
        """Go on behind what earlier attempts of this turn have said, and append what the journal lacks of it."""
        record = self._lease.record
        entries = {entry["n"]: entry["item"] for entry in self._files.said(record.epoch, record.turn)}
        self.said = max(entries, default=0)
        if entries:
            await self._append([(n, self._fitted(entries[n])) for n in sorted(entries)])

    async def emit(self, item: Json | None) -> None:
        """Say one item. None says nothing.

        Raises:
            LeaseLostError: somebody else holds the turn by now.
            ThreadFailedError: the item can't be made to fit.
            OSError: the log does not take it.
        """
        if item is None:
            return
        record = self._lease.record
        n = self.said + 1
        whole = stamped(item, post_id(record.ref, record.epoch, record.turn, n))
        self._log.write({"epoch": record.epoch, "turn": record.turn, "n": n, "item": whole})
        self.said = n
        await self._append([(n, self._fitted(whole))])

    def _fitted(self, item: Json) -> Json:
        return fit(item, self._fleet.config.items.budget_bytes, self._local_log)

    async def _append(self, numbered: list[tuple[int, Json]]) -> None:
        turn = self._lease.record.turn
        appended = await self._fleet.journal.append(self._lease, turn, numbered)
        if appended.last is None:
            raise LeaseLostError(f"turn {turn} of {self._lease.record.ref} was taken over")
        if appended.last < numbered[-1][0]:
            await self._send_again(appended.last)
        if appended.idle:
            await self._fleet.nudges.post_items(self._lease.record.ref)
        while appended.full:
            await asyncio.sleep(BACKPRESSURE_PAUSE_S)
            appended = await self._fleet.journal.append(self._lease, turn, [])

    async def _send_again(self, last: int) -> None:
        record = self._lease.record
        missing = [
            (entry["n"], self._fitted(entry["item"]))
            for entry in self._files.said(record.epoch, record.turn)
            if entry["n"] > last
        ]
        appended = await self._fleet.journal.append(self._lease, record.turn, missing)
        if appended.last is None:
            raise LeaseLostError(f"turn {record.turn} of {record.ref} was taken over")
