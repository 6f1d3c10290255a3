"""Codex's real CLI, with a stand-in for the model."""

import base64
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.events import (
    AgentEvent,
    Answer,
    Ended,
    Image,
    Injected,
    Question,
    SessionStarted,
    Status,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    Usage,
)
from tests.support import wait_until
from tests.wire.agents import DIED, SECRET, Desk, Host, of, running_model

pytest.importorskip("codex_cli_bin", reason="the codex extra is not installed")

from agents import codex_turn
from agents.codex import Codex, version_warning

PROVIDER_KEY = "k3y-of-the-provider"
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: a.txt
@@
-one
+two
*** Add File: b.txt
+new
*** End Patch
EOF
"""
PATCH_OUTSIDE = """apply_patch <<'EOF'
*** Begin Patch
*** Add File: /nowhere/touch no
+new
*** End Patch
EOF
"""
COLORS = {"id": "color", "header": "Color", "question": "Which?", "options": [{"label": "red", "description": "warm"}]}


def shell(command: str, **more: object) -> dict:
    return {"tool_use": {"name": "exec_command", "input": {"cmd": command, **more}}}


def outside(command: str) -> dict:
    return shell(command, sandbox_permissions="require_escalated", justification="because")


def script() -> dict:
    return {
        "steps": [
            {
                "match": "PARSER",
                "rounds": [
                    [{"thinking": "hm"}, {"text": "I look."}, shell("env; false")],
                    [shell(PATCH)],
                    [{"text": "Done."}],
                ],
                "usage": {"input_tokens": 1, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 4},
            },
            {"match": "AGAIN", "rounds": [[{"text": "Still here."}]]},
            {"match": "UNAUTHORIZED", "rounds": [[]], "errors": {"times": 9, "status": 401}},
            {"match": "INVALID", "rounds": [[]], "errors": {"times": 9, "status": 400}},
            {"match": "OVERLOADED", "rounds": [[]], "errors": {"times": 9, "status": 529}},
            {"match": "LIMITED", "rounds": [[]], "errors": {"times": 9, "status": 429}},
            {"match": "SEVERED", "rounds": [[{"text": "abc"}]], "errors": {"times": 9, "severed": 0}},
            {"match": "WRITE", "rounds": [[outside("touch yes"), outside("touch no")], [{"text": "Done."}]]},
            {"match": "PATCH", "rounds": [[shell(PATCH_OUTSIDE)], [{"text": "Done."}]]},
            {"match": "SANDBOX", "rounds": [[shell("touch ../beside")], [{"text": "Done."}]]},
            {
                "match": "ASK",
                "rounds": [[{"tool_use": {"name": "request_user_input", "input": {"questions": [COLORS]}}}], []],
            },
            {"match": "HANG", "rounds": [[shell("setsid sleep 61 & sleep 61", yield_time_ms=30000)]]},
            {"match": "LATER", "rounds": [[shell("sleep 61", yield_time_ms=250)], [{"text": "Done."}]]},
        ]
    }


class CodexDesk(Desk):
    adapter = Codex

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, url)
        self.configure(url)

    def configure(self, url: str) -> None:
        (self.home / "config.toml").write_text(f"""
