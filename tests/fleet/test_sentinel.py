"""A Redis that Sentinels watch over: when its primary dies, the fleet goes on with a replica."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fleet.errors import FleetError
from fleet.machine import free_port
from fleet.reach import check_redis
from fleet.sandbox.redis_server import find_redis_server
from fleet.store import Store
from fleet.supervisor import dying_with_parent
from tests.fleet.harness import PATIENCE_S, FleetUnderTest, brief, fleet_under_test, kind
from tests.support import POLL_S, wait_until

#: Passwords that a URL must quote.
PASSWORD, SENTINEL_PASSWORD = "p@ss/word;1", "sentinel&pass"
QUOTED, SENTINEL_QUOTED = "p%40ss%2Fword%3B1", "sentinel%26pass"
#: How many servers of each kind: what docs/deploy.md tells an operator to run.
SERVERS = 3
#: Seconds that a server may take to answer a test.
ANSWER_S = 2
#: Seconds that a killed server may take to be gone.
GONE_S = 5

REDIS = """\
bind 127.0.0.1
port {port}
requirepass "{password}"
masterauth "{password}"
dir "{folder}"
appendonly yes
save ""
min-replicas-to-write 1
repl-diskless-sync yes
repl-diskless-sync-delay 0
"""

SENTINEL = """\
bind 127.0.0.1
port {port}
dir "{folder}"
requirepass "{sentinel_password}"
sentinel sentinel-pass "{sentinel_password}"
sentinel monitor main 127.0.0.1 {primary} 2
sentinel auth-pass main "{password}"
sentinel down-after-milliseconds main 1000
sentinel failover-timeout main 5000
"""


@dataclass
class WatchedRedis:
    """A primary, two replicas and three Sentinels, each in a folder of its own that is named by its port."""

    base: Path
    ports: tuple[int, ...] = field(default_factory=lambda: tuple(free_port() for _ in range(SERVERS)))
    sentinel_ports: tuple[int, ...] = field(default_factory=lambda: tuple(free_port() for _ in range(SERVERS)))
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """What an operator would write."""
        places = ",".join(f"127.0.0.1:{port}" for port in self.sentinel_ports)
        return f"sentinel://:{QUOTED}@{places}/1?master=main&sentinel_password={SENTINEL_QUOTED}"

    def configure(self, port: int, text: str) -> None:
        folder = self.base / str(port)
        folder.mkdir(parents=True)
        values = {"password": PASSWORD, "sentinel_password": SENTINEL_PASSWORD, "primary": self.ports[0]}
        (folder / "conf").write_text(text.format(port=port, folder=folder, **values))

    def start(self, port: int) -> None:
        folder, mode = self.base / str(port), ["--sentinel"] if port in self.sentinel_ports else []
        command = dying_with_parent([str(find_redis_server()), str(folder / "conf"), *mode])
        with (folder / "log").open("ab") as log:
            self.running[port] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, port: int) -> None:
        self.running[port].kill()
        self.running[port].wait(GONE_S)

    def primaries(self) -> set[int]:
        """Who is the primary, as the Sentinels say."""
        return {state["port"] for state in self._states()}

    def await_whole(self) -> int:
        """Wait until the Sentinels know all servers and agree, and all replicas follow; return the primary's port."""
        wait_until(lambda: _true_of_servers(self._is_whole), PATIENCE_S, "the servers do not find together")
        (primary,) = self.primaries()
        return primary

    def _states(self) -> list[dict[str, int]]:
        found = []
        for port in self.sentinel_ports:
            with redis.Redis(port=port, password=SENTINEL_PASSWORD, socket_timeout=ANSWER_S) as client:
                found.append(client.sentinel_master("main"))
        return found

    def _is_whole(self) -> bool:
        states = self._states()
        if any((state["num-other-sentinels"], state["num-slaves"]) != (2, 2) for state in states):
            return False
        (primary,) = {state["port"] for state in states}
        with redis.Redis(port=primary, password=PASSWORD, socket_timeout=ANSWER_S) as client:
            said = client.info("replication")
        followers = [said[f"slave{n}"] for n in range(said["connected_slaves"])]
        return said["role"] == "master" and [one["state"] for one in followers] == ["online", "online"]

    @contextmanager
    def fault(self, name: str, primary: int) -> Iterator[None]:
        """Take the primary away for the time of the block."""
        if name == "kill":
            self.kill(primary)
        elif name == "freeze":
            self.running[primary].send_signal(signal.SIGSTOP)
        else:
            with redis.Redis(port=self.sentinel_ports[0], password=SENTINEL_PASSWORD) as client:
                client.sentinel_failover("main")
        try:
            wait_until(lambda: primary not in self.primaries(), PATIENCE_S, "the Sentinels do not switch")
            yield
        finally:
            if name == "kill":
                self.start(primary)
            self.running[primary].send_signal(signal.SIGCONT)
            wait_until(lambda: _true_of_servers(lambda: self._follows(primary)), PATIENCE_S, "it does not come back")

    def _follows(self, port: int) -> bool:
        """Tell the primary of old about the new one, ten seconds before a Sentinel would."""
        (primary,) = self.primaries()
        with redis.Redis(port=port, password=PASSWORD, socket_timeout=ANSWER_S) as client:
            return bool(client.replicaof("127.0.0.1", primary))


