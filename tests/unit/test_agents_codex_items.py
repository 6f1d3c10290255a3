"""What Codex's app-server tells, as events."""

import json

import pytest

from agents.codex_items import call_in, command_line, is_transient, recorded_in, result_in, said_in, words_of
from fleet.events import Injected, Status, Text, Thinking, ToolCall, ToolResult

THREAD = "t1"


def error(info: object, message: str = "failed") -> dict:
    return {"message": message, "codexErrorInfo": info, "additionalDetails": None}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("/bin/bash -lc 'cd x && git push'", "cd x && git push"),
        (["/usr/bin/zsh", "-c", "git push"], "git push"),
        ("/bin/sh -c 'it'\\''s'", "it's"),
        ("git push 'a b'", "git push 'a b'"),
        ("/work/bash -lc 'git status'", "/work/bash -lc 'git status'"),
        ("bash -lc 'git status'", "bash -lc 'git status'"),
        (["git", "push", "a b"], "git push 'a b'"),
        ("/bin/bash -lc 'one' two", "/bin/bash -lc 'one' two"),
        ("python -c 'import x'", "python -c 'import x'"),
        ("bash -lc 'never closed", "bash -lc 'never closed"),
    ],
)
def test_a_command_line_loses_the_shell_that_codex_puts_around_it(given: str | list[str], line: str):
    assert command_line(given) == line


def test_what_is_said_becomes_text_thinking_injected_and_status():
    assert said_in({"type": "agentMessage", "id": "a", "text": "Hi"}) == Text("Hi", "a")
    assert said_in({"type": "reasoning", "id": "r", "summary": ["a", "b"], "content": []}) == Thinking("a\n\nb", "r")
    assert said_in({"type": "reasoning", "id": "r", "summary": [], "content": ["raw"]}) == Thinking("raw", "r")
    assert said_in({"type": "hookPrompt", "id": "h", "fragments": [{"text": "Stop."}]}) == Injected("Stop.", "h")
    compaction = said_in({"type": "contextCompaction", "id": "c"})
    assert isinstance(compaction, Status)
    assert compaction.status == "compacting_context"
    assert said_in({"type": "sleep", "id": "s", "durationMs": 5}) is None


@pytest.mark.parametrize(
    ("item", "name", "given"),
    [
        (
            {"type": "commandExecution", "command": "/bin/bash -lc ls", "cwd": "/w"},
            "shell",
            {"command": "ls", "cwd": "/w"},
        ),
        ({"type": "mcpToolCall", "server": "s", "tool": "poke", "arguments": {"x": 1}}, "mcp__s__poke", {"x": 1}),
        ({"type": "webSearch", "query": "turtles"}, "web_search", {"query": "turtles", "action": None}),
        ({"type": "imageView", "path": "/w/a.png"}, "view_image", {"path": "/w/a.png"}),
        (
            {"type": "collabAgentToolCall", "tool": "spawnAgent", "prompt": "go", "model": None},
            "subagent",
            {"action": "spawnAgent", "prompt": "go", "model": None},
        ),
    ],
)
def test_a_tools_item_is_a_call_with_a_name_that_policies_can_use(item: dict, name: str, given: dict):
    assert call_in({**item, "id": "i"}) == ToolCall("i", name, given, "i:call")


def test_a_change_of_files_names_every_path_in_a_fixed_order():
    moved = {"path": "/w/b", "kind": {"type": "update", "move_path": "/w/c"}, "diff": "@@"}
    added = {"path": "/w/a", "kind": {"type": "add"}, "diff": "new\n"}
    call = call_in({"type": "fileChange", "id": "i", "changes": [moved, added]})
    assert call is not None
    assert call.input == {
        "changes": [
            {"path": "/w/a", "kind": "add", "diff": "new\n"},
            {"path": "/w/b", "kind": "update", "diff": "@@", "move_path": "/w/c"},
        ]
    }


