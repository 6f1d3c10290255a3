"""`fleet up`, and the other commands beside it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
import yaml

from tests.fleet.programs import PATIENCE_S, Program
from tests.support import wait_until

SCRIPT = {
    "turns": [
        {
            "events": [
                {"text": "You said: {prompt}"},
                {"tool": {"name": "Bash", "input": {"command": "npm test"}, "output": "ok"}},
                {"write": {"path": "out/plan.md", "text": "the plan"}},
            ]
        }
    ]
}


def make(program: Program, *hosts: str) -> None:
    folder = program.folder
    for host in hosts:
        (folder / host).mkdir()
    config = {
        "hosts": {host: {"work_folders": [str(folder / host)], "max_agents": 1} for host in hosts},
        "polling": {"interval_idle_ms": 300, "interval_active_ms": 300},
        "agents": {"scripted": {"script": "script.yaml", "permissions": "autonomous"}},
    }
    (folder / "script.yaml").write_text(yaml.safe_dump(SCRIPT))
    (folder / "fleet.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def up(no_process_left, tmp_path_factory) -> Iterator[Program]:
    """A fleet of two hosts that is up."""
    program = Program(tmp_path_factory.mktemp("up"))
    make(program, "alpha", "beta")
    program.start("up")
    try:
        program.wait_said("fleet.activate")  # in the last line of what it says
        yield program
    finally:
        program.end()


def fleet(program: Program, *arguments: str) -> str:
    done = program.command("fleet", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(program: Program) -> dict:
    return json.loads(fleet(program, "status", "--json"))


def test_it_says_where_everything_is_and_shows_no_key(up):
    said = up.said()
    for part in ("platform http://127.0.0.1:", "alpha: ", "beta: ", str(up.folder / "home" / "logs"), "fleet status"):
        assert part in said
    keys = json.loads((up.folder / "home/platform/keys.json").read_text()).values()
    assert not [key for key in keys if key in said]
    assert "Traceback" not in said


def test_all_hosts_are_alive_and_known_with_their_folders_when_it_is_up(up):
    hosts = status(up)["hosts"]
    keys = ("name", "alive", "work_folders", "max_agents", "running")
    assert [{key: host[key] for key in keys} for host in hosts] == [
        {"name": name, "alive": True, "work_folders": [str(up.folder / name)], "max_agents": 1, "running": 0}
        for name in ("alpha", "beta")
    ]


@pytest.mark.parametrize("host", ["alpha", "beta"])
def test_a_thread_runs_on_the_host_that_owns_its_folder(up, host):
    alias = f"runs/{host}"
    options = ("--work-folder", str(up.folder / host), "--agent", "scripted", "--artifacts", f"{alias}/out=out")
    fleet(up, "thread", "new", alias, *options, "--message", "hello there")
    said = fleet(up, "thread", "tail", alias, "--until-turn-end").splitlines()
    assert said[:4] == ["▸ hello there", "You said: hello there", "Bash → npm test", "→ ok"]
    assert said[4:7] == ["Published 1 artifact(s), skipped 0", f"  {alias}/out/plan.md", "Turn complete"]
    (thread,) = [each for each in status(up)["threads"] if each["alias"] == alias]
    assert thread["epoch"] > 0
    known = {key: thread[key] for key in ("session", "state", "host", "turn", "journal")}
    assert known == {"session": "demo-session", "state": "active", "host": host, "turn": 1, "journal": 0}
    assert thread["step"] == "idle"
    shown = json.loads(fleet(up, "thread", "show", alias, "--json"))
    assert shown["record"]["host"] == host
    assert shown["envelope"]["thread"]["metadata"]["instance"] == {"state": "active"}
    assert shown["items"][-1]["metadata"]["type"] == "turn_end"


def test_celery_finds_the_fleet_too(up):
    alias = "runs/forced"
    fleet(up, "thread", "new", alias, "--work-folder", str(up.folder / "alpha"), "--agent", "scripted", "--no-start")
    arguments = ("--args", f'["demo-session", "{alias}"]', "--kwargs", '{"force": true}')
    called = up.command("celery", "-A", "fleet", "call", "fleet.activate", *arguments)
    assert called.returncode == 0, called.stderr
    wait_until(lambda: [each for each in status(up)["threads"] if each["alias"] == alias], PATIENCE_S)


def test_a_home_has_one_fleet(up):
    second = up.command("fleet", "up")
    assert second.returncode == 2
    assert "another fleet is running" in second.stderr


def test_status_for_people_has_a_table_without_colours_where_none_are_wanted(up):
    said = up.command("fleet", "status", environ={"NO_COLOR": "1", "FORCE_COLOR": "1"}).stdout
    assert "alpha" in said
    assert "attached" in said
    assert "\x1b[3" not in said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly_and_leaves_nothing_behind(tmp_path, signum):
    program = Program(tmp_path)
    make(program, "alpha")
    program.start("up")
    try:
        program.wait_said("The fleet is up.")
        assert len(program.processes()) > 5
        os.kill(program.process.pid, signum)
        assert program.status() == 0
        assert program.processes() == []
        assert not (tmp_path / "home" / "up.json").exists()
        assert "config_invalid" in program.command("fleet", "status").stderr
    finally:
        program.end()


def test_a_fleet_that_was_killed_leaves_no_process_and_can_start_again(tmp_path):
    program = Program(tmp_path)
    make(program, "alpha")
    program.start("up")
    try:
        program.wait_said("The fleet is up.")
        program.process.kill()
        wait_until(lambda: program.processes() == [], PATIENCE_S, "processes are left")
        assert "config_invalid" in program.command("fleet", "status").stderr
        program.start("up")
        program.wait_said("The fleet is up.")
        assert status(program)["hosts"][0]["alive"]
        program.process.send_signal(signal.SIGINT)
        assert program.status() == 0
    finally:
        program.end()
