"""A rolling upgrade: every process is restarted in its turn, while threads are at work."""

from __future__ import annotations

from pathlib import Path

import psutil
from celery import Celery

from fleet.formats import FORMAT
from fleet.sandbox.redis_server import start_redis
from tests.fleet.harness import PATIENCE_S, FleetUnderTest, brief, fleet_under_test, kind
from tests.support import wait_until
from tests.wire.stage import Sandbox


def main_process(fleet: FleetUnderTest, name: str) -> psutil.Process | None:
    """The process with the word `name` in its command that the fleet's supervisor runs."""
    ours = [child for child in psutil.Process().children() if fleet.is_of(child)]
    return next((process for process in ours if name in process.cmdline()), None)


def restart(fleet: FleetUnderTest, name: str) -> None:
    """Ask a process to end, as an upgrade does, and wait until its supervisor has started the next one."""
    before = main_process(fleet, name)
    assert before is not None
    before.terminate()

    def is_new() -> bool:
        fleet.supervisor.check()
        now = main_process(fleet, name)
        return now is not None and now.pid != before.pid

    wait_until(is_new, PATIENCE_S, f"{name} does not come back")


def test_a_rolling_restart_under_load_loses_and_doubles_nothing(tmp_path: Path):
    with start_redis(tmp_path / "redis") as server, fleet_under_test(tmp_path, server) as fleet:
        sandbox = Sandbox(fleet.platform)
        fleet.person.hand_over("asks", fleet.folder("asks"), "ask me", permissions="approval")
        fleet.await_said("asks", "Which?")
        for alias, root in (("one", fleet.alpha), ("two", fleet.beta)):
            fleet.person.hand_over(alias, fleet.folder(alias, root), "step by step")
            fleet.await_said(alias, "step 3")
        fleet.person.hand_over("full", fleet.folder("full"), "many")
        fleet.await_said("full", "line 0")
        sandbox.conditions(faults=[{"kind": "500_before", "rate": 1.0}])

        for name in ("beat", "io@alpha", "turns@alpha", "io@beta", "turns@beta"):
            restart(fleet, name)

        sandbox.conditions(faults=[])
        sandbox.close()
        fleet.person.say("asks", "Blue")
        for alias, expected in {
            "one": [f"step {n}" for n in range(40)],
            "two": [f"step {n}" for n in range(40)],
            "full": [f"line {n}" for n in range(200)],
            "asks": ["chose Blue"],
        }.items():
            said = fleet.await_turns(alias)
            assert [brief(item) for item in said if kind(item) == "text"] == expected
            assert [kind(item) for item in said].count("turn_end") == 1
        assert [kind(item) for item in fleet.said("asks")].count("pending_prompt_resolved") == 1


def test_a_message_of_a_newer_release_is_left_to_its_workers(fleet: FleetUnderTest):
    fleet.person.hand_over("marked", fleet.folder("marked"), "hello")
    fleet.await_turns("marked")
    epoch = fleet.record("marked").epoch
    app = Celery(broker=fleet.config.redis.url)
    app.conf.broker_transport_options = {"global_keyprefix": f"{fleet.config.redis.namespace}:celery:"}
    message = {"args": [fleet.platform.session_id, "marked"], "kwargs": {"force": True}, "queue": "fleet"}
    with app:
        app.send_task("fleet.activate", **message, headers={"fleet_format": FORMAT + 1}, ignore_result=True)
    logs = [fleet.base / "home" / "logs" / f"io-{host}.log" for host in ("alpha", "beta")]
    wait_until(lambda: any("format_newer" in log.read_text() for log in logs), PATIENCE_S, "the message is not refused")
    assert fleet.record("marked").epoch == epoch
    with app:
        app.send_task("fleet.activate", **message, headers={"fleet_format": FORMAT}, ignore_result=True)
    wait_until(lambda: fleet.record("marked").epoch > epoch, PATIENCE_S, "the message is not taken")
