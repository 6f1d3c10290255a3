"""The way to Redis: one connection pool, the Lua scripts of `fleet/lua` by name, and the keys of a namespace."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from math import inf
from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fleet.refs import SessionKeys, ThreadKeys, ThreadRef

#: Seconds to wait for Redis in one call. Longer than any pause of a healthy Redis, shorter than a lease.
TIMEOUT_S = 5.0
#: Attempts of one call. Every script is idempotent or fenced, so that a lost answer may be asked for again.
RETRIES = 2


class Store:
    """Redis as the fleet uses it. One per event loop."""

    def __init__(self, url: str, namespace: str) -> None:
        self.namespace = namespace
        self.redis: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), RETRIES),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
        )
        self._scripts: dict[str, AsyncScript] = {}

    async def close(self) -> None:
        """Close all connections."""
        await self.redis.aclose()

    def thread(self, ref: ThreadRef) -> ThreadKeys:
        """Return the keys of a thread."""
        return ThreadKeys.of(self.namespace, ref)

    def session(self, session: str) -> SessionKeys:
        """Return the keys of a session."""
        return SessionKeys.of(self.namespace, session)

    def key(self, *parts: str) -> str:
        """Return a key that belongs to no session."""
        return ":".join((self.namespace, *parts))

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | int]) -> Any:
        """Run `fleet/lua/SCRIPT.lua`; what it takes and returns stands at its head."""
        if script not in self._scripts:
            text = files("fleet").joinpath("lua", f"{script}.lua").read_text()
            self._scripts[script] = self.redis.register_script(text)
        return await self._scripts[script](keys=list(keys), args=list(args))

    async def hash(self, key: str) -> dict[str, str]:
        """Return a whole hash."""
        return cast("dict[str, str]", await self.redis.hgetall(key))

    async def put(self, key: str, fields: dict[str, str]) -> None:
        """Set fields of a hash."""
        await self.redis.hset(key, items=[part for pair in fields.items() for part in pair])

    async def members(self, key: str) -> set[str]:
        """Return a whole set."""
        return cast("set[str]", await self.redis.smembers(key))

    async def scores(self, key: str, until: float = inf, limit: int = -1) -> dict[str, float]:
        """Return the members of a sorted set with scores up to `until`, at most `limit` of them, lowest first."""
        rows = await self.redis.zrangebyscore(key, "-inf", until, start=0, num=limit, withscores=True)
        return dict(cast("list[tuple[str, float]]", rows))

    async def journal_depth(self, ref: ThreadRef) -> int:
        """Return how many entries wait in a thread's journal."""
        return int(await self.redis.xlen(self.thread(ref).journal))

    async def now_ms(self) -> int:
        """Return Redis's own time: the one clock that all hosts share."""
        seconds, micros = await self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000
