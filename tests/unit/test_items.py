import json
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet import items
from fleet.artifacts import Published, Skip
from fleet.events import (
    AgentEvent,
    Answer,
    Ended,
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

VECTORS = json.loads((Path(__file__).parent / "vectors/items.json").read_text())["cases"]

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
BROKEN_LINES = st.text(st.sampled_from("ab" + LINE_BREAKS), max_size=400)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT | st.binary(max_size=9) | st.just(object()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.integers() | ANY_TEXT | st.none() | st.binary(max_size=3), inner, max_size=3)
        | st.frozensets(st.integers() | ANY_TEXT, max_size=3)
    ),
    max_leaves=20,
)


def brief(item: items.Item) -> str:
    (content,) = item["content"]
    assert content["type"] == "text"
    return content["text"]


def assert_posts(item: items.Item) -> None:
    """Assert that an item survives the way over the wire."""
    wire = json.dumps(item, allow_nan=False, ensure_ascii=False).encode()
    assert json.loads(wire) == item


def events_of(case: dict[str, Any]) -> list[AgentEvent]:
    """Return the agent's events that a vector's script stands for."""
    events: list[AgentEvent] = []
    for number, step in enumerate(case["events"]):
        match step:
            case {"text": text}:
                events.append(Text(text))
            case {"thinking": text}:
                events.append(Thinking(text))
            case {"status": status}:
                events.append(Status(**status))
            case {"tool": tool}:
                events.append(ToolCall(f"id{number}", tool["name"], tool["input"]))
                events.append(ToolResult(f"id{number}", tool["output"], tool.get("is_error", False)))
    return events


def assert_like(actual: Any, expected: Any, ids: dict[str, Any], *, open_: bool = False) -> None:
    """Assert that a value is a vector's: `*` is anything, `*1` the same each time, an open mapping may have more."""
    if expected == "*":
        return
    if isinstance(expected, str) and expected.startswith("*"):
        assert ids.setdefault(expected, actual) == actual
    elif isinstance(expected, dict):
        assert expected.keys() <= actual.keys() if open_ else expected.keys() == actual.keys()
        for key, value in expected.items():
            assert_like(actual[key], value, ids, open_=key == "metadata")
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_like(one, other, ids)
    else:
        assert (type(actual), actual) == (type(expected), expected)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_events_become_the_items_of_the_vectors(case):
    posted = [item for event in events_of(case) if (item := items.from_event(event))]
    assert_like(posted, case["items"], {})


@pytest.mark.parametrize("event", [SessionStarted("s"), Usage(1, 1, 1), Ended(ok=True), Text(""), Thinking("")])
def test_an_event_with_nothing_to_say_posts_nothing(event):
    assert items.from_event(event) is None


def test_injected_text_is_told_from_the_agents_own():
    item = items.from_event(Injected("reminder"))
    assert (brief(item), item["metadata"]) == ("reminder", {"type": "injected"})


@settings(deadline=None)
@given(BROKEN_LINES)
def test_the_brief_of_a_call_is_one_line_of_80_characters(command):
    text = brief(items.tool_call("i", "Bash", {"command": command}))
    assert not set(text) & set(LINE_BREAKS)
    if command:
        assert text == f"Bash → {' '.join(command.splitlines())[:80]}"


@settings(deadline=None)
@given(BROKEN_LINES, st.booleans())
def test_the_brief_of_a_result_is_its_first_line_and_the_count_from_two_lines_up(output, is_error):
    text = brief(items.tool_result("i", output, is_error=is_error))
    lines = output.splitlines()
    assert not set(text) & set(LINE_BREAKS)
    assert text.startswith("→ error " if is_error else "→ ")
    assert text.endswith(f" ({len(lines)} lines)") == (len(lines) > 1)
    assert lines[:1] == [] or lines[0][:80] in text


@pytest.mark.parametrize(
    ("input_", "shown"),
    [
        (None, "T"),
        ([], "T"),
        ("", "T"),
        (0, "T → 0"),
        ("x", 'T → "x"'),
        ({"command": ""}, 'T → {"command": ""}'),
        ({"command": ["ls"]}, 'T → {"command": ["ls"]}'),
        ({"path": "é"}, 'T → {"path": "é"}'),
    ],
)
def test_an_input_without_a_command_is_its_json(input_, shown):
    assert brief(items.tool_call("i", "T", input_)) == shown


@settings(deadline=None)
@given(ANYTHING)
def test_whatever_an_agent_calls_with_can_be_posted(value):
    assert_posts(items.from_event(ToolCall("i", "T", value)))


