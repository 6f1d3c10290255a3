from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.events import ToolCall
from fleet.policy import evaluate, parse_policy
from fleet.policy.paths import is_outside, outbox_root, resolve


@pytest.fixture
def work(tmp_path):
    """A work folder with a folder, a file, and links of every kind; `secret` is beside it."""
    folder = tmp_path / "work"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("x")
    (tmp_path / "secret").mkdir()
    (tmp_path / "work-too").mkdir()
    for name, target in {
        "in": "sub", "out": "../secret", "abs": str(tmp_path / "secret"), "self": "self", "a": "b", "b": "a",
        "dangling": "sub/new", "dangling-out": "../secret/new", "up": "..", "root": "/", "chain": "out",
        "back": "../work/sub", "proc": "/proc/self/cwd",
    }.items():  # fmt: skip
        (folder / name).symlink_to(target)
    return folder


INSIDE = (
    "file", "new", "sub/new", "sub/new/deeper", "./file", "sub/../file", "sub//new", "sub/./new", "in/new", "dangling",
    "back/new", "~/x", "~", "...", "..a", "a b", "-rf", "$HOME/x", "*", "é", ".", "sub/",
)  # fmt: skip

OUTSIDE = (
    "..", "../x", "../work-too/x", "../worker", "sub/../../x", "out", "out/x", "abs/x", "chain/x", "root/etc/passwd",
    "up/x", "up/secret/x", "dangling-out", "in/../../x", "self", "self/x", "a/x", "file/x", "file/../x", "file/",
    "new/../x", "new/../../x", "/", "/etc/passwd", "//etc/passwd", "/proc/self/cwd/x", "/proc/self/root/x", "proc/x",
    "", " ", "a\0b", "new/a\0b", "\udc80", "new/\ud800", " /etc/passwd", "\n/etc/passwd", "\t../x", "x" * 300,
    "out/../file",
)  # fmt: skip


@pytest.mark.parametrize("path", INSIDE)
def test_a_path_that_stays_in_the_work_folder_is_inside(work, path):
    assert not is_outside(path, work, resolve(str(work)))


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leaves_or_leads_nowhere_is_outside(work, path):
    assert is_outside(path, work, resolve(str(work)))


def test_an_absolute_path_into_the_work_folder_is_inside(work):
    root = resolve(str(work))
    assert not is_outside(str(work / "sub" / "new"), work, root)
    assert is_outside(f"{work}-too/x", work, root)
    assert is_outside(f"{work}/../work-too", work, root)


def test_a_work_folder_may_be_reached_through_a_link(work, tmp_path):
    (tmp_path / "link").symlink_to(work)
    linked = tmp_path / "link"
    assert not is_outside("new", linked, resolve(str(linked)))
    assert not is_outside(str(work / "new"), linked, resolve(str(linked)))


def test_a_link_is_followed_as_it_is_at_this_moment(work):
    (work / "turn").symlink_to("sub")
    root = resolve(str(work))
    assert not is_outside("turn/x", work, root)
    (work / "turn").unlink()
    (work / "turn").symlink_to("../secret")
    assert is_outside("turn/x", work, root)


def test_a_folder_that_may_not_be_searched_is_outside(work, monkeypatch):
    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(os, "lstat", refuse)
    assert is_outside("sub/x", work, str(work))


def test_without_a_work_folder_everything_is_outside(work):
    assert is_outside("file", work, None)


def test_the_outbox_is_a_folder_of_its_own(work):
    root = outbox_root(work, work / "sub")
    assert not is_outside("sub/new", work, root)
    assert not is_outside("in/new", work, root)
    assert is_outside("file", work, root)
    assert outbox_root(work, work / "not-yet") == f"{resolve(str(work))}/not-yet"


@pytest.mark.parametrize("outbox", ["out", "in", "root", "..", "../secret", "self"])
def test_an_outbox_that_leads_elsewhere_contains_nothing(work, outbox):
    assert outbox_root(work, work / outbox) is None


def test_a_thread_without_outbox_has_everything_outside_of_it(work):
    assert outbox_root(work, None) is None


@settings(deadline=None)
@given(st.text(max_size=40), st.sampled_from(["", "/", "../", "sub/", "out/", "self/"]))
def test_any_path_is_judged(tmp_path_factory, text, beginning):
    folder = tmp_path_factory.getbasetemp()
    assert is_outside(beginning + text, folder, resolve(str(folder))) in (True, False)


def decide(work, agent_type, tool, input_, effect, outbox=None, place="work_folder"):
    rules = [{"id": "confine", "effect": effect, "action": "deny", "outside": place}]
    policy = parse_policy({"default": "allow", "rules": rules}, [])
    return evaluate(policy, agent_type, ToolCall("1", tool, input_), work, outbox).action


