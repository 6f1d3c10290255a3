"""A Redis that dies, forgets, falls back, stands still or is full: the fleet at work loses and doubles nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from fleet.envelope import new_thread, with_state
from fleet.hostfiles import Checkpoint, HostFiles
from fleet.refs import ThreadRef
from fleet.sandbox.redis_server import INHERITED, PreparedRedis, answers, prepare_redis
from fleet.supervisor import dying_with_parent, open_log
from tests.fleet.harness import HOLD_S, LEASE_S, PATIENCE_S, FleetUnderTest, brief, fleet_under_test, kind
from tests.support import wait_until
from tests.wire.stage import Sandbox

Json = dict[str, Any]

#: Files of the data folder that are not data.
NOT_DATA = ("redis.conf", "redis.lock", "redis.log")
#: Seconds for which Redis stands still: ten lives of a lease.
ASLEEP_S = 10 * LEASE_S
#: Seconds for which Redis refuses to take anything: longer than the life of a lease.
FULL_S = LEASE_S + 1
#: Bytes that a full Redis has left: a few items.
LEFT_BYTES = 64 * 1024
#: Tracebacks that a full Redis may leave in all logs: each of five processes may have its one, of a chain of errors.
TRACEBACKS_MAX = 20
#: The answer of a platform that takes no item just now.
HELD = [{"match": "post_session_thread_item", "kind": "429"}]
#: Kinds of items that the script or a person is the cause of, and the statuses that a fault explains.
KINDS = ("text", "pending_prompt", "pending_prompt_resolved", "artifacts_published", "turn_end")
EXPLAINED = {"recovering", "no_host"}

ASK = """ask:
          kind: ask_user_question
          questions: [{question: "Which?", header: Choice, options: [{label: Red, description: ""}]}]"""
SCRIPT = f"""
turns:
  - match: "steps"
    events: [{{repeat: {{times: 40, events: [{{text: "step {{i}}"}}, {{sleep: 0.1}}]}}}}]
  - match: "pause"
    events: [{{text: "pausing"}}, {{sleep: 1.5}}, {{write: {{path: out/plan.md, text: plan}}}}, {{text: "paused"}}]
  - match: "ask later"
    events:
      - text: "thinking"
      - sleep: 1
      - {ASK}
      - text: "chose {{answer}}"
  - match: "ask"
    events:
      - {ASK}
      - text: "chose {{answer}}"
  - match: ""
    events: [{{text: "said {{prompt}}"}}]
