"""Claude Code's real CLI, with a stand-in for the model."""

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from fleet.events import (
    AgentDiedError,
    AgentEvent,
    Answer,
    Decision,
    Ended,
    Image,
    PromptCancelledError,
    Question,
    SessionStarted,
    Status,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    TurnRequest,
    Usage,
)
from tests.support import wait_until

pytest.importorskip("claude_agent_sdk", reason="the claude extra is not installed")

from agents.claude_code import ClaudeCode

SECRET = "s3cr3t-of-the-worker"
DIED = "died"


#: A PNG of one grey pixel, in base64.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="

QUESTIONS = {
    "questions": [
        {
            "question": "Which colors?",
            "header": "Color",
            "options": [{"label": "red", "description": "warm"}, {"label": "blue"}],
            "multiSelect": True,
        },
        {"question": "Why?"},
    ]
}


def bash(command: str) -> dict:
    return {"tool_use": {"name": "Bash", "input": {"command": command, "description": "run it"}}}


def script(work: Path) -> dict:
    file = str(work / "a.txt")
    edit = {"file_path": file, "old_string": "one", "new_string": "two"}
    return {
        "steps": [
            {
                "match": "PARSER",
                "rounds": [
                    [{"thinking": "hm"}, {"text": "I look."}, bash("env; cat a.txt; false")],
                    [{"tool_use": {"name": "Read", "input": {"file_path": file}}}],
                    [{"tool_use": {"name": "Edit", "input": edit}}],
                    [{"text": "Done."}],
                ],
                "usage": {"input_tokens": 1, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 4},
            },
            {"match": "AGAIN", "rounds": [[{"text": "Still here."}]]},
            {"match": "UNAUTHORIZED", "rounds": [[]], "errors": {"times": 9, "status": 401}},
            {"match": "OVERLOADED", "rounds": [[]], "errors": {"times": 9, "status": 529}},
            {"match": "WRITE", "rounds": [[bash("touch yes"), bash("touch no")], [{"text": "Done."}]]},
            {
                "match": "READ",
                "rounds": [[{"tool_use": {"name": "Read", "input": {"file_path": file}}}, bash("touch no")], []],
            },
            {"match": "ASK", "rounds": [[{"tool_use": {"name": "mcp__fleet__ask_user", "input": QUESTIONS}}], []]},
            {"match": "HANG", "rounds": [[bash("setsid sleep 61 & sleep 61")]]},
        ]
    }


class Host:
    """Allows what doesn't mention `no`; `parks` raises instead, as the fleet does when it parks."""

    def __init__(self, *, parks: bool = False) -> None:
        self.parks = parks
        self.permitted: list[ToolCall] = []
        self.answer: Answer | None = None
        self.asked: list[tuple[str, tuple[Question, ...]]] = []

    async def permit(self, call: ToolCall) -> Decision:
        self.permitted.append(call)
        if self.parks:
            raise RuntimeError("parked")
        return Decision("touch no" not in str(call.input), "not this one")

    async def ask(self, kind: str, questions: tuple[Question, ...]) -> Answer:
        self.asked.append((kind, questions))
        if self.parks:
            raise RuntimeError("parked")
        if self.answer is None:
            raise PromptCancelledError
        return self.answer


