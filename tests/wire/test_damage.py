"""State files that are damaged, lost or can't be written, and a host that comes back with other roots."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents import process
from fleet import finish, turn
from fleet.config import HostConfig
from fleet.events import Agent, AgentDiedError, AgentEvent, Ended, SessionStarted, Text, TurnHost, TurnRequest
from fleet.hostfiles import ROOM_BYTES, Checkpoint, HostFiles, HostUnwritableError, LogWriter
from fleet.hosts import Host
from fleet.reconcile import host_came
from fleet.refs import ThreadRef
from fleet.terms import Terms
from tests.support import wait_until
from tests.wire.stage import Stage

REF = ThreadRef("s1", "a/b")

CHECKPOINT = Checkpoint(
    epoch=1_700_000_000_000,
    turn=3,
    agent_session="5f0c",
    consumed_at="2026-01-02T03:04:05Z",
    consumed=("i1", "i2"),
    step="run",
    prompted=True,
    turn_items=("i3",),
    turn_newest=1_700_000_000_000.5,
    began_ms=1_700_000_000_000,
    turn_status="failed",
    error="no way: é\n",
    fail_code="AGENT_CRASHED",
    stats={"input_tokens": 7},
)
SETTINGS = {
    "type": "scripted",
    "executable": "",
    "model": "",
    "effort": "",
    "permissions": "guarded",
    "artifacts": {"prefix": "p/", "source": "out"},
    "inbox": ".inbox",
    "policy": {"default": "deny", "rules": []},
}
TERMS = Terms(5, "/srv/repos/one", "scripted", SETTINGS)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def of_other_shape(whole: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """JSON with some of the keys of `whole`, and anything behind them."""
    names = st.sampled_from(sorted(whole))
    changes = st.dictionaries(names, JSON, max_size=3)
    without = st.sets(names, max_size=2)
    return st.builds(
        lambda changed, gone: json.dumps({k: v for k, v in {**whole, **changed}.items() if k not in gone}).encode(),
        changes,
        without,
    )


def cut_or_overwritten(whole: bytes) -> st.SearchStrategy[bytes]:
    places = st.integers(0, len(whole))
    return st.builds(lambda at, with_: whole[:at] + with_ + whole[at + len(with_) :], places, st.binary(max_size=9)) | (
        st.builds(lambda at: whole[:at], places)
    )


def damaged(whole: dict[str, Any]) -> st.SearchStrategy[bytes]:
    text = json.dumps(whole, indent=1).encode()
    nested = st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"&a [*a, *a]", b"9" * 10_000, b"null", b"[]", b'""'])
    return (
        st.binary()
        | nested
        | JSON.map(lambda v: json.dumps(v).encode())
        | cut_or_overwritten(text)
        | (of_other_shape(whole))
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> HostFiles:
    files = HostFiles(tmp_path_factory.mktemp("home"), REF)
    files.create()
    return files


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


@settings(max_examples=60, deadline=None)
@given(damaged(asdict(CHECKPOINT)))
def test_a_damaged_checkpoint_is_read_as_one_of_the_right_types(files: HostFiles, content: bytes):
    files.checkpoint.write_bytes(content)
    read = Checkpoint.read(files.checkpoint)
    assert all(map(is_count, (read.epoch, read.turn, read.began_ms, *read.stats.values())))
    assert all(isinstance(t, tuple) and all(isinstance(i, str) for i in t) for t in (read.consumed, read.turn_items))
    assert all(type(t) in (str, int, float, type(None)) for t in (read.consumed_at, read.turn_newest))
    assert read.step in ("", "run", "publish")
    assert type(read.prompted) is bool
    words = (read.agent_session, read.turn_status, read.error, read.fail_code, *read.consumed, *read.stats)
    assert all(word.encode() is not None for word in words)
    json.dumps(asdict(read), allow_nan=False)


def test_a_checkpoint_is_read_as_it_was_written(files: HostFiles):
    CHECKPOINT.write(files.checkpoint)
    assert Checkpoint.read(files.checkpoint) == CHECKPOINT
    assert not [field.name for field in fields(Checkpoint) if getattr(CHECKPOINT, field.name) == field.default]


@settings(max_examples=60, deadline=None)
@given(damaged(asdict(TERMS)))
def test_damaged_terms_are_none_or_of_the_right_types(files: HostFiles, content: bytes):
    files.terms.write_bytes(content)
    read = Terms.read(files)
    if read is not None:
        assert is_count(read.epoch)
        words = [read.work_folder, read.agent, *(read.settings[k] for k in ("executable", "model", "effort", "inbox"))]
        assert all(isinstance(word, str) for word in words)
        assert read.settings["permissions"] in ("autonomous", "approval", "guarded")
        block = read.settings["artifacts"]
        assert block is None or all(isinstance(block[key], str) for key in ("prefix", "source"))
        assert "policy" in read.settings


def test_terms_are_read_as_they_were_written(files: HostFiles):
    TERMS.write(files)
    assert Terms.read(files) == TERMS


def line(n: int) -> dict[str, Any]:
    item = {"content": [{"type": "text", "text": f"é {n}"}], "metadata": {"type": "text", "post_id": f"p{n}"}}
    return {"epoch": 5, "turn": 2, "n": n, "uid": None if n % 2 else f"u{n}", "item": item}


@settings(max_examples=60, deadline=None)
@given(st.lists(damaged(line(1)).filter(lambda content: b"\n" not in content), max_size=3), st.binary())
def test_damage_in_a_log_costs_no_more_than_the_lines_that_it_hit(files: HostFiles, garbage: list[bytes], end: bytes):
    whole = [json.dumps(line(n)).encode() for n in (1, 2)]
    files.log.write_bytes(b"\n".join([whole[0], *garbage, whole[1], end]))
    entries = list(files.said())
    for entry in entries:
        assert all(type(entry[name]) is int for name in ("epoch", "turn", "n"))
        assert entry["uid"] is None or isinstance(entry["uid"], str)
        assert isinstance(entry["item"]["metadata"]["post_id"], str)
        assert isinstance(entry["item"]["content"], list)
    assert entries[0] == line(1)
    assert line(2) in entries[1:]


def test_a_log_goes_on_behind_a_line_that_was_cut_short(tmp_path: Path):
    files = HostFiles(tmp_path, REF)
    with LogWriter(files, 10**6) as log:
        log.write(json.dumps(line(1)))
        log.write(json.dumps(line(2)))
    os.truncate(files.log, files.log.stat().st_size - 20)
    with LogWriter(files, 10**6) as log:
        log.write(json.dumps(line(3)))
    assert list(files.said()) == [line(1), line(3)]


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """As on a disk that takes `size` bytes of a file and no more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_the_disk_takes_half_leaves_no_trace(tmp_path: Path):
    files = HostFiles(tmp_path, REF)
    with LogWriter(files, 10**6) as log:
        log.write(json.dumps(line(1)))
        before = files.log.read_bytes()
        with no_file_beyond(len(before) + 50), pytest.raises(HostUnwritableError):
            log.write(json.dumps(line(2)))
        assert files.log.read_bytes() == before
        log.write(json.dumps(line(2)))
    assert list(files.said()) == [line(1), line(2)]


