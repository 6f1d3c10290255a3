"""Processes killed in the middle of a turn: the turn goes on, nothing is lost or doubled, no process is left."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import redis

from fleet.sandbox.redis_server import start_redis
from tests.fleet.harness import PATIENCE_S, FleetUnderTest, brief, fleet_under_test, kind
from tests.support import wait_until


def ancestors(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).parents()


def pool_process(fleet: FleetUnderTest, folder: Path) -> psutil.Process:
    """The process of the turns worker that runs the agent in `folder`."""
    (agent, *_) = wait_until(lambda: fleet.agents_alive(folder), PATIENCE_S, "no agent")
    return next(process for process in ancestors(agent) if "celery" in " ".join(process.cmdline()))


def guard(fleet: FleetUnderTest, folder: Path) -> psutil.Process:
    (agent, *_) = wait_until(lambda: fleet.agents_alive(folder), PATIENCE_S, "no agent")
    candidates = [psutil.Process(agent), *ancestors(agent)]
    return next(process for process in candidates if any("guard.py" in word for word in process.cmdline()))


def assert_whole(fleet: FleetUnderTest, alias: str) -> None:
    said = fleet.await_turns(alias)
    steps = [brief(item) for item in said if kind(item) == "text"]
    assert steps == [f"step {n}" for n in range(40)]
    assert [kind(item) for item in said].count("turn_end") == 1
    assert brief(said[-1]) == "Turn complete"
    assert "recovering" in [item["metadata"].get("status") for item in said]
    assert "another scripted agent" not in str(said)


@pytest.mark.parametrize("victim", ["turn", "guard", "agent"])
def test_a_turn_goes_on_where_a_kill_cut_it_off(fleet: FleetUnderTest, victim: str):
    folder = fleet.folder(f"killed-{victim}")
    fleet.person.hand_over(f"killed/{victim}", folder, "step by step")
    fleet.await_said(f"killed/{victim}", "step 5")
    if victim == "turn":
        pool_process(fleet, folder).kill()
    elif victim == "guard":
        guard(fleet, folder).kill()
    else:
        os.kill(fleet.agents_alive(folder)[-1], signal.SIGKILL)
    assert_whole(fleet, f"killed/{victim}")
    wait_until(lambda: not fleet.agents_alive(folder), PATIENCE_S, "an agent is left")


def test_the_agent_dies_with_its_turn_process(fleet: FleetUnderTest):
    folder = fleet.folder("orphan")
    fleet.person.hand_over("orphan", folder, "long work")
    fleet.await_said("orphan", "begun")
    agents = fleet.agents_alive(folder)
    pool_process(fleet, folder).kill()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in agents), PATIENCE_S, "the agent outlives its turn")
    fleet.person.set_state("orphan", "completed")
    fleet.await_turns("orphan")


def test_a_host_that_is_killed_whole_goes_on_when_it_is_back(fleet: FleetUnderTest):
    folder = fleet.folder("dead-host", fleet.base / "gamma")
    with fleet.also(*fleet.host_children("gamma")):
        fleet.person.hand_over("dead-host", folder, "step by step")
        fleet.await_said("dead-host", "step 5")
        agents = fleet.agents_alive(folder)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if any(word in ("io@gamma", "turns@gamma") for word in process.cmdline()):
                    process.kill()
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in agents), PATIENCE_S, "the agent outlives its host")
    with fleet.also(*fleet.host_children("gamma")):
        assert_whole(fleet, "dead-host")


def test_a_host_that_is_shut_down_in_a_turn_goes_on_when_it_is_back(fleet: FleetUnderTest):
    folder = fleet.folder("restarted-host", fleet.base / "gamma")
    with fleet.also(*fleet.host_children("gamma")):
        fleet.person.hand_over("restarted-host", folder, "step by step")
        fleet.await_said("restarted-host", "step 5")
    assert not fleet.agents_alive(folder)
    assert not fleet.turn_ends("restarted-host")
    with fleet.also(*fleet.host_children("gamma")):
        assert_whole(fleet, "restarted-host")


def test_a_redis_that_is_emptied_in_a_turn_loses_and_doubles_nothing(tmp_path: Path):
    with start_redis(tmp_path / "redis") as server, fleet_under_test(tmp_path, server) as fleet:
        fleet.person.hand_over("calm", fleet.folder("calm"), "hello")
        fleet.await_turns("calm")
        fleet.person.hand_over("wiped", fleet.folder("wiped"), "step by step")
        fleet.await_said("wiped", "step 5")
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        assert_whole(fleet, "wiped")
        assert len(fleet.turn_ends("calm")) == 1
        fleet.person.say("calm", "session go on")
        assert brief(fleet.await_turns("calm", 2)[-1]) == "Turn complete"
        assert len(fleet.turn_ends("wiped")) == 1
