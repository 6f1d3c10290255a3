"""The scripted agent as a real process: what it says, and that a kill neither loses nor doubles any of it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from agents import scripted_player
from agents.scripted import Scripted
from fleet.events import (
    AgentDiedError,
    AgentEvent,
    Answer,
    Decision,
    Ended,
    PromptCancelledError,
    SessionStarted,
    Status,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    TurnRequest,
    Usage,
)

DIED = "died"


class Host:
    """Allows all but `rm`, and answers with `answer`."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer
        self.permitted: list[ToolCall] = []
        self.asked = []

    async def permit(self, call: ToolCall) -> Decision:
        self.permitted.append(call)
        return Decision("rm" not in str(call.input), "rm is not allowed")

    async def ask(self, kind, questions) -> Answer:
        self.asked.append((kind, questions))
        if self.answer is None:
            raise PromptCancelledError
        return self.answer


class Stage:
    """A folder with a script, and turns played in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        self.host = Host()

    def write(self, *turns: dict) -> None:
        (self.folder / "script.yaml").write_text(yaml.safe_dump({"turns": list(turns)}), encoding="utf-8")

    def request(self, prompt="go", *, turn=1, session_id=None) -> TurnRequest:
        return TurnRequest(
            work_folder=self.work,
            prompt=prompt,
            turn=turn,
            session_id=session_id,
            permissions="autonomous",
            state_dir=self.folder / "state",
            process_file=self.folder / "state" / "process.json",
            env={"PATH": os.environ["PATH"]},
            options={"script": str(self.folder / "script.yaml")},
        )

    def play(self, *events: dict, **request) -> list[AgentEvent]:
        if events:
            self.write({"events": list(events)})
        return self.play_until(lambda _: False, **request)

    def play_until(self, enough: Callable[[list], bool], *, kill=False, **request) -> list:
        """Play a turn. When it is `enough`, kill the player and go on reading, or close the turn."""

        async def run() -> list:
            said = []
            turn = Scripted().turn(self.request(**request), self.host)
            try:
                async for event in turn:
                    said.append(event)
                    if enough(said) and not kill:
                        break
                    if enough(said):
                        with suppress(ProcessLookupError):  # it may have come to its end
                            os.kill(self.player(), signal.SIGKILL)
            except AgentDiedError:
                said.append(DIED)
            await turn.aclose()
            return said

        return asyncio.run(asyncio.wait_for(run(), 20))

    def player(self) -> int:
        return json.loads((self.folder / "state" / "process.json").read_text())["agent"]["pid"]

    def recorded(self, session_id: str) -> list[AgentEvent]:
        return Scripted().recorded(self.request(session_id=session_id))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def said(events: list[AgentEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, Text)]


def test_a_turn_starts_with_its_session_and_ends_well(stage: Stage):
    events = stage.play({"thinking": "hm"}, {"text": "hello"}, {"status": {"status": "busy", "detail": "very"}})
    assert isinstance(events[0], SessionStarted)
    uid = f"{events[0].session_id}:1:"
    assert events[1:] == [
        Thinking("hm", uid + "0"),
        Text("hello", uid + "1"),
        Status("busy", "very", uid + "2"),
        Ended(ok=True),
    ]


def test_placeholders_are_filled_in_and_other_braces_stay(stage: Stage):
    events = stage.play(
        {"repeat": {"times": 2, "events": [{"text": "{i} {prompt} {turn} {session_id} {other}"}]}},
        {"tool": {"name": "Bash", "input": {"command": ["echo {prompt}"]}}},
        prompt="do {i}",
        turn=4,
    )
    session_id = events[0].session_id
    assert said(events) == [f"{i} do {{i}} 4 {session_id} {{other}}" for i in (0, 1)]
    assert stage.host.permitted[0].input == {"command": ["echo do {i}"]}


def test_a_tool_is_announced_then_permitted_then_has_its_result(stage: Stage):
    events = stage.play({"tool": {"name": "Bash", "input": {"command": "ls"}, "output": "a\nb", "is_error": True}})
    call, result = events[1:3]
    assert (call.name, call.input) == ("Bash", {"command": "ls"})
    assert (result.invocation_id, result.output, result.is_error) == (call.invocation_id, "a\nb", True)
    assert [each.invocation_id for each in stage.host.permitted] == [call.invocation_id]


def test_a_denied_tool_has_the_denial_as_its_result(stage: Stage):
    events = stage.play({"tool": {"name": "Bash", "input": {"command": "rm x"}, "output": "gone"}}, {"text": "on"})
    assert isinstance(events[2], ToolResult)
    assert (events[2].output, events[2].is_error) == ("rm is not allowed", True)
    assert said(events) == ["on"]


def test_an_answer_is_echoed_in_the_next_text(stage: Stage):
    stage.host.answer = Answer((("tabs", "spaces"), ("yes",)))
    options = [{"label": "tabs", "description": "\\t"}, {"label": "spaces"}]
    questions = [{"question": "Which?", "options": options, "multiSelect": True}, {"question": "Sure?"}]
    events = stage.play({"ask": {"questions": questions}}, {"text": "You said {answer}."})
    assert said(events) == ["You said tabs, spaces; yes."]
    kind, asked = stage.host.asked[0]
    assert kind == "ask_user_question"
    assert asked[0].options == (("tabs", "\\t"), ("spaces", ""))
    assert [question.multi_select for question in asked] == [True, False]


def test_a_cancelled_question_has_no_answer_and_the_turn_goes_on(stage: Stage):
    events = stage.play({"ask": {"questions": [{"question": "Which?"}]}}, {"text": "You said {answer}."})
    assert said(events) == ["You said (no answer)."]


def test_files_and_links_are_written_into_the_work_folder(stage: Stage):
    (stage.work / "old").mkdir()
    (stage.work / "old" / "file").touch()
    events = stage.play(
        {"repeat": {"times": 2, "events": [{"write": {"path": ".out/{i}.md", "text": "é {i}"}}]}},
        {"write": {"path": "b.bin", "base64": "AP8="}},
        {"write": {"path": "link", "symlink": "/etc"}},
        {"write": {"path": "old", "text": "new", "replace": True}},
    )
    assert events[-1] == Ended(ok=True)
    assert [(stage.work / ".out" / f"{i}.md").read_text("utf-8") for i in (0, 1)] == ["é 0", "é 1"]
    assert (stage.work / "b.bin").read_bytes() == b"\0\xff"
    assert str((stage.work / "link").readlink()) == "/etc"
    assert (stage.work / "old").read_text() == "new"


@pytest.mark.parametrize("path", ["link/x", "link"])
def test_nothing_is_written_through_a_link_out_of_the_work_folder(stage: Stage, path: str):
    outside = stage.folder / "outside"
    outside.mkdir()
    (stage.work / "link").symlink_to(outside)
    events = stage.play({"write": {"path": path, "text": "x"}})
    assert not events[-1].ok
    assert f"write {path}: " in events[-1].error
    assert list(outside.iterdir()) == []


def test_usage_is_reported(stage: Stage):
    events = stage.play({"usage": {"input_tokens": 100, "input_tokens_cached": 60, "output_tokens": 7}})
    assert events[1] == Usage(100, 60, 7)


def test_a_failure_ends_the_turn_with_its_message(stage: Stage):
    events = stage.play({"fail": "out of ideas"}, {"text": "never"})
    assert events[1:] == [Ended(ok=False, error="out of ideas")]


def test_an_api_error_ends_each_attempt_once_and_the_resume_goes_on_behind_it(stage: Stage):
    first = stage.play({"text": "a"}, {"repeat": {"times": 2, "events": [{"api_error": "overloaded"}]}}, {"text": "b"})
    session_id = first[0].session_id
    second = stage.play(session_id=session_id, prompt="go on")
    third = stage.play(session_id=session_id, prompt="go on")
    assert [each[-1] for each in (first, second)] == [Ended(ok=False, error="overloaded", transient=True)] * 2
    assert [said(each) for each in (first, second, third)] == [["a"], [], ["b"]]
    assert third[-1] == Ended(ok=True)


def test_an_exit_is_a_death_and_the_resume_goes_on_behind_it(stage: Stage):
    first = stage.play({"text": "a"}, {"exit": 137}, {"text": "b"})
    second = stage.play(session_id=first[0].session_id, prompt="go on")
    assert first[-1] == DIED
    assert (said(first), said(second)) == (["a"], ["b"])


def test_a_death_tells_the_exit_status(stage: Stage):
    stage.write({"events": [{"exit": 3}]})

    async def run() -> None:
        async for _ in Scripted().turn(stage.request(), stage.host):
            pass

    with pytest.raises(AgentDiedError, match="status 3"):
        asyncio.run(run())


def test_a_finished_turn_is_followed_by_the_next_ones_script(stage: Stage):
    stage.write(
        {"match": "parser", "events": [{"text": "parsing"}]}, {"match": "test", "events": [{"text": "testing"}]}
    )
    first = stage.play(prompt="fix the parser's test")
    session_id = first[0].session_id
    second = stage.play(prompt="run the test", turn=2, session_id=session_id)
    third = stage.play(prompt="else", turn=3, session_id=session_id)
    assert [said(each) for each in (first, second, third)] == [["parsing"], ["testing"], [scripted_player.NO_MATCH]]
    assert all(each[-1] == Ended(ok=True) for each in (first, second, third))
    assert len({event.uid for each in (first, second, third) for event in each if isinstance(event, Text)}) == 3


def test_a_finished_turn_that_is_asked_for_again_only_ends_again(stage: Stage):
    first = stage.play({"text": "a"})
    again = stage.play(session_id=first[0].session_id, prompt="go on")
    assert again[1:] == [Ended(ok=True)]


WALK = [
    {"text": "one"},
    {"tool": {"name": "Bash", "input": {"command": "ls"}, "output": "x"}},
    {"write": {"path": "a", "text": "a"}},
    {"repeat": {"times": 3, "events": [{"text": "{i}"}, {"sleep": 0.005}]}},
    {"tool": {"name": "Bash", "input": {"command": "rm"}, "output": "x"}},
    {"text": "last"},
]


@pytest.mark.parametrize("kill_after", range(1, 10))
def test_a_kill_at_any_moment_neither_loses_nor_doubles_an_event(stage: Stage, kill_after: int):
    stage.write({"events": WALK})
    first = stage.play_until(lambda events: len(events) == kill_after, kill=True)
    session_id = first[0].session_id
    seen = [event for event in first[1:] if event != DIED and not isinstance(event, Ended)]
    swallowed = [event for event in stage.recorded(session_id) if event not in seen]
    second = stage.play(session_id=session_id, prompt="go on")
    story = seen + swallowed + second[1:-1]
    assert [event.uid for event in story] == [f"{session_id}:1:{n}" for n in (0, 1, 2, 4, 6, 8, 10, 11, 12)]
    assert [event.text for event in story if isinstance(event, Text)] == ["one", "0", "1", "2", "last"]
    assert second[-1] == Ended(ok=True)


def test_a_line_that_a_kill_cut_short_is_dropped_from_the_transcript(stage: Stage):
    first = stage.play({"text": "a"}, {"exit": 1}, {"text": "b"})
    session_id = first[0].session_id
    transcript = stage.folder / "state" / "scripted" / f"{session_id}.jsonl"
    with transcript.open("a") as file:
        file.write('{"type": "text", "n": 2, "te')
    second = stage.play(session_id=session_id)
    assert said(second) == ["b"]
    assert said(stage.recorded(session_id)) == ["a", "b"]


def test_a_closed_turn_leaves_no_process_and_is_resumed_later(stage: Stage):
    stage.write({"events": [{"text": "a"}, {"sleep": 60}]})
    began = time.monotonic()
    first = stage.play_until(lambda events: len(events) == 2)
    assert said(first) == ["a"]
    assert time.monotonic() - began < 2
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(stage.folder) in str(each.info["cmdline"])]
    assert not (stage.folder / "state" / "process.json").exists()
    assert (stage.work / scripted_player.LOCK_FILE).exists()


def test_two_scripted_agents_in_one_folder_are_a_clash(stage: Stage):
    stage.write({"events": [{"text": "a"}, {"sleep": 60}]})

    async def run() -> AgentEvent:
        first = Scripted().turn(stage.request(), stage.host)
        await anext(first)
        other = stage.request()
        second = Scripted().turn(
            TurnRequest(**{**_fields(other), "process_file": stage.folder / "other.json"}), stage.host
        )
        clash = await anext(second)
        await second.aclose()
        await first.aclose()
        return clash

    assert asyncio.run(run()) == Ended(ok=False, error="another scripted agent is running in this folder")


def _fields(request: TurnRequest) -> dict:
    return {name: getattr(request, name) for name in TurnRequest.__slots__}


def test_a_wrong_script_ends_the_turn_and_says_where_it_is_wrong(stage: Stage):
    events = stage.play({"texts": "a"})
    assert len(events) == 1
    assert "turn 1, event 1: unknown kind 'texts'" in events[0].error


@pytest.mark.parametrize("session_id", ["../../etc", "a/b", ""])
def test_a_session_id_never_names_another_file(stage: Stage, session_id: str):
    events = stage.play({"text": "a"}, session_id=session_id or "x" * 65)
    assert not events[-1].ok
    assert not (stage.folder / "state").exists()


def test_the_player_ends_when_its_adapter_is_gone(stage: Stage):
    start = {"turns": [{"match": None, "events": [{"sleep": 60.0}]}], "prompt": "", "turn": 1, "session_id": "s"}
    start |= {"transcript": str(stage.folder / "s.jsonl"), "work_folder": str(stage.work)}
    player = subprocess.run(
        [sys.executable, "-I", "-S", scripted_player.__file__],
        input=scripted_player.encode(start),
        stdout=subprocess.PIPE,
        timeout=10,
    )
    assert player.returncode == 1
    assert json.loads(player.stdout)["type"] == "session"


def test_two_thousand_events_come_whole_in_order_and_at_once(stage: Stage):
    stage.write({"events": [{"repeat": {"times": 2000, "events": [{"text": "line {i}"}]}}]})
    began = time.monotonic()
    events = stage.play()
    took_s = time.monotonic() - began
    assert said(events) == [f"line {i}" for i in range(2000)]
    assert took_s < 2  # 0.15 s on an idle machine