def test_a_checkpoint_that_the_disk_does_not_take_leaves_the_old_one_and_no_draft(tmp_path: Path):
    files = HostFiles(tmp_path, REF)
    files.create()
    CHECKPOINT.write(files.checkpoint)
    names = sorted(files.folder.iterdir())
    with no_file_beyond(100), pytest.raises(HostUnwritableError):
        replace(CHECKPOINT, turn=4).write(files.checkpoint)
    assert Checkpoint.read(files.checkpoint) == CHECKPOINT
    assert sorted(files.folder.iterdir()) == names


def test_a_disk_without_room_is_noticed_before_a_turn_begins(tmp_path: Path):
    files = HostFiles(tmp_path, REF)
    files.check_room()
    with no_file_beyond(ROOM_BYTES - 1), pytest.raises(HostUnwritableError):
        files.check_room()
    assert sorted(path.name for path in files.folder.iterdir()) == ["agent", "logs"]


def test_a_state_folder_that_is_no_folder_is_unwritable(tmp_path: Path):
    home = tmp_path / "home"
    home.write_text("")
    files = HostFiles(home, REF)
    for write in (files.check_room, lambda: CHECKPOINT.write(files.checkpoint), lambda: TERMS.write(files)):
        with pytest.raises(HostUnwritableError):
            write()


PROCESS = {"mark": "0" * 32, "guard": {"pid": 1, "start": "1"}, "agent": {"pid": 1, "start": "1"}}


