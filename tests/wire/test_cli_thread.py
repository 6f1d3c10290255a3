"""`fleet thread` against the embedded platform, with no worker in sight."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Iterator

import pytest
import yaml

from fleet import items
from fleet.cli import main
from fleet.platform.client import PlatformClient, SessionRef
from fleet.sandbox.platform_server import RunningPlatform, running_platform


@pytest.fixture(scope="module")
def platform(no_process_left, tmp_path_factory) -> Iterator[RunningPlatform]:
    with running_platform(tmp_path_factory.mktemp("platform")) as running:
        yield running


@pytest.fixture
def alias(request) -> str:
    """Of this test alone: all use one session."""
    return f"tests/{request.node.name.replace('[', '.').replace(']', '')}"


class Terminal:
    def __init__(self, platform: RunningPlatform, monkeypatch, capsys) -> None:
        self.platform = platform
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: str, status: int = 0, stdin: str = "") -> str:
        """Run `fleet thread ARGUMENTS`; return what it says."""
        self.monkeypatch.setattr(sys, "argv", ["fleet", "thread", *arguments])
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        output = self.capsys.readouterr()
        assert (ended.value.code or 0) == status, output.err
        return output.out if status == 0 else output.out + output.err

    def envelope(self, alias: str) -> dict:
        return json.loads(self("show", alias, "--json"))["envelope"]["thread"]["metadata"]

    def post(self, alias: str, *said: dict) -> None:
        """Post items as the worker."""
        at = SessionRef(self.platform.revision_id, self.platform.session_id)

        async def post() -> None:
            async with PlatformClient(self.platform.url, self.platform.worker_key) as client:
                for item in said:
                    await client.post_item(at, alias, item)

        asyncio.run(post())


@pytest.fixture
def thread(platform, tmp_path, monkeypatch, capsys) -> Terminal:
    ids = ("org_id", "blob_id", "revision_id", "session_id")
    config = {"sections": [{"name": "desk", "session": {name: getattr(platform, name) for name in ids}}]}
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(config))
    for name in ("FLEET_REDIS_URL", "BLOBHUB_API_KEY", "BLOBHUB_API_KEY_FILE", "FLEET_PERSON_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "FLEET_CONFIG": str(file),
        "FLEET_HOME": str(tmp_path / "home"),
        "HOME": str(tmp_path),
        "BLOBHUB_API_URL": platform.url,
        "FLEET_PERSON_API_KEY": platform.person_key,
    }.items():
        monkeypatch.setenv(name, value)
    return Terminal(platform, monkeypatch, capsys)


def test_a_new_thread_has_its_envelope_its_message_and_is_handed_over(thread, alias):
    options = ("--agent", "scripted", "--permissions", "autonomous", "--model", "m", "--artifacts", "art/x=.out/run")
    thread("new", alias, "--work-folder", "/srv/repo", *options, "--message", "fix the parser")
    assert thread.envelope(alias) == {
        "workspace": {"work_folder": "/srv/repo"},
        "agent": {"type": "scripted", "permissions": "autonomous", "model": "m"},
        "artifacts": {"prefix": "art/x/", "source": ".out/run"},
        "instance": {"state": "pending"},
    }
    (item,) = json.loads(thread("show", alias, "--json"))["items"]
    assert item["user_id"] == thread.platform.person_user_id
    assert item["content"] == [{"type": "text", "text": "fix the parser"}]


def test_an_object_that_exists_is_not_overwritten(thread, alias):
    thread("new", alias, "--work-folder", "/srv/one", "--no-start")
    assert "[thread_exists]" in thread("new", alias, "--work-folder", "/srv/two", status=1)
    assert thread.envelope(alias)["workspace"] == {"work_folder": "/srv/one"}


def test_a_thread_can_be_made_without_handing_it_over(thread, alias):
    thread("new", alias, "--work-folder", "/srv", "--no-start")
    assert "instance" not in thread.envelope(alias)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--work-folder", "repo"),
        ("--work-folder", "/srv", "--artifacts", "art"),
        ("--work-folder", "/srv", "--artifacts", "art=/etc"),
        ("--work-folder", "/srv", "--artifacts", "a b=out"),
    ],
)
def test_a_wrong_argument_creates_nothing(thread, alias, arguments):
    assert "[argument_invalid]" in thread("new", "wrong", *arguments, status=2)
    assert "[thread_unknown]" in thread("show", "wrong", status=1)


def test_states_are_set_and_the_rest_of_the_envelope_stays(thread, alias):
    thread("new", alias, "--work-folder", "/srv", "--no-start")
    before = thread.envelope(alias)
    for command, state in (("retry", "pending"), ("stop", "completed"), ("retry", "pending")):
        thread(command, alias)
        assert thread.envelope(alias) == before | {"instance": {"state": state}}


def test_a_thread_is_handed_over_again_in_another_folder(thread, alias):
    thread("new", alias, "--work-folder", "/srv", "--no-start")
    before = thread.envelope(alias)
    thread("move", alias, "/data/repo")
    expected = before | {"workspace": {"work_folder": "/data/repo"}, "instance": {"state": "pending"}}
    assert thread.envelope(alias) == expected
    assert "[argument_invalid]" in thread("move", alias, "repo", status=2)
    assert thread.envelope(alias) == expected


def test_a_message_can_come_from_stdin(thread, alias):
    thread("new", alias, "--work-folder", "/srv", "--no-start")
    thread("send", alias, "-", stdin="line one\nline two\n")
    assert thread("tail", alias, "--no-follow") == "▸ line one\n▸ line two\n"


def test_with_the_workers_key_one_can_read_and_set_states_but_not_speak(thread, alias, monkeypatch):
    thread("new", alias, "--work-folder", "/srv", "--no-start")
    monkeypatch.delenv("FLEET_PERSON_API_KEY")
    monkeypatch.setenv("BLOBHUB_API_KEY", thread.platform.worker_key)
    assert "FLEET_PERSON_API_KEY" in thread("send", alias, "hello", status=2)
    assert "FLEET_PERSON_API_KEY" in thread("new", f"{alias}2", "--work-folder", "/srv", "--message", "x", status=2)
    assert f"{alias}2" not in thread("ls", "--json")
    thread("stop", alias)
    assert thread.envelope(alias)["instance"] == {"state": "completed"}


def test_a_persons_key_of_the_workers_own_user_is_refused_where_the_section_has_an_owner(thread, alias, monkeypatch):
    thread("new", alias, "--work-folder", "/srv", "--no-start")
    owner = {"user": {"user_id": thread.platform.worker_user_id}}
    at = SessionRef(thread.platform.revision_id, thread.platform.session_id)

    async def attach() -> None:
        async with PlatformClient(thread.platform.url, thread.platform.worker_key) as client:
            await client.upload_object(at, "worker", {"type": "thread", "thread": {"metadata": owner}})

    asyncio.run(attach())
    thread("send", alias, "heard")
    monkeypatch.setenv("FLEET_PERSON_API_KEY", thread.platform.worker_key)
    assert "[person_key_missing]" in thread("send", alias, "not heard", status=2)


def test_what_is_no_thread_is_not_listed_and_not_spoken_to(thread, alias):
    assert "[thread_unknown]" in thread("send", f"{alias}/nobody", "hello", status=1)
    thread("new", alias, "--work-folder", "/srv", "--no-start")
    listed = json.loads(thread("ls", "--json"))
    mine = [row for row in listed if row["alias"] == alias]
    assert mine == [{"alias": alias, "state": None, "agent": "claude_code", "work_folder": "/srv"}]
    assert "worker" not in [row["alias"] for row in listed]


@pytest.mark.parametrize(("ending", "status"), [("completed", 0), ("failed", 1)])
def test_tail_ends_with_the_turn_and_tells_how_it_ended(thread, alias, ending, status):
    thread("new", alias, "--work-folder", "/srv", "--message", "hello")
    thread.post(alias, items.status("begun"), items.turn_end(ending, {"duration_ms": 1500}))
    said = thread("tail", alias, "--until-turn-end", "--json", status=status)
    kinds = [json.loads(line)["metadata"].get("type") for line in said.splitlines()]
    assert kinds == [None, "status", "turn_end"]


def test_a_section_must_be_named_where_there_are_several(thread, alias, tmp_path):
    file = tmp_path / "fleet.yaml"
    config = yaml.safe_load(file.read_text())
    other = {"name": "other", "session": config["sections"][0]["session"] | {"session_id": "gone"}}
    file.write_text(yaml.safe_dump({"sections": [*config["sections"], other]}))
    assert "configured: desk, other [session_unknown]" in thread("ls", status=2)
    assert "'third' is no section" in thread("ls", "--section", "third", status=2)
    thread("ls", "--section", "desk")
    thread("ls", "--section", thread.platform.session_id)
    assert "[session_unknown]" in thread("ls", "--section", "other", status=2)
