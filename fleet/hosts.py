"""The machines of the fleet: their heartbeats, and who owns a work folder.

Key `NS:hosts` (set): names that ever registered. Key `NS:host:NAME` (hash): the last heartbeat, the Redis time in ms
until which it counts, and the run of Redis that took it; its one writer is the short-work worker of that host. Its
field `draining`, there or not, is written by operators' commands alone. Key `NS:host:NAME:turns` (sorted set): thread
→ Redis time in ms until which its turn is known to run there; written by the turn's process. Keys
`NS:host:NAME:folder:PATH` and `NS:host:NAME:line:PATH`: see `folder_enter.lua`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from fleet.refs import ThreadRef
from fleet.store import Store

#: Seconds between two heartbeats, and after how many without one a host counts as away.
HEARTBEAT_S = 2
HEARTBEATS_MISSED = 4


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as its heartbeat describes it. `roots` are its work folder roots, as configured and as resolved.

    `draining`: an operator has asked that no turn begins there.
    """

    name: str
    work_folders: tuple[str, ...]
    roots: tuple[str, ...]
    max_agents: int
    agents: tuple[str, ...]
    version: str
    alive: bool = True
    running: int = 0
    draining: bool = False

    @property
    def takes_turns(self) -> bool:
        """Whether turns may begin there."""
        return self.alive and not self.draining

    @property
    def free(self) -> int:
        """Places for turns that are not taken."""
        return self.max_agents - self.running


def resolved_roots(work_folders: Iterable[str]) -> tuple[str, ...]:
    """Return the configured roots together with the real paths that they have on this machine."""
    return tuple(dict.fromkeys(root for folder in work_folders for root in (folder, str(Path(folder).resolve()))))


def _depth_under(work_folder: PurePosixPath, host: Host) -> int:
    roots = (PurePosixPath(root) for root in host.roots)
    return max((len(root.parts) for root in roots if work_folder.is_relative_to(root)), default=0)


def owner(work_folder: str, hosts: Iterable[Host], current: str = "") -> str | None:
    """Return the name of the live host that owns `work_folder`: the longest matching root wins.

    Between hosts with the same root, `current` (who already holds the thread) wins, else the one with more free
    places, else the first by name. While `current` is away but could own the folder, nobody else does: the agent's
    session is there.
    """
    path = PurePosixPath(work_folder)
    if ".." in path.parts:
        return None
    candidates = [(depth, host) for host in hosts if (depth := _depth_under(path, host))]
    longest = max((depth for depth, _ in candidates), default=0)
    best = [host for depth, host in candidates if depth == longest]
    holding = [host for host in best if host.name == current]
    if holding:
        return current if holding[0].takes_turns else None
    alive = [host for host in best if host.takes_turns]
    return min(alive, key=lambda host: (-host.free, host.name)).name if alive else None


class Hosts:
    """Registers hosts and reads who is there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._drained: bool | None = None

    def _key(self, name: str, *more: str) -> str:
        return self._store.key("host", name, *more)

    async def beat(self, host: Host) -> bool:
        """Write a host's heartbeat. Returns whether what waits for it should be looked at.

        That is so when this process has just begun, the host was away or drained, or has other roots than before, and
        when Redis was started again or another one has taken over.
        """
        text = json.dumps(asdict(host) | {"alive": True, "running": 0, "draining": False})
        now = await self._store.now_ms()
        run: str = (await self._store.redis.info("server"))["run_id"]
        before = await self._store.hash(self._key(host.name))
        async with self._store.redis.pipeline() as pipe:
            pipe.sadd(self._store.key("hosts"), host.name)
            until = now + HEARTBEAT_S * HEARTBEATS_MISSED * 1000
            pipe.hset(self._key(host.name), mapping={"host": text, "until": until, "run": run})
            await pipe.execute()
        draining = "draining" in before
        begins = self._drained is None or (self._drained and not draining)
        self._drained = draining
        same = (before.get("host"), before.get("run")) == (text, run)
        return begins or not same or int(before["until"]) < now

    async def leave(self, name: str) -> None:
        """Say that a host stops on purpose: it counts as away at once."""
        await self._store.redis.hset(self._key(name), "until", "0")

    async def drain(self, name: str) -> None:
        """Let no turn begin on a host until `undrain`. Written by an operator's command alone."""
        await self._store.redis.hset(self._key(name), "draining", "1")

    async def undrain(self, name: str) -> None:
        """Let turns begin again; what waited begins with the host's next heartbeat."""
        await self._store.redis.hdel(self._key(name), "draining")

    async def is_draining(self, name: str) -> bool:
        """Whether no turn may begin on a host."""
        return bool(await self._store.redis.hexists(self._key(name), "draining"))

    async def all(self) -> list[Host]:
        """Return every host that ever registered, by name."""
        names = sorted(await self._store.members(self._store.key("hosts")))
        now = await self._store.now_ms()
        async with self._store.redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(self._key(name))
                pipe.zcount(self._key(name, "turns"), now, "+inf")
            answers = await pipe.execute()
        return [
            _host(fields, alive=int(fields["until"]) > now, running=running, draining="draining" in fields)
            for fields, running in zip(answers[::2], answers[1::2], strict=True)
            if "host" in fields
        ]

    async def running(self, name: str) -> list[ThreadRef]:
        """Return the threads whose turns run on a host."""
        now = await self._store.now_ms()
        rows = await self._store.redis.zrangebyscore(self._key(name, "turns"), now, "+inf")
        return [ThreadRef(*str(row).split("/", 1)) for row in rows]

    async def turn_runs(self, name: str, folder: str, ref: ThreadRef, ttl_ms: int, per_folder: int) -> bool:
        """Count a turn as running on host `name`, in `folder`, for `ttl_ms` from now.

        Returns False when `per_folder` (0: no limit) turns run in the folder already; then the thread waits in line.
        """
        if not await self._store.run(
            "folder_enter",
            [self._key(name, "folder", folder), self._key(name, "line", folder)],
            [str(ref), per_folder, ttl_ms],
        ):
            return False
        until = await self._store.now_ms() + ttl_ms
        await self._store.redis.zadd(self._key(name, "turns"), {str(ref): until})
        return True

    async def turn_over(self, name: str, folder: str, ref: ThreadRef) -> ThreadRef | None:
        """Stop counting a turn, and return the thread that is first in line for a place in the folder."""
        now = await self._store.now_ms()
        async with self._store.redis.pipeline() as pipe:
            pipe.zrem(self._key(name, "turns"), str(ref))
            pipe.zremrangebyscore(self._key(name, "turns"), "-inf", now)
            pipe.zrem(self._key(name, "folder", folder), str(ref))
            pipe.zrange(self._key(name, "line", folder), 0, 0)
            line = (await pipe.execute())[-1]
        return ThreadRef(*line[0].split("/", 1)) if line else None

    async def leave_line(self, name: str, folder: str, ref: ThreadRef) -> None:
        """Give up waiting for a place in a folder."""
        await self._store.redis.zrem(self._key(name, "line", folder), str(ref))


def _host(fields: dict[str, str], *, alive: bool, running: int, draining: bool) -> Host:
    value = json.loads(fields["host"])
    return Host(
        name=value["name"],
        work_folders=tuple(value["work_folders"]),
        roots=tuple(value["roots"]),
        max_agents=value["max_agents"],
        agents=tuple(value["agents"]),
        version=value["version"],
        alive=alive,
        running=running,
        draining=draining,
    )
