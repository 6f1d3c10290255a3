"""What Claude Code's messages become."""

import json

import pytest

pytest.importorskip("claude_agent_sdk", reason="the claude extra is not installed")

from claude_agent_sdk import (
    AssistantMessage,
    ResultMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)

from agents.claude_messages import ended_by, events_in, recorded_in, usage_in
from fleet.events import Ended, Injected, Text, Thinking, ToolCall, ToolResult, Usage


def result(**fields) -> ResultMessage:
    usual = {"subtype": "success", "is_error": False, "num_turns": 1, "session_id": "s", "result": "words"}
    return ResultMessage(**{"duration_ms": 1, "duration_api_ms": 1, **usual, **fields})


def failed(**fields) -> ResultMessage:
    return result(is_error=True, terminal_reason="api_error", **fields)


def test_the_models_blocks_keep_their_order_and_have_ids():
    blocks = [ThinkingBlock("hm", "sig"), TextBlock("hello"), ToolUseBlock("t1", "Bash", {"command": "ls"})]
    assert list(events_in(AssistantMessage(blocks, "m", uuid="u"))) == [
        Thinking("hm", "u:0"),
        Text("hello", "u:1"),
        ToolCall("t1", "Bash", {"command": "ls"}, "u:2"),
    ]


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ("plain", "plain"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "image", "source": {}}], "[image]"),
    ],
)
def test_a_result_is_text_in_any_of_its_forms(content, output: str):
    (event,) = events_in(UserMessage([ToolResultBlock("t1", content, None)], uuid="u"))
    assert event == ToolResult("t1", output, is_error=False, uid="u:0")


@pytest.mark.parametrize("content", ["[stopped]", [TextBlock("[stopped]")]])
def test_text_in_the_users_role_is_injected(content):
    assert list(events_in(UserMessage(content, uuid="u"))) == [Injected("[stopped]", "u:0")]


def test_of_a_subagent_only_calls_and_results_are_told():
    said = AssistantMessage([TextBlock("x"), ToolUseBlock("t2", "Read", {})], "m", parent_tool_use_id="t1", uuid="u")
    told = UserMessage([TextBlock("do it"), ToolResultBlock("t2", "ok")], uuid="v", parent_tool_use_id="t1")
    assert [type(event) for message in (said, told) for event in events_in(message)] == [ToolCall, ToolResult]


def test_the_words_of_a_failed_api_call_are_not_the_agents():
    assert list(events_in(AssistantMessage([TextBlock("API Error: 529")], "m", error="overloaded"))) == []


def test_input_tokens_count_cached_and_uncached():
    usage = {"input_tokens": 1, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 4, "output_tokens": 8}
    assert usage_in(result(usage=usage)) == Usage(7, 4, 8)
    assert usage_in(result(usage=None)) == Usage()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
def test_a_failure_that_waiting_may_cure_is_transient(status: int):
    assert ended_by(failed(api_error_status=status), None) == Ended(ok=False, error="words", transient=True)


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 413])
def test_a_refused_request_is_not_transient(status: int):
    assert ended_by(failed(api_error_status=status), None) == Ended(ok=False, error="words", transient=False)


def test_a_lost_connection_is_transient_and_a_missing_login_is_not():
    assert ended_by(failed(), "unknown").transient
    assert not ended_by(failed(), "authentication_failed").transient


def test_a_turn_that_the_cli_gave_up_is_an_error_with_its_words():
    given_up = result(subtype="error_during_execution", is_error=True, result=None, errors=["a", "b"])
    assert ended_by(given_up, None) == Ended(ok=False, error="a; b")
    assert ended_by(result(subtype="error_max_turns", result=None), None) == Ended(ok=False, error="error_max_turns")
    assert ended_by(result(), "server_error") == Ended(ok=True)


def test_a_transcript_has_the_last_turns_events():
    def line(kind: str, uuid: str, content, **fields) -> str:
        return json.dumps({"type": kind, "uuid": uuid, "message": {"role": kind, "content": content}, **fields})

    lines = [
        line("user", "p1", "first", promptSource="sdk"),
        line("assistant", "a1", [{"type": "text", "text": "earlier"}]),
        line("user", "p2", [{"type": "text", "text": "second"}], promptSource="sdk"),
        json.dumps({"type": "queue-operation"}),
        line("user", "m", "meta", isMeta=True),
        line("assistant", "a2", [{"type": "thinking", "thinking": "hm", "signature": "s"}]),
        line("assistant", "a3", [{"type": "tool_use", "id": "t1", "name": "Bash", "input": {}}]),
        line("assistant", "s", [{"type": "text", "text": "subagent"}], isSidechain=True),
        line("user", "u1", [{"type": "tool_result", "tool_use_id": "t1", "content": "out", "is_error": True}]),
        line("assistant", "e", [{"type": "text", "text": "API Error"}], isApiErrorMessage=True),
        '{"type": "assis',
    ]
    assert recorded_in(lines) == [
        Thinking("hm", "a2:0"),
        ToolCall("t1", "Bash", {}, "a3:0"),
        ToolResult("t1", "out", is_error=True, uid="u1:0"),
    ]