@pytest.mark.parametrize(
    ("item", "output", "is_error"),
    [
        ({"type": "commandExecution", "status": "completed", "exitCode": 0, "aggregatedOutput": "a\n"}, "a\n", False),
        ({"type": "commandExecution", "status": "failed", "exitCode": 1, "aggregatedOutput": None}, "failed", True),
        ({"type": "commandExecution", "status": "declined", "exitCode": None}, "declined", True),
        ({"type": "mcpToolCall", "status": "failed", "error": {"message": "no"}}, "no", True),
        (
            {
                "type": "mcpToolCall",
                "status": "completed",
                "result": {"content": [{"type": "text", "text": "a"}, {"type": "image"}]},
            },
            "a\n[image]",
            False,
        ),
        ({"type": "webSearch", "query": "x"}, "", False),
    ],
)
def test_a_result_is_an_error_by_its_status_or_exit_code(item: dict, output: str, is_error: bool):
    assert result_in({**item, "id": "i"}) == ToolResult("i", output, is_error, "i:result")


def test_a_declined_calls_result_is_the_reason():
    item = {"type": "commandExecution", "id": "i", "status": "declined"}
    assert result_in(item, "not today") == ToolResult("i", "not today", is_error=True, uid="i:result")


@pytest.mark.parametrize(
    ("given", "transient"),
    [
        (error({"responseStreamDisconnected": {"httpStatusCode": None}}), True),
        (error({"httpConnectionFailed": {"httpStatusCode": 503}}), True),
        (error({"responseTooManyFailedAttempts": {"httpStatusCode": 429}}), True),
        (error({"httpConnectionFailed": {"httpStatusCode": 401}}), False),
        (error({"activeTurnNotSteerable": {"turnKind": "review"}}), False),
        (error("serverOverloaded"), True),
        (error("unauthorized"), False),
        (error("usageLimitExceeded"), False),
        (error("badRequest"), False),
        (error("other", "stream disconnected before completion: x"), True),
        (error("other", "invalid"), False),
        (error(None), False),
    ],
)
def test_only_what_waiting_may_cure_is_transient(given: dict, transient: bool):
    assert is_transient(given) == transient


def test_a_providers_words_are_taken_out_of_their_json():
    assert words_of(error("other", json.dumps({"error": {"message": "bad model"}}))) == "bad model"
    assert words_of(error("other", "plain")) == "plain"
    assert words_of(error("other", '{"error": "flat"}')) == '{"error": "flat"}'


def line(kind: str, **payload: object) -> str:
    return json.dumps({"type": "event_msg", "payload": {"type": kind, **payload}})


def completed(item: dict, thread: str = THREAD) -> str:
    return line("item_completed", thread_id=thread, item=item)


def test_a_rollout_gives_the_last_turn_of_its_thread_even_when_it_was_cut_short():
    said = {"type": "AgentMessage", "id": "m", "content": [{"type": "Text", "text": "Hi"}]}
    ran = {
        "type": "CommandExecution",
        "id": "c",
        "command": ["/bin/bash", "-lc", "ls"],
        "cwd": "file:///w%20x",
        "status": "completed",
        "aggregated_output": "a\n",
        "exit_code": 0,
    }
    lines = [
        line("task_started", turn_id="1"),
        completed({**said, "id": "old"}),
        line("task_started", turn_id="2"),
        completed({"type": "UserMessage", "id": "u", "content": []}),
        completed(said, thread="a subagent's"),
        completed(said),
        completed(ran),
        completed({"type": "SomethingNew", "id": "n"}),
        json.dumps({"type": "response_item", "payload": {"type": "message"}}),
        '{"type": "event_m',
    ]
    assert recorded_in(lines, THREAD) == [
        Text("Hi", "m"),
        ToolCall("c", "shell", {"command": "ls", "cwd": "/w x"}, "c:call"),
        ToolResult("c", "a\n", is_error=False, uid="c:result"),
    ]