@pytest.mark.parametrize(
    ("tool", "input_", "decision"),
    [
        ("Write", {"file_path": "new", "content": "/etc/passwd"}, "allow"),
        ("Write", {"file_path": "out/x"}, "deny"),
        ("Write", {"file_path": None}, "deny"),
        ("Write", {"file_path": 1}, "deny"),
        ("Write", {"file_path": ["new"]}, "allow"),
        ("Write", {"file_path": ["new", "/x"]}, "deny"),
        ("Write", {}, "deny"),
        ("Write", None, "deny"),
        ("Write", "new", "deny"),
        ("Write", ["new"], "deny"),
        ("Write", {"file_path": "new", "path": "/x"}, "deny"),
        ("Write", {"file_path": "new", "FilePath": "/x"}, "deny"),
        ("Write", {"file_path": "new", "target_file": "/x"}, "deny"),
        ("Edit", {"file_path": "new", "old_string": "/a", "new_string": "../b"}, "allow"),
        ("MultiEdit", {"file_path": "new", "edits": [{"old_string": "/a"}]}, "allow"),
        ("MultiEdit", {"file_path": "new", "edits": [{"file_path": "/x"}]}, "deny"),
        ("MultiEdit", {"file_path": "new", "edits": [[{"file_path": "/x"}]]}, "deny"),
        ("NotebookEdit", {"notebook_path": "a.ipynb"}, "allow"),
        ("NotebookEdit", {"notebook_path": "/a.ipynb"}, "deny"),
    ],
)
def test_every_path_of_a_writing_call_counts(work, tool, input_, decision):
    assert decide(work, "claude_code", tool, input_, "write") == decision
    assert decide(work, "scripted", tool, input_, "write") == decision


@pytest.mark.parametrize(
    ("tool", "input_", "decision"),
    [
        ("Read", {"file_path": "file", "offset": 1}, "allow"),
        ("Read", {"file_path": "/etc/passwd"}, "deny"),
        ("Read", {}, "deny"),
        ("NotebookRead", {"notebook_path": "../a"}, "deny"),
        ("Grep", {"pattern": "/etc/passwd"}, "allow"),
        ("Grep", {"pattern": "x", "path": "sub", "glob": "*.py"}, "allow"),
        ("Grep", {"pattern": "x", "path": "/etc"}, "deny"),
        ("Grep", {"pattern": "x", "path": "out"}, "deny"),
        ("Grep", {"pattern": "x", "path": "~/.ssh"}, "deny"),
        ("Grep", {"pattern": "x", "path": ""}, "deny"),
        ("Grep", "x", "deny"),
        ("Glob", {"pattern": "**/*.py"}, "allow"),
        ("Glob", {"pattern": "*"}, "allow"),
        ("Glob", {"pattern": "sub/*.{py,md}"}, "allow"),
        ("Glob", {"pattern": "a.txt", "path": "sub"}, "allow"),
        ("Glob", {"pattern": "*", "path": "/etc"}, "deny"),
        ("Glob", {"pattern": "/etc/*"}, "deny"),
        ("Glob", {"pattern": "/*"}, "deny"),
        ("Glob", {"pattern": "../*"}, "deny"),
        ("Glob", {"pattern": "../../*", "path": "sub"}, "deny"),
        ("Glob", {"pattern": "../*", "path": "sub"}, "allow"),
        ("Glob", {"pattern": "out/*"}, "deny"),
        ("Glob", {"pattern": "*/../../x"}, "deny"),
        ("Glob", {"pattern": "{..,sub}/x"}, "deny"),
        ("Glob", {"pattern": "{/etc/passwd,x}"}, "deny"),
        ("Glob", {"pattern": "{x,/etc/passwd}"}, "deny"),
        ("Glob", {"pattern": "\\.\\./x"}, "deny"),
        ("Glob", {"pattern": "~/.ssh/*"}, "deny"),
        ("Glob", {"path": "sub"}, "deny"),
    ],
)
def test_every_path_of_a_reading_call_counts(work, tool, input_, decision):
    assert decide(work, "claude_code", tool, input_, "read") == decision


@pytest.mark.parametrize(
    ("input_", "decision"),
    [
        ({"changes": [{"path": "new", "kind": {"type": "add"}, "diff": "+/etc/x"}]}, "allow"),
        ({"changes": [{"path": "new"}, {"path": "/etc/x"}]}, "deny"),
        ({"changes": [{"path": "new", "kind": {"type": "update", "move_path": "../x"}}]}, "deny"),
        ({"changes": [{"path": "new", "kind": {"type": "update", "move_path": None}}]}, "allow"),
        ({"changes": [{"path": "new"}], "grantRoot": "/"}, "deny"),
        ({"changes": []}, "deny"),
        ({"reason": "because"}, "deny"),
    ],
)
def test_every_path_of_a_codex_change_counts(work, input_, decision):
    assert decide(work, "codex", "file_change", input_, "write") == decision


def test_a_path_too_deep_to_be_found_counts_as_unknown(work):
    nested = {"file_path": "/etc/x"}
    for _ in range(50):
        nested = {"edits": [nested]}
    assert decide(work, "claude_code", "MultiEdit", {"file_path": "new", **nested}, "write") == "deny"


def test_a_write_outside_of_the_outbox_can_be_denied(work):
    outbox = work / "sub"
    assert decide(work, "claude_code", "Write", {"file_path": "sub/x"}, "write", outbox, "outbox") == "allow"
    assert decide(work, "claude_code", "Write", {"file_path": "x"}, "write", outbox, "outbox") == "deny"
    assert decide(work, "claude_code", "Write", {"file_path": "sub/x"}, "write", None, "outbox") == "deny"