class Desk:
    """A work folder, a home and the stand-in's address."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.home = folder / "home"
        for each in (self.work, self.home):
            each.mkdir(exist_ok=True)
        (self.work / "a.txt").write_text("one\n")
        self.url = url

    def request(self, prompt: str, permissions="autonomous", session_id=None, executable="", images=()) -> TurnRequest:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "CLAUDE_CONFIG_DIR": str(self.home / ".claude"),
            "CLAUDE_CODE_TMPDIR": str(self.home),
            "TMPDIR": str(self.home),
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "dummy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "CLAUDE_CODE_MAX_RETRIES": "1",
        }
        return TurnRequest(
            work_folder=self.work,
            prompt=prompt,
            turn=1,
            session_id=session_id,
            permissions=permissions,
            state_dir=self.folder / "state",
            process_file=self.folder / "state" / "process.json",
            env=env,
            executable=executable,
            images=images,
        )

    def play(
        self, prompt: str, *, host: Host | None = None, when: Callable[[AgentEvent], None] | None = None, **options
    ) -> list:
        """Run a turn. `when` sees each event; what it returns true for is the last one."""

        async def run() -> list:
            said = []
            turn = ClaudeCode().turn(self.request(prompt, **options), host or Host())
            try:
                async for event in turn:
                    said.append(event)
                    if when is not None and when(event):
                        break
            except AgentDiedError:
                said.append(DIED)
            await turn.aclose()
            return said

        return asyncio.run(asyncio.wait_for(run(), 60))

    def processes(self) -> list[psutil.Process]:
        """Return what lives in this folder."""
        found = []
        for each in psutil.process_iter(["environ", "status"]):
            environ = each.info["environ"] or {}
            if environ.get("HOME") == str(self.home) and each.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(each)
        return found


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("claude")
    (folder / "script.yaml").write_text(yaml.safe_dump(script(folder / "work")))
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "fleet.sandbox.model_api", "--script", str(folder / "script.yaml")]
    with subprocess.Popen([*command, "--ready-file", str(ready)], stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(ready.exists, 30)
            yield folder, json.loads(ready.read_text())["url"]
        finally:
            server.kill()


@pytest.fixture
def desk(api: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("BLOBHUB_API_KEY", SECRET)
    desk = Desk(*api)
    yield desk
    assert desk.processes() == []
    for name in ("yes", "no"):
        (desk.work / name).unlink(missing_ok=True)


def of(kind, events: list) -> list:
    return [event for event in events if isinstance(event, kind)]


def test_a_turn_runs_real_tools_and_the_next_one_resumes_its_session(desk: Desk):
    first = desk.play("fix the PARSER")
    assert [type(event) for event in first] == [
        SessionStarted,
        Thinking,
        Text,
        *[ToolCall, ToolResult] * 3,
        Text,
        Usage,
        Ended,
    ]
    assert [event.text for event in of((Thinking, Text), first)] == ["hm", "I look.", "Done."]
    assert [call.name for call in of(ToolCall, first)] == ["Bash", "Read", "Edit"]
    results = of(ToolResult, first)
    assert [result.invocation_id for result in results] == [call.invocation_id for call in of(ToolCall, first)]
    assert [result.is_error for result in results] == [True, False, False]
    assert "one" in results[0].output
    assert "ANTHROPIC_BASE_URL" in results[0].output
    assert SECRET not in results[0].output
    assert (desk.work / "a.txt").read_text() == "two\n"
    assert of(Usage, first) == [Usage(4 * 7, 4 * 4, 4 * 30)]
    assert first[-1] == Ended(ok=True)

    session_id = first[0].session_id
    recorded = ClaudeCode().recorded(desk.request("", session_id=session_id))
    assert recorded == [event for event in first if getattr(event, "uid", None)]

    second = desk.play("AGAIN, please", session_id=session_id)
    assert second[0] == SessionStarted(session_id)
    assert [event.text for event in of(Text, second)] == ["Still here."]


def test_an_image_stands_beside_the_prompt_in_the_conversation(desk: Desk):
    image = Image(desk.work / "pixel.png", "image/png", base64.b64decode(PIXEL))
    events = desk.play("AGAIN, look", images=(image,))
    assert [type(event) for event in events] == [SessionStarted, Text, Usage, Ended]
    session_id = events[0].session_id
    (transcript,) = desk.home.glob(f".claude/projects/*/{session_id}.jsonl")
    messages = [json.loads(line).get("message") for line in transcript.read_text().splitlines()]
    prompt = next(message["content"] for message in messages if message and message["role"] == "user")
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    assert prompt == [{"type": "text", "text": "AGAIN, look"}, {"type": "image", "source": source}]
    assert ClaudeCode().recorded(desk.request("", session_id=session_id)) == [events[1]]


def test_a_refused_key_is_not_transient(desk: Desk):
    events = desk.play("UNAUTHORIZED")
    assert not of(Text, events)
    assert (events[-1].ok, events[-1].transient) == (False, False)
    assert "401" in events[-1].error


def test_an_overloaded_model_is_transient_once_the_retries_are_spent(desk: Desk):
    events = desk.play("OVERLOADED")
    (retry,) = of(Status, events)
    assert retry.status == "api_retry"
    assert "529, attempt 1 of 1" in retry.detail
    assert (events[-1].ok, events[-1].transient) == (False, True)
    assert "529" in events[-1].error


def test_approval_asks_a_person_whatever_the_work_folder_allows(desk: Desk):
    hook = {"hooks": [{"type": "command", "command": "touch hooked"}]}
    settings = {"permissions": {"allow": ["Bash"]}, "hooks": {"SessionStart": [hook]}}
    (desk.work / ".claude").mkdir()
    (desk.work / ".claude" / "settings.json").write_text(json.dumps(settings))
    host = Host()
    events = desk.play("WRITE", host=host, permissions="approval")
    assert [call.input["command"] for call in host.permitted] == ["touch yes", "touch no"]
    assert [call.invocation_id for call in host.permitted] == [call.invocation_id for call in of(ToolCall, events)]
    assert [(result.is_error, "not this one" in result.output) for result in of(ToolResult, events)] == [
        (False, False),
        (True, True),
    ]
    assert sorted(path.name for path in desk.work.iterdir()) == [".claude", "a.txt", "yes"]
    shutil.rmtree(desk.work / ".claude")


def test_guarded_asks_about_every_call(desk: Desk):
    host = Host()
    events = desk.play("READ", host=host, permissions="guarded")
    assert [call.name for call in host.permitted][:2] == ["Read", "Bash"]
    assert [result.is_error for result in of(ToolResult, events)] == [False, True]
    assert not (desk.work / "no").exists()


@pytest.mark.parametrize(("prompt", "permissions"), [("READ", "guarded"), ("WRITE", "approval"), ("ASK", "autonomous")])
def test_what_is_parked_ends_the_turn_instead_of_going_on(desk: Desk, prompt: str, permissions: str):
    said: list[AgentEvent] = []
    with pytest.raises(RuntimeError, match="parked"):
        desk.play(prompt, host=Host(parks=True), permissions=permissions, when=said.append)
    assert desk.processes() == []
    assert of(ToolResult, said) == []
    assert not (desk.work / "yes").exists()
    resumed = desk.play("AGAIN", session_id=said[0].session_id)
    assert [event.text for event in of(Text, resumed)] == ["Still here."]


@pytest.mark.parametrize("permissions", ["autonomous", "approval", "guarded"])
def test_a_question_is_asked_without_permission_and_its_answer_reaches_the_agent(desk: Desk, permissions: str):
    host = Host()
    host.answer = Answer((("red", "blue"), ("they shine",)))
    events = desk.play("ASK", host=host, permissions=permissions)
    colors = Question("Which colors?", "Color", (("red", "warm"), ("blue", "")), multi_select=True)
    assert host.asked == [("ask_user_question", (colors, Question("Why?")))]
    assert host.permitted == []
    (result,) = of(ToolResult, events)
    assert not result.is_error
    assert result.output == "Which colors?\nAnswer: red, blue\n\nWhy?\nAnswer: they shine"


def test_a_question_that_nobody_answers_is_an_error_of_the_tool(desk: Desk):
    (result,) = of(ToolResult, desk.play("ASK", permissions="approval"))
    assert result.is_error
    assert "Nobody will answer" in result.output


def test_a_killed_cli_is_a_death_and_its_commands_die_with_it(desk: Desk):
    def kill(event: AgentEvent) -> None:
        if isinstance(event, ToolCall):
            wait_until(lambda: sum("sleep" in each.name() for each in desk.processes()) == 2)
            os.kill(json.loads((desk.folder / "state" / "process.json").read_text())["agent"]["pid"], signal.SIGKILL)

    assert desk.play("HANG", when=kill)[-1] == DIED


def test_closing_a_turn_ends_the_cli_and_its_commands_within_two_seconds(desk: Desk):
    seen: list[float] = []

    def close(event: AgentEvent) -> bool:
        if not isinstance(event, ToolCall):
            return False
        wait_until(lambda: sum("sleep" in each.name() for each in desk.processes()) == 2)
        seen.append(time.monotonic())
        return True

    desk.play("HANG", when=close)
    assert time.monotonic() - seen[0] < 2
    assert desk.processes() == []


def test_a_session_that_the_cli_does_not_have_ends_the_turn_with_its_words(desk: Desk):
    events = desk.play("AGAIN", session_id="00000000-0000-4000-8000-000000000000")
    assert "No conversation found" in events[-1].error
    assert not events[-1].ok


def test_a_cli_that_cannot_be_started_is_a_death(desk: Desk):
    assert desk.play("AGAIN", executable="/no/such/claude") == [DIED]
