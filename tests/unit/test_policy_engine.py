from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.events import ToolCall
from fleet.policy import effect_of, engine, evaluate, explain, parse_policy

WORK = Path("/nowhere/work")


def policy(*rules, default="allow", owner=()):
    return parse_policy({"default": default, "rules": list(rules)}, list(owner))


def rule(id_, effect, action, **more):
    return {"id": id_, "effect": effect, "action": action, **more}


def decide(policy, tool, input_=None, agent_type="claude_code"):
    return evaluate(policy, agent_type, ToolCall("1", tool, input_), WORK, None)


@pytest.mark.parametrize(
    ("agent_type", "effect", "tools"),
    [
        ("claude_code", "write", ["Write", "Edit", "MultiEdit", "NotebookEdit"]),
        ("claude_code", "exec", ["Bash", "BashOutput", "KillShell", "Monitor"]),
        ("claude_code", "read", ["Read", "Glob", "Grep", "NotebookRead"]),
        ("claude_code", "network", ["WebFetch", "WebSearch"]),
        ("scripted", "exec", ["Bash"]),
        ("codex", "exec", ["shell"]),
        ("codex", "write", ["file_change"]),
        ("claude_code", None, ["Task", "TodoWrite", "mcp__x__y", "bash", "shell", "", "SomethingNew"]),
        ("codex", None, ["Bash", "Write"]),
        ("unknown", None, ["Bash"]),
    ],
)
def test_a_tool_has_the_effect_that_the_protocol_gives_it(agent_type, effect, tools):
    assert {effect_of(agent_type, tool) for tool in tools} == {effect}


def test_the_first_rule_that_is_about_a_call_decides():
    rules = policy(rule("a", "exec", "allow", command=["ls*"]), rule("b", "exec", "ask"), rule("c", "exec", "deny"))
    assert decide(rules, "Bash", {"command": "ls"}).rule_id == "a"
    assert decide(rules, "Bash", {"command": "rm x"}).rule_id == "b"


def test_no_thread_relaxes_the_owner_s_rule():
    rules = policy(rule("all", "exec", "allow"), owner=[rule("no-curl", "exec", "deny", command=["curl*"])])
    verdict = decide(rules, "Bash", {"command": "true && curl x"})
    assert (verdict.action, verdict.rule_id, verdict.origin) == ("deny", "no-curl", "worker")


@pytest.mark.parametrize("default", ["allow", "deny", "ask"])
def test_a_tool_that_maps_to_nothing_falls_to_the_default(default):
    verdict = decide(policy(rule("x", "exec", "deny"), default=default), "SomethingNew", {"a": 1})
    assert (verdict.action, verdict.rule_id, verdict.origin, verdict.effect) == (default, None, "default", None)
    assert verdict.detail == "SomethingNew"


@pytest.mark.parametrize(
    "input_", [None, {}, "git push", {"command": None}, {"command": 1}, {"command": []}, {"cmd": "x"}]
)
def test_a_command_that_is_missing_could_be_anything(input_):
    assert decide(policy(rule("x", "exec", "deny", command=["git push*"])), "Bash", input_).action == "deny"
    assert decide(policy(rule("x", "exec", "allow", command=["*"]), default="deny"), "Bash", input_).action == "deny"


def test_a_tool_that_carries_no_command_is_matched_by_its_effect_alone():
    assert decide(policy(rule("x", "exec", "deny", command=["*"])), "BashOutput", {"bash_id": "1"}).action == "allow"
    assert decide(policy(rule("x", "exec", "deny")), "KillShell", {"shell_id": "1"}).action == "deny"


def test_the_monitor_s_command_is_judged():
    verdict = decide(policy(rule("x", "exec", "deny", command=["git push*"])), "Monitor", {"command": "x; git push"})
    assert verdict.action == "deny"


@pytest.mark.parametrize(
    ("command", "action"),
    [
        ("/bin/bash -lc 'git status'", "allow"),
        ("bash -lc 'git status'", "allow"),
        (["/usr/bin/zsh", "-lc", "git status"], "allow"),
        ("/bin/bash -lc 'git status && rm x'", "deny"),
        ("/bin/bash -lc 'git status'; rm x", "deny"),
        ("/bin/bash -lc 'bash -lc \"git status\"'", "deny"),
        ("./bash -lc 'git status'", "deny"),
        ("/bin/bash -lc 'git status", "deny"),
        ("git status", "allow"),
    ],
)
def test_the_shell_that_codex_puts_around_a_command_is_not_its_command(command, action):
    rules = policy(rule("x", "exec", "allow", command=["git status*"]), default="deny")
    assert decide(rules, "shell", {"command": command}, "codex").action == action


