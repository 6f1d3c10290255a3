"""What a turn says: numbered, written to the host's log, then appended to the journal, in this order.

The turn is the only writer under its lease. Its numbers make every append idempotent: what an answer that was lost or
a Redis that came back older has not taken, is sent again from the log.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

from redis.exceptions import RedisError

from fleet.context import Fleet
from fleet.hostfiles import HostFiles, LogWriter, log_name
from fleet.journal import Appended, Numbered, stamped
from fleet.leases import Lease
from fleet.prompts import Prompt, prompt_of_item
from fleet.refs import post_id
from fleet.truncation import LOWER_CAP_BYTES, fit

Json = dict[str, Any]

#: Seconds between two looks at a journal that is too full.
BACKPRESSURE_PAUSE_S = 0.1
#: Items that are appended at once when they are sent again from the log.
BATCH = 100


class LeaseLostError(Exception):
    """The journal refused an append: the lease is somebody else's by now."""


class RedisBehindError(Exception):
    """Redis lacks more of what the turn has said and asked than a crash can have kept back: it has lost it."""


class Emitter:
    """Says the items of one turn, as the holder of its lease.

    `said` is the number of the last item.
    """

    def __init__(self, fleet: Fleet, lease: Lease, said: int = 0) -> None:
        self._fleet = fleet
        self._lease = lease
        self._files = HostFiles(fleet.environment.home, lease.record.ref)
        self._log = LogWriter(self._files, fleet.config.items.log_bytes)
        self.said = said

    def close(self) -> None:
        """Close the log, asking the disk to keep it."""
        self._log.close()

    async def recover(self) -> set[str]:
        """Go on behind what earlier attempts of this turn have said, and append what the journal lacks of it.

        Returns:
            The `uid`s of the agent's events that were said.

        Raises:
            LeaseLostError: somebody else holds the turn by now.
            RedisBehindError: Redis has lost more than this turn's words.
        """
        asked: Prompt | None = None
        for entry in self._logged():
            self.said = max(entry["n"], self.said)
            asked = prompt_of_item(entry["item"])
        if asked is not None and not await self._is_open(asked):
            raise RedisBehindError("the question that was said last is forgotten")
        last = (await self._journaled([])).last or 0
        if self.said > last + 1:
            raise RedisBehindError(f"the journal has {last} of {self.said} items that were said")
        await self._send_again(last)
        return {entry["uid"] for entry in self._files.said_in(self._lease.record.turn)}

    async def _is_open(self, prompt: Prompt) -> bool:
        known = await self._fleet.prompts.read(self._lease.record.ref)
        return known is not None and known.id == prompt.id

    def has_said_prompt(self, prompt_id: str, kind: str = "pending_prompt") -> bool:
        """Whether an attempt of this turn has said the question `prompt_id`, or what else `kind` names of it."""
        said = (entry["item"]["metadata"] for entry in self._files.said_in(self._lease.record.turn))
        return any(metadata.get("type") == kind and metadata["prompt"]["prompt_id"] == prompt_id for metadata in said)

    async def emit(self, item: Json | None, uid: str | None = None) -> None:
        """Say one item. None says nothing. `uid` is the event's id in the agent's own transcript.

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
        text = json.dumps(whole)
        redacted = self._fleet.redactor.json(text)
        if redacted != text:
            text, whole = redacted, json.loads(redacted)
        self._log.write(
            f'{{"epoch": {record.epoch}, "turn": {record.turn}, "n": {n}, "uid": {json.dumps(uid)}, "item": {text}}}'
        )
        self.said = n
        await self._append([await self._numbered(n, whole, text)])

    async def _numbered(self, n: int, whole: Json, text: str) -> Numbered:
        """Return an item as the journal takes it: within the budget, serialised once more only when it was not."""
        if len(text) >= LOWER_CAP_BYTES:
            budget = await self._fleet.item_budget()
            text = json.dumps(fit(whole, budget, log_name(self._lease.record.ref)))
        return Numbered(n, whole["metadata"]["post_id"], text)

    async def _append(self, items: list[Numbered]) -> None:
        record = self._lease.record
        appended = await self._journaled(items)
        if items and appended.last is not None and appended.last < items[-1].n:
            await self._send_again(appended.last)
        if appended.idle:
            await self._fleet.nudges.post_items(record.ref)
        while appended.full:
            await asyncio.sleep(BACKPRESSURE_PAUSE_S)
            appended = await self._journaled([])

    async def _journaled(self, items: list[Numbered], *, again: bool = False) -> Appended:
        """Append items, and try for as long as a lease lives when Redis is away or full."""
        record = self._lease.record
        deadline = time.monotonic() + self._lease.ttl_ms / 1000
        while True:
            try:
                appended = await self._fleet.journal.append(self._lease, record.turn, items, again=again)
            except RedisError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(BACKPRESSURE_PAUSE_S)
                continue
            if appended.last is None:
                raise LeaseLostError(f"turn {record.turn} of {record.ref} was taken over")
            return appended

    async def _send_again(self, last: int) -> None:
        """Append from the log what comes behind `last`, a few at a time.

        Redis may only have forgotten that it was posted.
        """
        batch: list[Numbered] = []
        for entry in self._logged():
            if entry["n"] > last:
                batch.append(await self._numbered(entry["n"], entry["item"], json.dumps(entry["item"])))
            if len(batch) == BATCH:
                await self._journaled(batch, again=True)
                batch = []
        if batch and (await self._journaled(batch, again=True)).idle:
            await self._fleet.nudges.post_items(self._lease.record.ref)

    def _logged(self) -> Iterator[Json]:
        record = self._lease.record
        return (entry for entry in self._files.said_in(record.turn) if entry["epoch"] == record.epoch)
