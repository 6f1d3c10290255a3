"""The way to Redis: one connection pool, the Lua scripts of `fleet/lua` by name, and the keys of a namespace."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from math import inf
from typing import Any, cast

import redis.asyncio
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelManagedConnection
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fleet.refs import SessionKeys, ThreadKeys, ThreadRef
from fleet.urls import sentinel_url

#: Seconds to wait for Redis in one call. Longer than any pause of a healthy Redis, shorter than a lease.
TIMEOUT_S = 5.0
#: Attempts of one call. Every script is idempotent or fenced, so that a lost answer may be asked for again.
RETRIES = 2
#: Seconds to wait for a Sentinel before the next one is asked: a primary may be gone with the machine of a Sentinel.
SENTINEL_TIMEOUT_S = 1.0
#: What a Redis says that is no longer the primary, or is cut off from its replicas: another one may be by now.
NOT_PRIMARY = ("READONLY", "NOREPLICAS")


class _Sentinels(Sentinel):
    """Sentinels that are asked in turn, the one that knew the primary last first.

    redis-py swaps them in place, and forgets one for good when two connections ask at the same time.
    """

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return host and port of the primary.

        Raises:
            MasterNotFoundError: no Sentinel knows it. It is a `ConnectionError` of redis-py.
        """
        known = tuple(self.sentinels)
        try:
            return cast("tuple[str, int]", await super().discover_master(service_name))
        except MasterNotFoundError:
            # Its own message has all options of all connections.
            why = f"no Sentinel answers that knows a primary {service_name!r} which is up"
            raise MasterNotFoundError(why) from None
        finally:
            first = self.sentinels[0]
            self.sentinels = [first, *(one for one in known if one is not first)]


class _ToPrimary(SentinelManagedConnection):
    """A connection to whoever is the primary at the time."""

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        """Send a command. redis-py would repeat one that has failed at the old address, without asking a Sentinel."""
        ask_and_connect: Any = self.connect  # redis-py gives it no types
        if not self.is_connected:
            await ask_and_connect()
        await super().send_packed_command(*args, **options)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Return an answer. A refusal for being no primary is a lost connection, also when a script is refused."""
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            if not any(word in str(error) for word in NOT_PRIMARY):
                raise
            await self.disconnect()
            raise RedisConnectionError(str(error)) from error


class _ToPrimaryByTls(_ToPrimary, SSLConnection):
    """The same by TLS."""


def _connected(url: str) -> tuple[redis.asyncio.Redis, Sentinel | None]:
    """Return the client of the Redis at `url`, and the Sentinels that it asks."""
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), RETRIES),
        "retry_on_error": [RedisConnectionError, RedisTimeoutError],
    }
    at = sentinel_url(url)
    if at is None:
        return redis.asyncio.Redis.from_url(url, **options), None
    tls: dict[str, Any] = {} if at.tls is None else {"ssl": True, **at.tls}
    asking: Any = _Sentinels  # redis-py gives its constructor no types
    sentinels: Sentinel = asking(
        at.sentinels,
        sentinel_kwargs={
            "password": at.sentinel_password,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),
            **tls,
        },
        connection_class=_ToPrimaryByTls if tls else _ToPrimary,
        db=at.db,
        username=at.username,
        password=at.password,
        **options,
        **tls,
    )
    return cast("redis.asyncio.Redis", sentinels.master_for(at.master)), sentinels


class Store:
    """Redis as the fleet uses it. One per event loop."""

    def __init__(self, url: str, namespace: str) -> None:
        self.namespace = namespace
        self.redis, self._sentinels = _connected(url)
        self._scripts: dict[str, AsyncScript] = {}

    async def close(self) -> None:
        """Close all connections."""
        await self.redis.aclose()
        if self._sentinels is not None:
            await self._sentinels.aclose()

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
