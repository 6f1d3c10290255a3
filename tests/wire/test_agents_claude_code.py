"""Claude Code's real CLI, with a stand-in for the model."""

import base64
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.events import (
    AgentEvent,
    Answer,
    Ended,
    Image,
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
from tests.wire.agents import DIED, SECRET, Desk, Host, claude_environment, of, running_model

pytest.importorskip("claude_agent_sdk", reason="the claude extra is not installed")

from agents.claude_code import ClaudeCode

#: A PNG of one grey pixel, in base64.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="

#: What the model writes in one call: more than the SDK's own limit for a line.
LARGE = "0123456789abcdef" * (2 << 16)

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
    write = {"tool_use": {"name": "Write", "input": {"file_path": str(work / "large"), "content": LARGE}}}
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
            {
                "match": "CUT OFF",
                "rounds": [[bash("echo ran >> runs")], [{"text": "Done."}]],
                "errors": {"times": 1, "severed": 1},
            },
            {"match": "TORN", "rounds": [[{"text": "abc"}]], "errors": {"times": 9, "severed": 0}},
            {"match": "LARGE", "rounds": [[write], [{"text": "Done."}]]},
            {"match": "HANG", "rounds": [[bash("setsid sleep 61 & sleep 61")]]},
        ]
    }


class ClaudeDesk(Desk):
    adapter = ClaudeCode

    def environment(self) -> dict[str, str]:
        return claude_environment(self.home, self.url)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("claude")
    with running_model(folder, script(folder / "work")) as url:
        yield folder, url


@pytest.fixture
def desk(api: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("BLOBHUB_API_KEY", SECRET)
    desk = ClaudeDesk(*api)
    yield desk
    assert desk.processes() == []
    for name in ("yes", "no", "runs", "large"):
        (desk.work / name).unlink(missing_ok=True)


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


def test_a_stream_severed_behind_a_whole_call_runs_the_call_once_and_goes_on(desk: Desk):
    events = desk.play("CUT OFF")
    # The CLI takes the call that it has, or asks the model again and says so: that depends on what it sees first.
    said = [event for event in events if not isinstance(event, Status)]
    assert {status.status for status in of(Status, events)} <= {"api_retry"}
    assert [type(event) for event in said] == [SessionStarted, ToolCall, ToolResult, Text, Usage, Ended]
    assert (desk.work / "runs").read_text() == "ran\n"
    assert events[-1] == Ended(ok=True)


def test_a_stream_severed_within_a_block_says_nothing_of_it_and_is_transient(desk: Desk):
    events = desk.play("TORN")
    assert [type(event) for event in events] == [SessionStarted, Status, Usage, Ended]
    assert (events[-1].ok, events[-1].transient) == (False, True)


def test_a_call_of_two_megabytes_arrives_whole(desk: Desk):
    events = desk.play("LARGE")
    (call,) = of(ToolCall, events)
    assert call.input["content"] == LARGE
    assert (desk.work / "large").read_text() == LARGE
    assert events[-1] == Ended(ok=True)


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
    host = Host(Answer((("red", "blue"), ("they shine",))))
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
            wait_until(lambda: desk.sleeping() == 2)
            desk.kill()

    assert desk.play("HANG", when=kill)[-2] == DIED


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


def test_a_session_that_the_cli_does_not_have_ends_the_turn_with_its_words(desk: Desk):
    events = desk.play("AGAIN", session_id="00000000-0000-4000-8000-000000000000")
    assert "No conversation found" in events[-1].error
    assert not events[-1].ok


def test_a_cli_that_cannot_be_started_is_a_death(desk: Desk):
    assert desk.play("AGAIN", executable="/no/such/claude")[0] == DIED
