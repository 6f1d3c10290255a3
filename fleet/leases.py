"""Leases: who may act on a thread's step just now.

A lease is a Redis key that expires. Its token, random per holder, is the fencing token of everything the holder
writes: a holder that was replaced, or only fell asleep for longer than its lease, is refused.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.exceptions import RedisError

from fleet.record import Record
from fleet.store import Store

#: How often a holder looks whether it should stop, in seconds. `completed` must stop a turn within two seconds.
WATCH_S = 0.25
#: A lease is renewed this many times in its life.
RENEWALS = 3


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was taken. `ttl_ms` is its life without renewal."""

    record: Record
    token: str
    ttl_ms: int


class Leases:
    """Takes, keeps and gives up the leases of steps."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self.ttl_ms = int(ttl_s * 1000)

    async def take(self, record: Record) -> Lease | None:
        """Take the lease of the step that `record` shows; None when it is held or the record is elsewhere by now."""
        token = secrets.token_hex(16)
        keys = self._store.thread(record.ref)
        answer = await self._store.run(
            "take_lease",
            [keys.record, keys.lease, keys.session.attention],
            [
                record.ref.alias,
                str(record.epoch),
                str(record.turn),
                record.step,
                token,
                self.ttl_ms,
                "1" if record.step == "run" else "",
            ],
        )
        return Lease(record, token, self.ttl_ms) if answer == "taken" else None

    async def held(self, record: Record) -> bool:
        """Whether anybody holds the lease of a thread."""
        return bool(await self._store.redis.exists(self._store.thread(record.ref).lease))

    async def release(self, lease: Lease) -> None:
        """Give a lease up."""
        await self._store.run("release_lease", [self._store.thread(lease.record.ref).lease], [lease.token])

    @asynccontextmanager
    async def kept(self, lease: Lease) -> AsyncIterator[None]:
        """Renew a lease while the body runs, and give it up afterwards. A lease that is lost fences what is written."""
        keeper = asyncio.create_task(self.keep(lease, until_stop=False))
        try:
            yield
        finally:
            keeper.cancel()
            await self.release(lease)

    async def keep(self, lease: Lease, *, until_stop: bool = True) -> str:
        """Keep a lease alive until it must be given up, and return why: `lost`, `superseded` or the reason to stop.

        With `until_stop` off, a request to stop does not end it.

        Without an answer of Redis for two thirds of the lease's life it counts as lost: somebody else may have it
        before Redis can be asked again.
        """
        keys = self._store.thread(lease.record.ref)
        ttl_s = lease.ttl_ms / 1000
        renewed = time.monotonic()
        while True:
            await asyncio.sleep(min(WATCH_S, ttl_s / RENEWALS / 2))
            asked = time.monotonic()
            renew = asked - renewed >= ttl_s / RENEWALS
            try:
                reason: str = await asyncio.wait_for(
                    self._store.run(
                        "renew_lease",
                        [keys.record, keys.lease, keys.session.attention],
                        [
                            lease.record.ref.alias,
                            str(lease.record.epoch),
                            lease.token,
                            lease.ttl_ms if renew else "",
                        ],
                    ),
                    timeout=ttl_s / RENEWALS,
                )
            except (RedisError, TimeoutError, OSError):
                if time.monotonic() - renewed > ttl_s * 2 / RENEWALS:
                    return "lost"
                continue
            if reason in ("lost", "superseded") or (reason and until_stop):
                return reason
            if renew:
                renewed = asked