@settings(max_examples=60, deadline=None)
@given(damaged(PROCESS) | damaged(PROCESS["guard"]).map(lambda g: b'{"mark": "' + b"0" * 32 + b'", "guard": ' + g))
def test_a_damaged_process_file_ends_nobody_and_is_removed(files: HostFiles, content: bytes):
    files.process.write_bytes(content)
    assert process.end_leftovers(files.process) == 0
    assert not files.process.exists()


def test_a_process_file_that_names_a_foreign_process_does_not_end_it(files: HostFiles):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        recorded = {"pid": bystander.pid, "start": process.guard.start_time(bystander.pid)}
        files.process.write_text(json.dumps({"mark": "0" * 32, "guard": recorded, "agent": recorded}))
        assert process.end_leftovers(files.process) == 0
        assert bystander.poll() is None


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("{")], ids=["lost", "damaged"])
def test_an_agent_ends_with_its_turn_although_its_process_file_does_not_name_it(
    tmp_path: Path, damage: Callable[[Path], object]
):
    process_file = tmp_path / "agent.json"
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print(flush=True); time.sleep(60)"

    async def play() -> list[psutil.Process]:
        argv = [sys.executable, "-I", "-S", "-c", script]
        async with process.running(
            argv, env={"PATH": os.environ["PATH"]}, cwd=tmp_path, process_file=process_file
        ) as agent:
            await agent.stdout.readline()
            guard = psutil.Process(agent.process.pid)
            tree = [guard, *wait_until(lambda: guard.children(recursive=True), message="no agent")]
            wait_until(lambda: "agent" in json.loads(process_file.read_text()), message="the agent is not recorded")
            damage(process_file)
        return tree

    tree = asyncio.run(play())
    assert len(tree) == 3
    assert not [each for each in tree if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


class Agents:
    """An agent that says what it was asked in which session, and the runtime that has it."""

    def load(self, agent_type: str) -> Agent:
        return self

    def end_leftovers(self, process_file: Path, grace_s: float) -> int:
        return 0

    async def turn(self, request: TurnRequest, host: TurnHost) -> AsyncIterator[AgentEvent]:
        yield SessionStarted(request.session_id or f"session-of-{request.turn}")
        yield Text(f"{request.work_folder.name}: {request.session_id or 'no session'}")
        yield Ended(ok=True)

    def recorded(self, request: TurnRequest) -> list[AgentEvent]:
        return []


async def do_turn(stage: Stage, alias: str) -> None:
    """Poll, and run the turn that has begun to its end."""
    await stage.poll()
    record, ref = await stage.record(alias), stage.ref(alias)
    assert record.step == "run"
    await turn.run_turn(stage.fleet, Agents(), ref, record.epoch, record.turn, asyncio.Event())
    await finish.publish_artifacts(stage.fleet, ref, record.epoch, record.turn)
    await finish.close_turn(stage.fleet, ref, record.epoch, record.turn)
    await stage.settle()


async def state(stage: Stage, alias: str) -> str:
    value = (await stage.person.download_object(stage.at, alias))["value"]
    return str(value["thread"]["metadata"]["instance"]["state"])


async def set_blocks(stage: Stage, alias: str, **blocks: Any) -> None:
    value = (await stage.person.download_object(stage.at, alias))["value"]
    value["thread"]["metadata"] |= blocks
    await stage.person.upload_object(stage.at, alias, value)


async def beat_with(stage: Stage, *roots: Path) -> None:
    """The host comes back with other roots."""
    folders = tuple(map(str, roots))
    hosts = {"alpha": HostConfig(work_folders=folders)}
    stage.fleet.config = stage.fleet.config.model_copy(update={"hosts": hosts})
    assert await stage.fleet.hosts.beat(Host("alpha", folders, folders, 4, ("scripted",), "1"))
    await host_came(stage.fleet)
    await stage.settle()


def test_a_thread_whose_host_has_lost_its_root_fails_at_its_next_turn_then_waits_for_an_owner(play: Callable[..., Any]):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "one")
        await do_turn(stage, "t")
        elsewhere = stage.folder.parent.parent / "elsewhere"
        elsewhere.mkdir()
        await beat_with(stage, elsewhere)
        await stage.say("t", "two")
        await do_turn(stage, "t")
        assert await state(stage, "t") == "failed"
        assert (await stage.record("t")).error == "WORK_FOLDER_OUTSIDE_ROOTS"
        await set_blocks(stage, "t", instance={"state": "pending"})
        await stage.poll()
        assert (await stage.record("t")).step == "wait_host"
        assert await state(stage, "t") == "pending"
        assert (await stage.texts("t"))[-1].startswith("No host: ")
        await beat_with(stage, stage.folder.parent)
        await stage.say("t", "three")
        await do_turn(stage, "t")
        assert await state(stage, "t") == "active"
        assert (await stage.texts("t"))[-2:] == ["one: session-of-1", "Turn complete"]

    play(scene)