def _true_of_servers(look: Callable[[], bool]) -> bool:
    """Whether `look` is true; servers that are not up yet, or disagree, make it false."""
    try:
        return look()
    except (redis.RedisError, ValueError, KeyError):
        return False


@pytest.fixture(scope="module")
def watched(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedRedis]:
    servers = WatchedRedis(tmp_path_factory.mktemp("watched"))
    first, *others = servers.ports
    servers.configure(first, REDIS)
    for port in others:
        servers.configure(port, f"{REDIS}replicaof 127.0.0.1 {first}\n")
    for port in servers.sentinel_ports:
        servers.configure(port, SENTINEL)
    try:
        for port in (*servers.ports, *servers.sentinel_ports):
            servers.start(port)
        servers.await_whole()
        yield servers
    finally:
        for port in servers.running:
            servers.kill(port)


@pytest.fixture(scope="module")
def fleet(watched: WatchedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    """A fleet of its own upon the watched Redis."""
    with fleet_under_test(tmp_path_factory.mktemp("fleet"), watched) as running:
        yield running


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_turn_outlives_the_primary(watched: WatchedRedis, fleet: FleetUnderTest, fault: str):
    primary = watched.await_whole()
    fleet.person.hand_over(f"cut/{fault}", fleet.folder(f"cut-{fault}"), "step by step")
    fleet.await_said(f"cut/{fault}", "step 5")
    with watched.fault(fault, primary):
        said = fleet.await_turns(f"cut/{fault}")
        assert [brief(item) for item in said if kind(item) == "text"] == [f"step {n}" for n in range(40)]
        fleet.person.hand_over(f"after/{fault}", fleet.folder(f"after-{fault}"), "hello")
        assert brief(fleet.await_turns(f"after/{fault}")[-1]) == "Turn complete"
        assert len(fleet.turn_ends(f"cut/{fault}")) == 1


@pytest.mark.parametrize("fault", ["kill", "freeze", "switch"])
def test_a_store_goes_over_to_the_new_primary(watched: WatchedRedis, fault: str):
    primary = watched.await_whole()

    async def write(store: Store) -> int:
        """Write by a script and by a command; return where that was."""
        with suppress(RedisConnectionError, RedisTimeoutError):
            await store.run("due_add", [store.key("due"), store.key("due-at")], ["alias", "list alias", 1000])
            await store.put(store.key("hash"), {"written": "yes"})
            return int((await store.redis.info("server"))["tcp_port"])
        return primary

    async def follow() -> None:
        store = Store(watched.url, f"followed-{fault}")
        try:
            assert await write(store) == primary
            with watched.fault(fault, primary):
                async with asyncio.timeout(PATIENCE_S):
                    while await write(store) == primary:
                        await asyncio.sleep(POLL_S)
                assert await store.hash(store.key("hash")) == {"written": "yes"}
        finally:
            await store.close()

    asyncio.run(follow())


def test_a_name_that_no_sentinel_knows_is_said_without_secrets(watched: WatchedRedis):
    with pytest.raises(FleetError, match="knows a primary 'other'") as raised:
        asyncio.run(check_redis(watched.url.replace("master=main", "master=other")))
    assert raised.value.code == "redis_unreachable"
    assert not any(secret in str(raised.value) for secret in (PASSWORD, QUOTED, SENTINEL_PASSWORD, SENTINEL_QUOTED))
