"""Hosts whose clocks are hours apart or set back, and a host that sleeps in the middle of a turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import psutil
import pytest
import redis

from agents.scripted_player import CLASH
from fleet.broker import FLEET_QUEUE, QUEUE_MAX
from tests.fleet.faulty import Faults, faulty_fleet
from tests.fleet.faulty.visit import SAID, briefs, kinds, outcome, visit
from tests.fleet.harness import LEASE_S, PATIENCE_S, FleetUnderTest, brief, kind
from tests.support import wait_until

HOUR_S = 3600.0
#: Seconds for which a host sleeps: many times the life of a lease.
ASLEEP_S = 20.0
#: The longest that any of these turns can take in ms, on a busy machine.
TURN_MAX_MS = 120_000


@pytest.fixture(scope="module")
def apart(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FleetUnderTest, Faults]]:
    """A running fleet: beat is an hour behind Redis and the platform, alpha an hour ahead, beta right."""
    clocks = {"beat": -HOUR_S, "alpha": HOUR_S}
    with faulty_fleet(tmp_path_factory.mktemp("apart"), clocks=clocks) as running:
        yield running


def logged_at(fleet: FleetUnderTest, name: str) -> datetime:
    """The time in the newest line of a process's log that begins with one."""
    lines = (fleet.base / "home" / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
    stamps = [line[:19] for line in lines if line[:2] == "20" and line[10:11] == " "]
    return datetime.fromisoformat(stamps[-1])


def test_threads_run_on_hosts_whose_clocks_are_an_hour_apart(apart: tuple[FleetUnderTest, Faults]):
    fleet, _ = apart
    assert 0.9 * HOUR_S < (logged_at(fleet, "io-alpha") - logged_at(fleet, "io-beta")).total_seconds() < 1.1 * HOUR_S
    for alias in visit(fleet, "apart"):
        found = outcome(fleet, alias)
        assert kinds(found["items"]) == SAID
        assert found["record"] == ["end", "completed", 1]
        for end in fleet.turn_ends(alias):
            assert 0 <= end["metadata"]["stats"]["duration_ms"] < TURN_MAX_MS


def test_a_clock_that_is_set_back_by_hours_stops_nothing(apart: tuple[FleetUnderTest, Faults]):
    fleet, faults = apart
    fleet.person.hand_over("back", fleet.folder("back"), "step by step")
    fleet.await_said("back", "step 3")
    faults.set(clocks={"beat": -3 * HOUR_S, "alpha": -2 * HOUR_S, "beta": HOUR_S})
    assert_steps_once(fleet, "back")
    fleet.person.say("back", "hello after that")
    assert "You said: hello after that" in briefs(fleet.await_turns("back", 2))


def test_beat_sends_no_more_than_fits_while_nobody_takes_its_messages(apart: tuple[FleetUnderTest, Faults]):
    fleet, _ = apart
    queue = f"{fleet.config.redis.namespace}:celery:{FLEET_QUEUE}"
    with redis.Redis.from_url(str(fleet.config.redis.url)) as client, asleep(fleet, "alpha"), asleep(fleet, "beta"):
        fleet.send("fleet.poll", copies=QUEUE_MAX)
        for _ in range(2):
            client.ltrim(queue, 0, QUEUE_MAX - 4)
            wait_until(lambda: client.llen(queue) >= QUEUE_MAX, PATIENCE_S, "beat sends nothing")
            assert client.llen(queue) == QUEUE_MAX
        client.delete(queue)
    fleet.person.hand_over("later", fleet.folder("later"), "hello")
    fleet.await_turns("later")


def test_a_host_that_sleeps_in_a_turn_goes_on_with_it_when_it_wakes(fleet: FleetUnderTest):
    folder = fleet.folder("asleep", fleet.base / "gamma")
    with fleet.also(*fleet.host_children("gamma")):
        fleet.person.hand_over("asleep", folder, "step by step")
        fleet.await_said("asleep", "step 5")
        with asleep(fleet, "gamma"):
            until = time.monotonic() + ASLEEP_S
            fleet.person.hand_over("awake", fleet.folder("awake"), "hello")
            fleet.await_turns("awake")
            assert fleet.agents_alive(folder)
            wait_until(lambda: time.monotonic() > until, ASLEEP_S + LEASE_S)
            assert not fleet.turn_ends("asleep")
        assert_steps_once(fleet, "asleep")
        assert "recovering" in [item["metadata"].get("status") for item in fleet.said("asleep")]
        wait_until(lambda: not fleet.agents_alive(folder), PATIENCE_S, "an agent is left")


@contextmanager
def asleep(fleet: FleetUnderTest, host: str) -> Iterator[None]:
    """Stop all processes of a host, agents too, for the time of the body."""
    mains = [
        process
        for process in psutil.Process().children()
        if fleet.is_of(process) and {f"io@{host}", f"turns@{host}"}.intersection(process.cmdline())
    ]
    processes = [*mains, *(below for main in mains for below in main.children(recursive=True))]
    assert len(mains) == 2
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def assert_steps_once(fleet: FleetUnderTest, alias: str) -> None:
    said = fleet.await_turns(alias)
    assert [brief(item) for item in said if kind(item) == "text"] == [f"step {n}" for n in range(40)]
    assert brief(said[-1]) == "Turn complete"
    assert [kind(item) for item in said].count("turn_end") == 1
    assert CLASH not in str(said)