@settings(deadline=None)
@given(ANY_TEXT, ANY_TEXT)
def test_whatever_an_agent_says_can_be_posted(one, other):
    question = Question(one, other, ((one, other),))
    for item in (
        items.from_event(Text(one)),
        items.from_event(Thinking(one)),
        items.from_event(ToolResult(one, other)),
        items.status(one, other),
        items.error("AGENT_CRASHED", one),
        items.turn_end("failed", {}, one),
        items.pending_prompt("p", "text", (question,)),
        items.prompt_answered("p", "text", (question,), Answer(((one, other),))),
        items.prompt_closed("p", "text", "cancelled", one),
        items.artifacts_published(Published((one,), (Skip(other, "binary"),), 1, 1, one)),
        items.policy_applied([{"id": one, "origin": "thread", "action": "deny"}], "allow"),
        items.policy_denied(one, "exec", other),
        items.approval_granted(one, "u"),
        items.audit("thread_failed", "a", code="X", message=one),
    ):
        if item is not None:
            assert_posts(item)


@settings(deadline=None)
@given(ANYTHING)
def test_sanitizing_twice_changes_nothing_more(value):
    once = items.sanitize(value)
    assert items.sanitize(once) == once


class Color(IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (b"a\xff", "a\ufffd"),
        ({1: "a", None: "b", (1, 2): "c"}, {"1": "a", "null": "b", "[1, 2]": "c"}),
        ((1, {2}), [1, [2]]),
        (object(), "<object>"),
        (Color.RED, 3),
        ("\ud83d\ude00\ud83d", "😀\ufffd"),
    ],
)
def test_what_json_can_not_carry_is_replaced_by_the_nearest_that_it_can(value, expected):
    assert items.sanitize(value) == expected


def test_an_integer_that_python_will_not_write_is_described():
    assert items.sanitize([1 << 1023, 1 << 20_000]) == [1 << 1023, "<int of 20001 bits>"]


def test_a_cycle_is_cut_where_it_closes():
    value: dict[str, Any] = {"a": 1}
    value["self"] = [value, value]
    assert items.sanitize(value) == {"a": 1, "self": ["…", "…"]}


def test_a_nesting_too_deep_for_a_json_reader_is_cut():
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert_posts(items.tool_call("i", "T", value))


def test_a_status_says_its_token_and_detail_in_words():
    item = items.status("compacting_context", "38k → 12k\ntokens")
    assert brief(item) == "Compacting context: 38k → 12k tokens"
    assert item["metadata"] == {"type": "status", "status": "compacting_context", "detail": "38k → 12k\ntokens"}
    assert brief(items.status("retrying")) == "Retrying"


def test_a_failing_thread_is_told_with_code_and_detail():
    item = items.error("WORK_FOLDER_NOT_FOUND", "/w does not exist")
    assert brief(item) == "WORK_FOLDER_NOT_FOUND: /w does not exist"
    assert item["metadata"] == {
        "type": "status",
        "status": "error",
        "code": "WORK_FOLDER_NOT_FOUND",
        "detail": "/w does not exist",
    }


def test_a_turns_end_has_all_four_numbers():
    item = items.turn_end("completed", {"input_tokens": 100, "input_tokens_cached": 60, "duration_ms": 5})
    assert brief(item) == "Turn complete"
    assert item["metadata"] == {
        "type": "turn_end",
        "status": "completed",
        "stats": {"input_tokens": 100, "input_tokens_cached": 60, "output_tokens": 0, "duration_ms": 5},
    }


def test_a_turn_that_ended_otherwise_says_how():
    item = items.turn_end("failed", {}, "no more credit")
    assert (brief(item), item["metadata"]["error"]) == ("Turn ended (failed)", "no more credit")


CHOICE = Question("Where to?", "Target", (("staging", "push to staging"), ("production", "")), multi_select=True)


def test_a_prompt_shows_its_questions_with_numbered_options():
    item = items.pending_prompt("p1", "ask_user_question", (CHOICE, Question("Why?")))
    assert brief(item) == "Where to?\n1. staging — push to staging\n2. production\n\nWhy?"
    assert item["metadata"]["prompt"] == {
        "prompt_id": "p1",
        "kind": "ask_user_question",
        "prompt_state": "pending",
        "questions": [
            {
                "question": "Where to?",
                "header": "Target",
                "options": [
                    {"label": "staging", "description": "push to staging"},
                    {"label": "production", "description": ""},
                ],
                "multiSelect": True,
            },
            {"question": "Why?", "header": "", "options": [], "multiSelect": False},
        ],
    }


def test_an_answered_prompt_has_one_entry_per_question():
    answer = Answer((("staging", "production"), ("because",)))
    item = items.prompt_answered("p1", "ask_user_question", (CHOICE, Question("Why?")), answer)
    assert brief(item) == "✓ Answered: staging, production; because"
    assert item["metadata"] == {
        "type": "pending_prompt_resolved",
        "prompt": {
            "prompt_id": "p1",
            "kind": "ask_user_question",
            "prompt_state": "answered",
            "answers": [
                {"question": "Where to?", "answer": ["staging", "production"]},
                {"question": "Why?", "answer": ["because"]},
            ],
        },
    }