"""
STEPS = [f"step {n}" for n in range(40)]
DONE, PUBLISHED = "Turn complete", "Published 1 artifact(s), skipped 0"
ASKED, ANSWERED = "Which?\n1. Red", "✓ Answered: Red"


class Server:
    """A Redis that keeps port and password, whatever happens to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prepared: PreparedRedis = prepare_redis(folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open_log(self.folder / "redis.log") as output:
            self._process = subprocess.Popen(
                dying_with_parent(self.prepared.argv),
                env={name: os.environ[name] for name in INHERITED if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(self.prepared.lock_fd,),
            )
        wait_until(lambda: answers(self.prepared.url), PATIENCE_S, "Redis does not answer")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Let Redis have no memory left: it refuses to take anything, and evicts nothing."""
        with redis.Redis.from_url(self.prepared.url) as client:
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", used + LEFT_BYTES)
            try:
                with suppress(redis.exceptions.OutOfMemoryError):
                    while True:
                        client.append("ballast", bytes(LEFT_BYTES))
                yield
            finally:
                client.config_set("maxmemory", 0)
                client.delete("ballast")

    def copy(self, to: Path) -> None:
        """Copy the data while the server writes: a cut last command is left out when it is loaded."""
        shutil.copytree(self.folder, to, ignore=shutil.ignore_patterns(*NOT_DATA))

    def wipe(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in NOT_DATA:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def put_back(self, copy: Path) -> None:
        self.wipe()
        shutil.copytree(copy, self.folder, dirs_exist_ok=True)


@dataclass
class Ordeal:
    """A fleet, its Redis, the platform's weather, and what a person has said and must be told."""

    fleet: FleetUnderTest
    server: Server
    sandbox: Sandbox = field(repr=False)

    def hand_over(self, alias: str, text: str, *, host: str = "alpha", publish: bool = False) -> None:
        folder = self.fleet.folder(alias, self.fleet.base / host)
        value = new_thread(str(folder), "scripted", "autonomous")
        if publish:
            value["thread"]["metadata"]["artifacts"] = {"prefix": f"published/{alias}/", "source": "out"}
        self.fleet.person.put(alias, value)
        self.fleet.person.say(alias, text)
        self.fleet.person.put(alias, with_state(value, "pending"))

    def files(self, alias: str) -> HostFiles:
        home = self.fleet.base / "home"
        ref = ThreadRef(self.fleet.platform.session_id, alias)
        hosts = (home / "hosts" / name for name in ("alpha", "beta"))
        found = [files for files in (HostFiles(host, ref) for host in hosts) if files.folder.exists()]
        return found[0] if found else HostFiles(home, ref)

    def logged(self, alias: str) -> list[str]:
        """What the host's log of a thread says was said, stored or not."""
        return [brief(entry["item"]) for entry in self.files(alias).said()]

    def until(self, condition: Callable[[], object], what: str | Callable[[], str]) -> None:
        """Wait for a condition, and meanwhile start again what died, as `fleet up` and `fleet host` do."""

        def met() -> object:
            self.fleet.supervisor.check()
            return condition()

        wait_until(met, PATIENCE_S, what)

    def await_logged(self, alias: str, text: str, times: int = 1) -> None:
        self.until(lambda: self.logged(alias).count(text) >= times, lambda: f"no {text!r}: {self.where(alias)}")

    def await_step(self, alias: str, turn: int, step: str) -> None:
        def there() -> bool:
            record = self.fleet.record(alias)
            return (record.turn, record.step) == (turn, step)

        self.until(there, lambda: f"not at {step} of turn {turn}: {self.where(alias)}")

    def await_told(self, alias: str, text: str, times: int = 1) -> None:
        self.until(lambda: self.words(alias).count(text) >= times, lambda: f"no {text!r}: {self.where(alias)}")

    def where(self, alias: str) -> str:
        said = [brief(item) for item in self.fleet.said(alias)]
        return f"{alias}: said {said}, logged {self.logged(alias)}, {self.fleet.record(alias)}"

    def agent_session(self, alias: str) -> str:
        return Checkpoint.read(self.files(alias).checkpoint).agent_session

    def words(self, alias: str) -> list[str]:
        return [brief(item) for item in self.fleet.said(alias) if kind(item) in KINDS]

    def assert_told(self, told: dict[str, list[str]]) -> None:
        """Wait for the turns of threads, let each hear one more message, and compare all that was said in them."""
        for alias, words in told.items():
            self.await_told(alias, DONE, words.count(DONE))
        sessions = {alias: self.agent_session(alias) for alias in told}
        for alias in told:
            self.fleet.person.say(alias, "bye")
        for alias, words in told.items():
            self.await_told(alias, DONE, words.count(DONE) + 1)
        for alias, words in told.items():
            last = ["said bye", *(word for word in words if word == PUBLISHED), DONE]
            assert self.words(alias) == [*words, *last], self.where(alias)
            said = self.fleet.said(alias)
            assert {item["metadata"]["status"] for item in said if kind(item) == "status"} <= EXPLAINED
            assert "another scripted agent" not in str(said)
            assert _twice(said) == []
            assert self.agent_session(alias) == sessions[alias]
        audits = self.fleet.worker.items("worker")
        assert _twice([each for each in audits if each["metadata"].get("thread", {}).get("alias") in told]) == []

    def tracebacks(self) -> int:
        logs = (self.fleet.base / "home" / "logs").iterdir()
        return sum(log.read_text(errors="replace").count("Traceback") for log in logs)


def _twice(items: list[Json]) -> list[Json]:
    """Return the metadata of what was posted more than once."""
    metadata = [item["metadata"] for item in items]
    times = Counter(each.get("post_id") for each in metadata)
    return [each for each in metadata if times[each.get("post_id")] > 1]


@pytest.fixture
def ordeal(running: Ordeal) -> Iterator[Ordeal]:
    """A running fleet, in fair weather afterwards."""
    yield running
    running.sandbox.conditions(faults=[])


@pytest.fixture(scope="module")
def running(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ordeal]:
    """A running fleet of two hosts on a Redis of its own."""
    base = tmp_path_factory.mktemp("ordeal")
    script = base / "ordeal.yaml"
    script.write_text(SCRIPT)
    agent = {"script": str(script), "permissions": "autonomous", "hold_s": HOLD_S}
    server = Server(base / "redis")
    try:
        server.start()
        more = {"agents": {"scripted": agent}, "concurrency": {"max_agents": 6}}
        with fleet_under_test(base, server.prepared, **more) as fleet:
            sandbox = Sandbox(fleet.platform)
            try:
                yield Ordeal(fleet, server, sandbox)
            finally:
                sandbox.close()
    finally:
        server.kill()
        os.close(server.prepared.lock_fd)


def test_a_redis_that_is_killed_in_a_turn_goes_on_with_what_it_had(ordeal: Ordeal):
    ordeal.hand_over("killed", "steps")
    ordeal.await_logged("killed", "step 5")
    ordeal.server.kill()
    ordeal.server.start()
    ordeal.assert_told({"killed": [*STEPS, DONE]})


def test_a_redis_that_comes_back_empty_is_filled_from_hosts_and_platform(ordeal: Ordeal):
    ordeal.hand_over("empty/runs", "hello")
    ordeal.hand_over("empty/parked", "ask")
    ordeal.hand_over("empty/idle", "hello", host="beta")
    ordeal.hand_over("empty/waits", "hello", host="gamma")
    ordeal.await_told("empty/runs", DONE)
    ordeal.await_told("empty/idle", DONE)
    ordeal.await_step("empty/parked", 1, "idle")
    ordeal.until(lambda: ordeal.fleet.said("empty/waits"), "nobody says that gamma is away")
    ordeal.hand_over("empty/publishes", "pause", host="beta", publish=True)
    ordeal.await_logged("empty/publishes", "pausing")
    ordeal.fleet.person.say("empty/runs", "steps")
    ordeal.await_logged("empty/runs", "step 3")
    ordeal.sandbox.conditions(faults=[*HELD, {"match": "upload_session_object", "kind": "delay", "delay_ms": 3000}])
    ordeal.await_step("empty/publishes", 1, "publish")
    begun = len(ordeal.logged("empty/runs"))
    ordeal.until(lambda: len(ordeal.logged("empty/runs")) > begun + 5, "nothing more is said")

    ordeal.server.kill()
    ordeal.server.wipe()
    ordeal.server.start()
    ordeal.sandbox.conditions(faults=[])
    ordeal.fleet.person.say("empty/parked", "Red")
    ordeal.assert_told(
        {
            "empty/runs": ["said hello", DONE, *STEPS, DONE],
            "empty/idle": ["said hello", DONE],
            "empty/publishes": ["pausing", "paused", PUBLISHED, DONE],
            "empty/parked": [ASKED, ANSWERED, "chose Red", DONE],
        }
    )
    assert ordeal.fleet.person.state("empty/waits") == "pending"


def test_a_redis_that_falls_back_a_moment_is_told_again_by_the_turn_that_runs(ordeal: Ordeal, tmp_path: Path):
    ordeal.hand_over("moment", "steps")
    ordeal.await_told("moment", "step 3")
    ordeal.server.copy(tmp_path / "older")
    ordeal.await_told("moment", "step 9")
    ordeal.server.kill()
    ordeal.server.put_back(tmp_path / "older")
    ordeal.server.start()
    ordeal.assert_told({"moment": [*STEPS, DONE]})


@pytest.mark.parametrize("lost", ["said", "unsaid"])
def test_a_redis_that_falls_back_some_seconds_loses_and_doubles_nothing(ordeal: Ordeal, tmp_path: Path, lost: str):
    """`unsaid`: what was said in the lost seconds is not stored by the platform either; only the hosts know of it."""
    told = {
        f"{lost}/begins": ["said hello", DONE, *STEPS, DONE],
        f"{lost}/passes": ["said hello", DONE, "said one more", DONE],
        f"{lost}/again": ["said hello", DONE, *STEPS, DONE],
        f"{lost}/parked": [ASKED, ANSWERED, "chose Red", DONE],
        f"{lost}/held": [ASKED, ANSWERED, "chose Red", DONE],
        f"{lost}/asks": ["thinking", ASKED, ANSWERED, "chose Red", DONE],
        f"{lost}/runs": [*STEPS, DONE],
        f"{lost}/ends": ["pausing", "paused", PUBLISHED, DONE],
        f"{lost}/starts": [*STEPS, DONE],
    }
    begins, passes, again, parked, held, asks, runs, ends, starts = told
    ordeal.hand_over(parked, "ask", host="beta")
    for alias, host in ((begins, "alpha"), (passes, "beta"), (again, "beta")):
        ordeal.hand_over(alias, "hello", host=host)
    for alias in (begins, passes, again):
        ordeal.await_told(alias, DONE)
    ordeal.fleet.person.set_state(again, "completed")
    ordeal.await_step(again, 1, "end")
    ordeal.await_step(parked, 1, "idle")
    ordeal.hand_over(runs, "steps")
    ordeal.await_told(runs, "step 3")
    ordeal.hand_over(ends, "pause", host="beta", publish=True)
    ordeal.hand_over(asks, "ask later")
    ordeal.hand_over(held, "ask")
    for alias, word in ((held, ASKED), (ends, "pausing"), (asks, "thinking")):
        ordeal.await_told(alias, word)

    ordeal.server.copy(tmp_path / "older")
    ordeal.fleet.person.say(held, "Red")
    ordeal.fleet.person.say(parked, "Red")
    ordeal.fleet.person.say(begins, "steps")
    ordeal.fleet.person.say(passes, "one more")
    ordeal.hand_over(starts, "steps", host="beta")
    ordeal.fleet.person.say(again, "steps")
    ordeal.fleet.person.set_state(again, "pending")
    if lost == "unsaid":
        ordeal.sandbox.conditions(faults=HELD)
    ordeal.await_logged(passes, DONE, 2)
    for alias, word in ((held, "chose Red"), (parked, "chose Red"), (ends, DONE), (asks, ASKED)):
        ordeal.await_logged(alias, word)
    for alias in (begins, starts, again):
        ordeal.await_logged(alias, "step 2")
    ordeal.server.kill()
    ordeal.server.put_back(tmp_path / "older")
    ordeal.server.start()
    ordeal.sandbox.conditions(faults=[])

    ordeal.await_told(asks, ASKED)
    ordeal.fleet.person.say(asks, "Red")
    ordeal.assert_told(told)


def test_a_redis_that_stands_still_for_many_leases_holds_up_a_turn_and_ends_none(ordeal: Ordeal):
    ordeal.hand_over("asleep", "steps")
    ordeal.await_logged("asleep", "step 5")
    with ordeal.server.asleep():
        folder = ordeal.fleet.folder("asleep")
        ordeal.until(lambda: not ordeal.fleet.agents_alive(folder), "the agent works on without a lease")
        awake = time.monotonic() + ASLEEP_S
        ordeal.until(lambda: time.monotonic() > awake, "time stands still")
    ordeal.assert_told({"asleep": [*STEPS, DONE]})


def test_a_redis_that_is_full_holds_up_turns_and_messages_and_loses_none(ordeal: Ordeal):
    ordeal.hand_over("full/idle", "hello", host="beta")
    ordeal.await_told("full/idle", DONE)
    ordeal.hand_over("full/runs", "steps")
    ordeal.await_logged("full/runs", "step 5")
    tracebacks = ordeal.tracebacks()
    with ordeal.server.full():
        ordeal.fleet.person.say("full/idle", "more")
        room = time.monotonic() + FULL_S
        ordeal.until(lambda: time.monotonic() > room, "time stands still")
    ordeal.assert_told({"full/runs": [*STEPS, DONE], "full/idle": ["said hello", DONE, "said more", DONE]})
    assert ordeal.tracebacks() - tracebacks <= TRACEBACKS_MAX