def test_a_session_is_not_resumed_in_another_folder_of_the_same_host(play: Callable[..., Any]):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "one")
        await do_turn(stage, "t")
        other = stage.folder.with_name("two")
        other.mkdir()
        await set_blocks(stage, "t", workspace={"work_folder": str(other)}, instance={"state": "pending"})
        await stage.say("t", "two")
        await do_turn(stage, "t")
        new, said, _ = (await stage.texts("t"))[-3:]
        assert new == f"New session: The agent begins anew: the work folder was {stage.folder} before."
        assert said == "two: no session"
        await set_blocks(stage, "t", instance={"state": "pending"})
        await stage.say("t", "three")
        await do_turn(stage, "t")
        assert (await stage.texts("t"))[-2] == "two: session-of-2"

    play(scene)


def test_the_envelope_says_active_only_when_the_host_has_written_the_terms(play: Callable[..., Any]):
    async def scene(stage: Stage) -> None:
        home = stage.fleet.environment.home
        home.write_text("in the way")
        await stage.hand_over("t", "one")
        await stage.poll()
        assert await state(stage, "t") == "pending"
        assert "alpha can't write its state folder" in (await stage.texts("t"))[-1]
        assert len(await stage.texts("t")) == 1
        home.unlink()
        await stage.nudges.start_thread(await stage.record("t"))
        await stage.settle()
        assert await state(stage, "t") == "active"
        assert (await stage.record("t")).step == "run"

    play(scene)


def test_however_often_a_full_disk_interrupts_a_turn_that_is_no_crash_of_its_agent(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "one")
        await stage.poll()
        record = await stage.record("t")
        run = (stage.fleet, Agents(), stage.ref("t"), record.epoch, record.turn, asyncio.Event())
        files = HostFiles(stage.fleet.environment.home, stage.ref("t"))
        for _ in range(stage.fleet.config.turns.attempts + 1):
            with no_file_beyond(ROOM_BYTES - 1):
                await turn.run_turn(*run)
            with monkeypatch.context() as patch:
                patch.setattr(HostFiles, "check_room", lambda _: None)
                with no_file_beyond(files.log.stat().st_size + 10 if files.log.exists() else 10):
                    await turn.run_turn(*run)
        await stage.settle()
        assert (await stage.record("t")).attempt == 0
        assert len(await stage.texts("t")) == 1
        await do_turn(stage, "t")
        said = await stage.texts("t")
        assert said[-1] == "Turn complete"
        assert said.count("one: no session") == 1

    play(scene)


def test_a_work_folder_that_is_gone_by_its_next_turn_fails_the_thread(play: Callable[..., Any]):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "one")
        await do_turn(stage, "t")
        shutil.rmtree(stage.folder)
        await stage.say("t", "two")
        await do_turn(stage, "t")
        assert await state(stage, "t") == "failed"
        assert (await stage.record("t")).error == "WORK_FOLDER_NOT_FOUND"
        assert "Turn ended (failed)" in await stage.texts("t")

    play(scene)


class DyingAgents(Agents):
    """An agent that dies after its first words."""

    async def turn(self, request: TurnRequest, host: TurnHost) -> AsyncIterator[AgentEvent]:
        yield SessionStarted("session")
        yield Text("first words")
        raise AgentDiedError("killed")


def test_a_turn_that_is_stopped_while_nobody_runs_it_has_its_end_said_behind_its_words(play: Callable[..., Any]):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "one")
        await stage.poll()
        record, ref = await stage.record("t"), stage.ref("t")
        await turn.run_turn(stage.fleet, DyingAgents(), ref, record.epoch, record.turn, asyncio.Event())
        await set_blocks(stage, "t", instance={"state": "completed"})
        await stage.poll()
        await finish.publish_artifacts(stage.fleet, ref, record.epoch, record.turn)
        await finish.close_turn(stage.fleet, ref, record.epoch, record.turn)
        await stage.settle()
        assert await stage.texts("t") == ["first words", "Turn ended (stopped)"]
        assert (await stage.record("t")).outcome == "completed"

    play(scene)
