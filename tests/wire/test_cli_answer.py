"""`fleet thread answer` against the embedded platform; what the worker would ask is posted with its key."""

from __future__ import annotations

import asyncio
import io
import json
import sys

import pytest
import yaml

from fleet import items
from fleet.answers import approval_question
from fleet.cli import main
from fleet.envelope import new_thread, with_state
from fleet.events import Answer, Question
from fleet.platform.client import PlatformClient, SessionRef
from tests.wire.stage import Sandbox

ALIAS = "fix/parser"
COLOUR = Question("Which colour?", "Colour", (("Red", "as before"), ("Blue", "")))
PARTS = Question("Which parts?", "", (("Docs", ""), ("Tests", "")), multi_select=True)


class Terminal:
    """A person's terminal, and the worker's key for what an agent would say."""

    def __init__(self, sandbox: Sandbox, monkeypatch, capsys) -> None:
        self.platform = sandbox.platform
        self.at = SessionRef(sandbox.platform.revision_id, sandbox.session())
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *arguments: str, status: int = 0, stdin: str = "") -> str:
        """Run `fleet thread ARGUMENTS`; return what it says, errors only where a status other than 0 is expected."""
        self.monkeypatch.setattr(sys, "argv", ["fleet", "thread", *arguments])
        self.monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        output = self.capsys.readouterr()
        assert (ended.value.code or 0) == status, output.err
        return output.out if status == 0 else output.err

    def worker(self, work) -> None:
        async def run() -> None:
            async with PlatformClient(self.platform.url, self.platform.worker_key) as client:
                await work(client)

        asyncio.run(run())

    def post(self, item: dict) -> None:
        self.worker(lambda client: client.post_item(self.at, ALIAS, item))

    def ask(self, *questions: Question, id_: str = "p") -> None:
        self.post(items.pending_prompt(id_, "ask_user_question", questions))

    def newest(self) -> dict:
        return json.loads(self("show", ALIAS, "--json"))["items"][-1]


@pytest.fixture
def thread(sandbox, tmp_path, monkeypatch, capsys) -> Terminal:
    terminal = Terminal(sandbox, monkeypatch, capsys)
    ids = {name: getattr(sandbox.platform, name) for name in ("org_id", "blob_id", "revision_id")}
    config = {"sections": [{"name": "desk", "session": ids | {"session_id": terminal.at.session_id}}]}
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(config))
    for name in ("FLEET_REDIS_URL", "BLOBHUB_API_KEY", "BLOBHUB_API_KEY_FILE", "FLEET_PERSON_API_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "FLEET_CONFIG": str(tmp_path / "fleet.yaml"),
        "FLEET_HOME": str(tmp_path / "home"),
        "HOME": str(tmp_path),
        "BLOBHUB_API_URL": sandbox.platform.url,
        "FLEET_PERSON_API_KEY": sandbox.platform.person_key,
    }.items():
        monkeypatch.setenv(name, value)
    owner = {"type": "thread", "thread": {"metadata": {"user": {"user_id": sandbox.platform.worker_user_id}}}}
    value = with_state(new_thread("/srv", "scripted"), "active")

    async def set_up(client: PlatformClient) -> None:
        await client.upload_object(terminal.at, "worker", owner)
        await client.upload_object(terminal.at, ALIAS, value)

    terminal.worker(set_up)
    return terminal


def test_an_answer_is_posted_for_people_and_for_the_fleet(thread):
    thread.ask(COLOUR, PARTS)
    assert thread("answer", ALIAS, "2", "1,2") == "✓ Answered: Blue\n✓ Answered: Docs, Tests\n"
    item = thread.newest()
    assert item["user_id"] == thread.platform.person_user_id
    assert item["content"] == [{"type": "text", "text": "Blue\nDocs, Tests"}]
    assert item["metadata"]["answers"] == [
        {"question": "Which colour?", "answer": ["Blue"]},
        {"question": "Which parts?", "answer": ["Docs", "Tests"]},
    ]


def test_without_an_answer_the_terminal_is_asked(thread):
    thread.ask(COLOUR)
    shown = thread("answer", ALIAS, stdin="9\n1\n")
    assert "? [Colour] Which colour?\n  1. Red — as before\n  2. Blue\n" in shown
    assert "9 is not one of the 2 options" in shown
    assert thread.newest()["metadata"]["answers"][0]["answer"] == ["Red"]


def test_for_programs_the_answer_is_one_json_value_and_nothing_else(thread):
    thread.ask(COLOUR)
    said = json.loads(thread("answer", ALIAS, "--json", stdin="2\n"))
    assert said == {"prompt_id": "p", "answers": [{"question": "Which colour?", "answer": ["Blue"]}]}


def test_where_no_question_is_open_nothing_is_posted(thread):
    assert f"no question is open in {ALIAS}" in thread("answer", ALIAS, "1", status=2)
    thread.ask(COLOUR)
    thread("answer", ALIAS, "1")
    assert "no question is open" in thread("answer", ALIAS, "2", status=2)
    thread.ask(PARTS, id_="q")
    thread("stop", ALIAS)
    assert "no question is open" in thread("answer", ALIAS, "1", status=2)
    assert thread.newest()["metadata"]["type"] == "pending_prompt"


def test_a_question_that_was_answered_while_somebody_thought_is_not_answered_again(thread, monkeypatch):
    thread.ask(COLOUR)
    closed = items.prompt_answered("p", "ask_user_question", (COLOUR,), Answer((("Red",),)))

    def think(_prompt, words):
        thread.post(closed)
        return Answer((words,))

    monkeypatch.setattr("fleet.cli.answer.given_answer", think)
    assert "is not open any more" in thread("answer", ALIAS, "Blue", status=2)
    assert thread.newest()["metadata"]["type"] == "pending_prompt_resolved"


def test_with_the_workers_key_one_can_not_answer(thread, monkeypatch):
    thread.ask(COLOUR)
    monkeypatch.delenv("FLEET_PERSON_API_KEY")
    monkeypatch.setenv("BLOBHUB_API_KEY", thread.platform.worker_key)
    assert "FLEET_PERSON_API_KEY" in thread("answer", ALIAS, "1", status=2)


@pytest.mark.parametrize("command", [("tail", ALIAS, "--no-follow"), ("show", ALIAS)])
def test_tail_and_show_have_an_open_question_in_full_and_say_how_to_answer_it(thread, command):
    thread.ask(COLOUR)
    for number in range(12):
        thread.post(items.status("busy", str(number)))
    shown = thread(*command)
    assert shown.count("? [Colour] Which colour?\n  1. Red — as before\n  2. Blue\n") == 1
    assert shown.endswith(f"↳ Open: fleet thread answer {ALIAS} [numbers or words]\n")
    thread("answer", ALIAS, "1")
    assert "↳ Open" not in thread(*command)


def test_show_gives_programs_the_open_question(thread):
    assert json.loads(thread("show", ALIAS, "--json"))["question"] is None
    thread.post(items.pending_prompt("p", "approval", (approval_question("Bash → make"),), "Bash make"))
    question = json.loads(thread("show", ALIAS, "--json"))["question"]
    assert (question["prompt_id"], question["kind"]) == ("p", "approval")
    assert [option["label"] for option in question["questions"][0]["options"]] == ["Approve", "Deny"]