def test_a_denied_command_is_found_in_codex_s_shell():
    rules = policy(rule("x", "exec", "deny", command=["git push*"]))
    assert decide(rules, "shell", {"command": "/bin/bash -lc 'cd a && git push'"}, "codex").action == "deny"
    assert decide(rules, "shell", {"command": ["git", "push"]}, "codex").action == "deny"


@pytest.mark.parametrize(
    ("effect", "more", "tool", "input_", "detail"),
    [
        ("exec", {}, "Bash", {"command": "a; b"}, "a; b"),
        ("exec", {}, "BashOutput", {"bash_id": "1"}, "BashOutput"),
        ("write", {}, "Write", {"file_path": "x"}, "x"),
        ("write", {"outside": "work_folder"}, "MultiEdit", {"file_path": "x", "edits": [{"path": "/y"}]}, "/y"),
        ("write", {}, "Write", {}, "Write"),
        ("network", {}, "WebFetch", {"url": "http://a"}, "WebFetch"),
    ],
)
def test_the_detail_is_what_the_effect_is_about(effect, more, tool, input_, detail):
    assert decide(policy(rule("x", effect, "deny", **more)), tool, input_).detail == detail


def test_an_allow_rule_for_outside_needs_every_path_outside_and_known():
    rules = policy(rule("x", "write", "allow", outside="work_folder"), default="deny")
    assert decide(rules, "Write", {"file_path": "/tmp/x"}).action == "allow"
    assert decide(rules, "Write", {"file_path": "x"}).action == "deny"
    assert decide(rules, "Write", {"file_path": "/tmp/x", "path": "x"}).action == "deny"
    assert decide(rules, "Write", {}).action == "deny"


def test_an_evaluation_that_raises_denies(monkeypatch):
    def fail(*_):
        raise RecursionError

    monkeypatch.setattr(engine, "_why", fail)
    verdict = decide(policy(rule("x", "exec", "allow")), "Bash", {"command": "ls"})
    assert (verdict.action, verdict.rule_id, verdict.origin, verdict.effect) == ("deny", None, "error", "exec")
    assert "RecursionError" in verdict.reason


def test_an_evaluation_that_takes_too_long_denies(monkeypatch):
    monkeypatch.setattr(engine, "EVALUATION_MAX_S", -1)
    assert decide(policy(rule("x", "exec", "allow")), "Bash", {"command": "ls"}).origin == "error"


def test_an_explanation_names_each_rule_tried_and_the_one_that_decided():
    rules = policy(
        rule("no-net", "network", "deny"),
        rule("no-push", "exec", "deny", command=["git push*"]),
        rule("z", "exec", "ask"),
    )
    verdict, lines = explain(rules, "claude_code", ToolCall("1", "Bash", {"command": "cd a && git push"}), WORK, None)
    assert verdict.rule_id == "no-push"
    assert len(lines) == 3
    assert "no-net" in lines[0]
    assert "'git push*' matches 'git push'" in lines[1]
    assert lines[2].startswith("deny: ")


def test_an_explanation_says_when_the_default_decided():
    _, lines = explain(policy(default="ask"), "claude_code", ToolCall("1", "Bash", {"command": "ls"}), WORK, None)
    assert lines == ("ask: no rule is about this call, the default is ask",)


def test_what_is_unknown_is_shown_to_people_as_an_ellipsis():
    rules = policy(rule("x", "exec", "deny", command=["git push*"]))
    assert "'git…'" in decide(rules, "Bash", {"command": "git $X"}).reason


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["command", "file_path", "path", "pattern", "edits", "changes"]), inner, max_size=3
        )
    ),
)


@settings(deadline=None)
@given(
    st.sampled_from(["claude_code", "codex", "scripted", "x"]),
    st.sampled_from(["Bash", "Write", "Read", "Glob", "Grep", "MultiEdit", "shell", "file_change", "WebFetch", "X"]),
    json_values,
)
def test_any_call_is_judged_without_an_error(agent_type, tool, input_):
    rules = policy(
        rule("c", "exec", "deny", command=["git push*"]), rule("w", "write", "ask", outside="work_folder"),
        rule("r", "read", "deny", outside="outbox"),
    )  # fmt: skip
    assert decide(rules, tool, input_, agent_type).origin != "error"
