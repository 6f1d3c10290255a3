"""Full disks, damaged state files, work folders that vanish or move: a named state or recovery, and no worker falls."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet.hostfiles import HostFiles
from fleet.refs import ThreadRef
from fleet.supervisor import Supervisor
from tests.fleet.harness import PATIENCE_S, FleetUnderTest, brief, kind
from tests.fleet.test_crashes import pool_process
from tests.support import wait_until

STEPS = [f"step {n}" for n in range(40)]

#: Of the host's disk in the test: enough for a turn to begin, and soon full.
DISK = "16m"


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of its own, for the time of a test."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {getattr(error, 'stderr', '') or error}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free; the file that takes them is returned."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(64 * 1024))
    return ballast


def workers(host: str) -> set[int]:
    """The worker processes of a host that this test process has started."""
    names = (f"io@{host}", f"turns@{host}")
    return {p.pid for p in psutil.Process().children() if any(name in p.cmdline() for name in names)}


def texts(said: list[dict[str, Any]]) -> list[str]:
    return [brief(item) for item in said if kind(item) == "text"]


def tokens(said: list[dict[str, Any]]) -> list[str]:
    """The tokens of the status items."""
    return [item["metadata"]["status"] for item in said if kind(item) == "status"]


def await_failed(fleet: FleetUnderTest, alias: str, code: str) -> None:
    """Wait until a thread has failed, and has said why, with `code`."""
    fleet.await_state(alias, "failed")
    codes = [item["metadata"].get("code") for item in fleet.said(alias) if item["metadata"].get("status") == "error"]
    assert codes == [code]
    wait_until(lambda: "thread_failed" in fleet.audits(alias), PATIENCE_S, "no audit of the failure")


def files_of(fleet: FleetUnderTest, alias: str, host: str = "alpha") -> HostFiles:
    home = fleet.base / "home" / "hosts" / host
    return HostFiles(home, ThreadRef(fleet.platform.session_id, alias))


def test_what_a_full_disk_interrupts_waits_and_goes_on_when_there_is_room(fleet: FleetUnderTest):
    home = fleet.base / "home" / "hosts" / "gamma"
    folder, other = (fleet.folder(name, fleet.base / "gamma") for name in ("full-disk", "full-start"))
    with small_disk(home), Supervisor([fleet.host_children("gamma")], home / "logs"):
        before = workers("gamma")
        fleet.person.hand_over("full/turn", folder, "step by step")
        fleet.await_said("full/turn", "step 5")
        ballast = fill(home)
        fleet.await_said("full/turn", "Turn 1 goes on by itself")
        wait_until(lambda: not fleet.agents_alive(folder), PATIENCE_S, "an agent is left")
        fleet.person.hand_over("full/start", other, "hello")
        fleet.await_said("full/start", "The thread starts by itself")
        assert fleet.person.state("full/start") == "pending"
        fleet.person.hand_over("full/elsewhere", fleet.folder("full-elsewhere"), "hello")
        fleet.await_turns("full/elsewhere")
        assert not fleet.turn_ends("full/turn")
        ballast.unlink()
        said = fleet.await_turns("full/turn")
        assert texts(said) == STEPS
        assert brief(said[-1]) == "Turn complete"
        assert tokens(said) == ["host_unwritable", "recovering"]
        assert tokens(fleet.await_turns("full/start")) == ["host_unwritable"]
        assert workers("gamma") == before


#: What happens to a state file between two turns, by the outcome of the next one.
HARMLESS: dict[str, Callable[[HostFiles], object]] = {
    "log-cut": lambda files: os.truncate(files.log, files.log.stat().st_size - 9),
    "log-binary": lambda files: files.log.write_bytes(bytes(range(256)) * 99),
    "log-garbage": lambda files: files.log.write_text('{"item": {}}\n[]\n{"turn": 2, "item": {"metadata": 1}}\n\n'),
    "log-gone": lambda files: files.log.unlink(),
    "checkpoint-empty": lambda files: files.checkpoint.write_text(""),
    "checkpoint-half": lambda files: os.truncate(files.checkpoint, files.checkpoint.stat().st_size // 2),
    "checkpoint-types": lambda files: files.checkpoint.write_text('turn: "x"\nconsumed: 5\nstep: start\n'),
    "checkpoint-deep": lambda files: files.checkpoint.write_text("[" * 5000),
    "process-garbage": lambda files: files.process.write_bytes(b"\xff{"),
    "process-foreign": lambda files: files.process.write_text(
        json.dumps({"mark": "0" * 32, "guard": {"pid": os.getpid(), "start": ""}, "agent": {"pid": os.getpid()}})
    ),
}
LOST: dict[str, Callable[[HostFiles], object]] = {
    "terms-gone": lambda files: files.terms.unlink(),
    "terms-half": lambda files: os.truncate(files.terms, files.terms.stat().st_size // 2),
    "terms-types": lambda files: files.terms.write_text('{"epoch": 1, "work_folder": 5, "agent": [], "settings": {}}'),
    "folder-gone": lambda files: shutil.rmtree(files.folder),
}


def test_damage_between_two_turns_is_harmless_or_fails_the_thread_with_a_code(fleet: FleetUnderTest):
    folders = {name: fleet.folder(f"damage-{name}") for name in {**HARMLESS, **LOST}}
    for name, folder in folders.items():
        fleet.person.hand_over(f"damage/{name}", folder, "session")
    for name in folders:
        fleet.await_turns(f"damage/{name}")
        wait_until(lambda alias=f"damage/{name}": fleet.record(alias).step == "idle", PATIENCE_S, "not idle")
    for name, damage in {**HARMLESS, **LOST}.items():
        damage(files_of(fleet, f"damage/{name}"))
        fleet.person.say(f"damage/{name}", "session again")
    for name in HARMLESS:
        first, second = texts(fleet.await_turns(f"damage/{name}", 2))
        assert second == first.replace("turn 1", "turn 2"), name
    for name in LOST:
        await_failed(fleet, f"damage/{name}", "ACTIVATION_UNKNOWN")
        fleet.person.set_state(f"damage/{name}", "pending")
    for name in LOST:
        assert "turn 3" in texts(fleet.await_turns(f"damage/{name}", 3))[-1], name


#: What happens to the state files of a turn that is then cut off.
IN_TURN: dict[str, Callable[[HostFiles], object]] = {
    "folder": lambda files: shutil.rmtree(files.folder),
    "terms": lambda files: files.terms.unlink(),
    "checkpoint": lambda files: files.checkpoint.write_text("{"),
    "log": lambda files: files.log.unlink(),
}


def test_a_turn_that_is_cut_off_without_its_state_files_is_never_taken_for_a_whole_one(fleet: FleetUnderTest):
    folders = {name: fleet.folder(f"cut-off-{name}") for name in IN_TURN}
    for name, folder in folders.items():
        fleet.person.hand_over(f"cut-off/{name}", folder, "step by step")
    for name, damage in IN_TURN.items():
        fleet.await_said(f"cut-off/{name}", "step 5")
        damage(files_of(fleet, f"cut-off/{name}"))
        pool_process(fleet, folders[name]).kill()
    for name in ("folder", "terms", "checkpoint"):
        await_failed(fleet, f"cut-off/{name}", "ACTIVATION_UNKNOWN")
        said = fleet.said(f"cut-off/{name}")
        assert texts(said) == STEPS[: len(texts(said))], name
        assert [brief(item) for item in said if kind(item) == "turn_end"] == ["Turn ended (failed)"], name
        assert not fleet.agents_alive(folders[name])
    assert texts(fleet.await_turns("cut-off/log")) == STEPS


def test_a_thread_whose_work_folder_was_deleted_fails_and_runs_again_when_it_is_back(fleet: FleetUnderTest):
    folder = fleet.folder("deleted")
    fleet.person.hand_over("deleted/idle", folder, "hello")
    fleet.await_turns("deleted/idle")
    shutil.rmtree(folder)
    fleet.person.say("deleted/idle", "hello again")
    await_failed(fleet, "deleted/idle", "WORK_FOLDER_NOT_FOUND")
    assert brief(fleet.turn_ends("deleted/idle")[-1]) == "Turn ended (failed)"
    folder.mkdir()
    fleet.person.say("deleted/idle", "hello once more")
    fleet.person.set_state("deleted/idle", "pending")
    assert "hello once more" in str(texts(fleet.await_turns("deleted/idle", 3))[-1])


def test_a_work_folder_that_is_deleted_under_a_turn_ends_it_when_the_agent_must_be_started_again(fleet: FleetUnderTest):
    folder = fleet.folder("deleted-under")
    fleet.person.hand_over("deleted/under", folder, "long work")
    fleet.await_said("deleted/under", "begun")
    agents = wait_until(lambda: fleet.agents_alive(folder), PATIENCE_S, "no agent")
    shutil.rmtree(folder)
    os.kill(agents[-1], signal.SIGKILL)
    await_failed(fleet, "deleted/under", "WORK_FOLDER_NOT_FOUND")
    said = fleet.said("deleted/under")
    assert texts(said) == ["begun"]
    assert [brief(item) for item in fleet.turn_ends("deleted/under")] == ["Turn ended (failed)"]
    assert not any(psutil.pid_exists(pid) for pid in agents)


def move(fleet: FleetUnderTest, alias: str, folder: Path) -> None:
    """Name another work folder and hand the thread over once more, as its user would."""
    value = fleet.person.value(alias)
    value["thread"]["metadata"]["workspace"]["work_folder"] = str(folder)
    value["thread"]["metadata"]["instance"]["state"] = "pending"
    fleet.person.put(alias, value)


@pytest.mark.parametrize("root", ["alpha", "beta"])
def test_an_idle_thread_that_is_given_another_folder_goes_on_there_in_a_new_session(fleet: FleetUnderTest, root: str):
    alias = f"moved/{root}"
    fleet.person.hand_over(alias, fleet.folder(f"moved-from-{root}"), "session")
    fleet.await_turns(alias)
    wait_until(lambda: fleet.record(alias).step == "idle", PATIENCE_S, "not idle")
    there = fleet.folder("moved-to", fleet.base / root)
    move(fleet, alias, there)
    fleet.await_said(alias, "New session")
    fleet.person.say(alias, "session now")
    said = fleet.await_turns(alias, 2)
    first, second = (text.split()[1] for text in texts(said))
    assert first != second
    assert tokens(said) == ["new_session"]
    record = fleet.record(alias)
    assert (record.host, record.work_folder) == (root, str(there))
    assert len(fleet.turn_ends(alias)) == 2


def test_a_thread_that_is_moved_in_a_turn_stops_there_and_does_the_turn_on_the_new_host(fleet: FleetUnderTest):
    old, new = fleet.folder("moved-in-turn"), fleet.folder("moved-in-turn", fleet.beta)
    fleet.person.hand_over("moved/turn", old, "step by step")
    fleet.await_said("moved/turn", "step 5")
    move(fleet, "moved/turn", new)
    wait_until(lambda: not fleet.agents_alive(old), PATIENCE_S, "the old turn goes on")
    said = fleet.await_turns("moved/turn")
    assert tokens(said) == ["restarted", "new_session"]
    told = next(n for n, item in enumerate(said) if "restarted" in str(item["metadata"]))
    before, after = texts(said[:told]), texts(said[told:])
    assert before == STEPS[: len(before)]
    assert after == STEPS
    assert fleet.record("moved/turn").host == "beta"
    assert not fleet.agents_alive(new)