model = "stub-model"
model_provider = "stub"
check_for_update_on_startup = false
[model_providers.stub]
name = "Stub"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "STUB_API_KEY"
request_max_retries = 0
stream_max_retries = 1
""")

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "CODEX_HOME": str(self.home),
            "STUB_API_KEY": PROVIDER_KEY,
            "GREETING": "hello",
        }


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_model(tmp_path_factory.mktemp("codex-model"), script()) as url:
        yield url


@pytest.fixture
def desk(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("BLOBHUB_API_KEY", SECRET)
    desk = CodexDesk(tmp_path, url)
    yield desk
    assert desk.processes() == []


def texts(events: list) -> list[str]:
    return [event.text for event in of(Text, events)]


def test_a_turn_runs_real_tools_and_the_next_one_resumes_its_thread(desk: Desk):
    first = desk.play("fix the PARSER")
    assert [type(event) for event in first if not isinstance(event, Usage)] == [
        SessionStarted,
        Thinking,
        Text,
        *[ToolCall, ToolResult] * 2,
        Text,
        Ended,
    ]
    assert [event.text for event in of((Thinking, Text), first)] == ["hm", "I look.", "Done."]
    ran, changed = of(ToolCall, first)
    assert (ran.name, ran.input) == ("shell", {"command": "env; false", "cwd": str(desk.work)})
    assert (changed.name, [each["kind"] for each in changed.input["changes"]]) == ("file_change", ["update", "add"])
    assert changed.input["changes"][0]["path"] == str(desk.work / "a.txt")
    assert "+two" in changed.input["changes"][0]["diff"]
    results = of(ToolResult, first)
    assert [result.invocation_id for result in results] == [ran.invocation_id, changed.invocation_id]
    assert [result.is_error for result in results] == [True, False]
    assert (desk.work / "a.txt").read_text() == "two\n"
    assert of(Usage, first) == [Usage(7, 4, 30)] * 3
    assert first[-1] == Ended(ok=True)

    thread_id = first[0].session_id
    recorded = Codex().recorded(desk.request("", session_id=thread_id))
    assert recorded == [event for event in first if getattr(event, "uid", None)]

    second = desk.play("AGAIN, please", session_id=thread_id)
    assert second[0] == SessionStarted(thread_id)
    assert texts(second) == ["Still here."]
    assert of(Usage, second) == [Usage(420, 400, 30)]


def test_a_command_sees_what_was_configured_for_it_and_no_key(desk: Desk):
    (output, *_) = [result.output for result in of(ToolResult, desk.play("PARSER"))]
    assert "GREETING=hello" in output
    assert PROVIDER_KEY not in output
    assert SECRET not in output


@pytest.mark.parametrize(
    ("prompt", "words", "transient", "retries"),
    [
        ("UNAUTHORIZED", "401", False, 1),
        ("INVALID", "rehearsed invalid_request_error", False, 0),
        ("OVERLOADED", "529", True, 1),
        ("LIMITED", "429", True, 1),
        ("SEVERED", "stream disconnected", True, 1),
    ],
)
def test_a_failure_of_the_model_ends_the_turn_with_its_words(
    desk: Desk, prompt: str, words: str, transient: bool, retries: int
):
    events = desk.play(prompt)
    assert [status.status for status in of(Status, events)] == ["api_retry"] * retries
    assert (events[-1].ok, events[-1].transient) == (False, transient)
    assert words in events[-1].error
    assert not events[-1].error.startswith("{")


def test_a_provider_that_cannot_be_reached_is_given_up(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(codex_turn, "UNREACHABLE_S", 0.2)
    desk.configure("http://127.0.0.1:1")
    events = desk.play("AGAIN")
    assert [status.status for status in of(Status, events)] == ["api_retry"]
    assert (events[-1].ok, events[-1].transient) == (False, True)
    assert "Connection failed" in events[-1].error


@pytest.mark.parametrize("permissions", ["approval", "guarded"])
def test_leaving_the_sandbox_is_asked_for_and_a_refusal_is_explained(desk: Desk, permissions: str):
    host = Host()
    events = desk.play("WRITE", host=host, permissions=permissions)
    told = {call.invocation_id: (call.name, call.input) for call in of(ToolCall, events)}
    assert {call.invocation_id: (call.name, call.input) for call in host.permitted} == told
    assert sorted(command["command"] for _, command in told.values()) == ["touch no", "touch yes"]
    assert {told[result.invocation_id][1]["command"]: result.output for result in of(ToolResult, events)} == {
        "touch yes": "",
        "touch no": "not this one",
    }
    assert [event.text for event in of(Injected, events)] == ["The call `touch no` was declined: not this one"]
    assert events[-1] == Ended(ok=True)
    assert sorted(path.name for path in desk.work.iterdir()) == ["a.txt", "yes"]


def test_a_change_outside_the_sandbox_is_asked_for_with_its_paths(desk: Desk):
    host = Host()
    events = desk.play("PATCH", host=host, permissions="guarded")
    (call,) = host.permitted
    assert call.name == "file_change"
    assert call.input == {"changes": [{"path": "/nowhere/touch no", "kind": "add", "diff": "new\n"}]}
    assert [(result.is_error, result.output) for result in of(ToolResult, events)] == [(True, "not this one")]
    assert events[-1] == Ended(ok=True)


def test_autonomous_asks_nobody(desk: Desk):
    host = Host()
    events = desk.play("SANDBOX", host=host)
    assert host.permitted == []
    assert [result.is_error for result in of(ToolResult, events)] == [False]
    assert (desk.folder / "beside").exists()


def test_a_question_is_asked_and_its_answer_reaches_the_agent(desk: Desk):
    host = Host(Answer((("red",),)))
    assert desk.play("ASK", host=host, permissions="approval")[-1] == Ended(ok=True)
    assert host.asked == [("ask_user_question", (Question("Which?", "Color", (("red", "warm"),)),))]
    (rollout,) = desk.home.glob("sessions/*/*/*/*.jsonl")
    (output,) = [line for line in rollout.read_text().splitlines() if '"function_call_output"' in line]
    assert "red" in output


def test_a_question_that_nobody_answers_does_not_hold_the_turn(desk: Desk):
    host = Host()
    assert desk.play("ASK", host=host)[-1] == Ended(ok=True)
    assert len(host.asked) == 1


def test_a_question_that_is_parked_ends_the_turn_and_its_thread_can_be_resumed(desk: Desk):
    said: list[AgentEvent] = []
    with pytest.raises(RuntimeError, match="parked"):
        desk.play("ASK", host=Host(parks=True), when=said.append)
    assert desk.processes() == []
    assert texts(desk.play("AGAIN", session_id=said[0].session_id)) == ["Still here."]


def test_images_reach_the_model(desk: Desk):
    image = Image(desk.work / "a.png", "image/png", PIXEL)
    assert desk.play("AGAIN", images=(image,))[-1] == Ended(ok=True)
    (rollout,) = desk.home.glob("sessions/*/*/*/*.jsonl")
    assert '"input_image"' in rollout.read_text()


@pytest.mark.parametrize("permissions", ["autonomous", "approval"])
def test_the_work_folders_own_configuration_is_read_only_when_autonomous(desk: Desk, permissions: str):
    (desk.work / ".codex").mkdir()
    (desk.work / ".codex" / "config.toml").write_text('mcp_servers.x = {command = "touch", args = ["started"]}')
    (desk.work / "AGENTS.md").write_text("Speak of turtles.\n")
    desk.play("AGAIN", permissions=permissions)
    assert (desk.work / "started").exists() == (permissions == "autonomous")
    (rollout,) = desk.home.glob("sessions/*/*/*/*.jsonl")
    assert "Speak of turtles." in rollout.read_text()


def test_a_command_that_outlives_its_turn_is_ended_and_told_of(desk: Desk):
    events = desk.play("LATER", when=lambda event: isinstance(event, Text) and wait_until(lambda: desk.sleeping()) > 9)
    (result,) = of(ToolResult, events)
    assert result.is_error
    assert "still running" in result.output
    assert events[-1] == Ended(ok=True)


def test_a_killed_cli_is_a_death_its_commands_die_with_it_and_its_thread_can_be_resumed(desk: Desk):
    def kill(event: AgentEvent) -> None:
        if isinstance(event, ToolCall):
            wait_until(lambda: desk.sleeping() == 2)
            desk.kill()

    events = desk.play("HANG", when=kill)
    assert events[-2] == DIED
    assert desk.processes() == []
    assert texts(desk.play("AGAIN", session_id=events[0].session_id)) == ["Still here."]


def test_a_session_that_was_told_of_can_be_resumed_at_once(desk: Desk):
    events = desk.play("HANG", when=lambda event: isinstance(event, SessionStarted) and desk.kill())
    assert events[1] == DIED
    resumed = desk.play("AGAIN", session_id=events[0].session_id)
    assert texts(resumed) == ["Still here."]
    (rollout,) = desk.home.glob("sessions/*/*/*/*.jsonl")
    assert "HANG" in rollout.read_text()


def test_closing_a_turn_ends_the_cli_and_its_commands_within_two_seconds(desk: Desk):
    seen: list[float] = []

    def close(event: AgentEvent) -> bool:
        if not isinstance(event, ToolCall):
            return False
        wait_until(lambda: desk.sleeping() == 2)
        seen.append(time.monotonic())
        return True

    desk.play("HANG", when=close)
    assert time.monotonic() - seen[0] < 2
    assert desk.processes() == []
    (rollout,) = desk.home.glob("sessions/*/*/*/*.jsonl")
    assert '"turn_aborted"' in rollout.read_text()


def test_a_thread_that_codex_does_not_have_ends_the_turn_with_its_words(desk: Desk):
    (ended,) = desk.play("AGAIN", session_id="00000000-0000-4000-8000-000000000000")
    assert (ended.ok, ended.transient) == (False, False)
    assert "00000000-0000-4000-8000-000000000000" in ended.error


def test_a_cli_that_cannot_be_started_is_a_death(desk: Desk):
    assert desk.play("AGAIN", executable="/no/such/codex")[0] == DIED


def test_the_bundled_cli_is_a_tested_one():
    assert version_warning() is None