def test_a_prompt_that_nobody_answers_says_why():
    item = items.prompt_closed("p1", "text", "cancelled", "superseded")
    assert brief(item) == "✗ Cancelled: superseded"
    assert item["metadata"]["prompt"] == {
        "prompt_id": "p1",
        "kind": "text",
        "prompt_state": "cancelled",
        "reason": "superseded",
    }


def test_published_artifacts_are_told_with_their_true_counts():
    item = items.artifacts_published(Published(("p/a", "p/b"), (Skip("x", "binary"),), 150, 101))
    assert brief(item) == "Published 150 artifact(s), skipped 101"
    assert item["metadata"] == {
        "type": "artifacts_published",
        "aliases": ["p/a", "p/b"],
        "skipped": [{"path": "x", "reason": "binary"}],
        "counts": {"published": 150, "skipped": 101},
    }


def test_a_publishing_that_failed_says_why():
    item = items.artifacts_published(Published(error="the outbox is gone"))
    assert brief(item) == "Published 0 artifact(s), skipped 0"
    assert item["metadata"]["error"] == "the outbox is gone"


@pytest.mark.parametrize("character", ["a", "é", "😀", "\0", '"', "\ud800"])
def test_the_longest_artifacts_item_stays_below_the_platforms_lower_cap(character):
    path = items.bounded(character * 10_000, items.PATH_BYTES)
    shown = items.ARTIFACTS_SHOWN
    report = Published(("a" * 256,) * shown, (Skip(path, "unsupported_type"),) * shown, 10**6, 10**6, path)
    assert len(json.dumps(items.artifacts_published(report))) < 64 * 1024


@pytest.mark.parametrize("character", ["a", "é", "😀", "\0"])
def test_the_longest_prompt_keeps_its_metadata_below_the_platforms_lower_cap(character):
    long = character * 100_000
    question = Question(long, long, ((long, long),) * 4)
    assert len(json.dumps(items.pending_prompt("p", "text", (question,) * 4)["metadata"])) < 60 * 1024


@settings(deadline=None)
@given(ANY_TEXT, st.integers(30, 80))
def test_a_bounded_text_keeps_head_and_tail_within_its_bytes_of_json(text, limit):
    short = items.bounded(text, limit)
    assert len(json.dumps(short)) - 2 <= limit
    whole = items.clean(text)
    if len(json.dumps(whole)) - 2 <= limit:
        assert short == whole
    else:
        cuts = [(short[:i], short[i + 1 :]) for i, character in enumerate(short) if character == "…"]
        assert any(whole.startswith(head) and whole.endswith(tail) for head, tail in cuts)


def test_a_policy_in_force_lists_its_rules_in_order():
    rules = [{"id": "b", "origin": "worker", "action": "deny"}, {"id": "a", "origin": "thread", "action": "allow"}]
    item = items.policy_applied(rules, "ask")
    assert brief(item) == "Policy in force: 2 rule(s), default ask"
    assert item["metadata"] == {"type": "policy_applied", "rules": rules, "default": "ask"}


def test_a_denied_call_names_rule_effect_and_detail():
    item = items.policy_denied("no_push", "exec", "git push\norigin")
    assert brief(item) == "Blocked by policy rule 'no_push': git push origin"
    assert item["metadata"] == {
        "type": "policy_denied",
        "rule": "no_push",
        "effect": "exec",
        "detail": "git push\norigin",
    }


def test_a_grant_names_what_and_by_whom():
    item = items.approval_granted("Bash: rm -rf x", "usr_1")
    assert brief(item) == "Approved: Bash: rm -rf x"
    assert item["metadata"] == {"type": "approval_granted", "subject": "Bash: rm -rf x", "granted_by": "usr_1"}


@pytest.mark.parametrize(
    ("item", "shown", "metadata"),
    [
        (items.audit("attached"), "Attached", {"type": "attached"}),
        (
            items.audit("detached", reason="shutdown"),
            "Detached: shutdown",
            {"type": "detached", "reason": "shutdown"},
        ),
        (
            items.audit("thread_active", "p/a", agent_session_id="s1"),
            "Thread p/a active",
            {"type": "thread_active", "thread": {"alias": "p/a"}, "agent_session_id": "s1"},
        ),
        (
            items.audit("thread_active", "p/a"),
            "Thread p/a active",
            {"type": "thread_active", "thread": {"alias": "p/a"}, "agent_session_id": None},
        ),
        (
            items.audit("thread_failed", "p/a", code="AGENT_CRASHED", message="three times"),
            "Thread p/a failed: AGENT_CRASHED: three times",
            {
                "type": "thread_failed",
                "thread": {"alias": "p/a"},
                "error": {"code": "AGENT_CRASHED", "message": "three times"},
            },
        ),
        (
            items.audit("thread_completed", "p/a"),
            "Thread p/a completed",
            {"type": "thread_completed", "thread": {"alias": "p/a"}},
        ),
    ],
)
def test_the_activity_log_says_what_happened_to_which_thread(item, shown, metadata):
    assert (brief(item), item["metadata"]) == (shown, metadata)
