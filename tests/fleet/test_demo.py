"""The real `fleet demo`: real Claude Code, real workers, a rehearsed model."""

from __future__ import annotations

import os
import re
import sys

import pytest

from tests.fleet.programs import Program

ALPHA, BETA = "alpha claude_code │ ", "beta  scripted    │ "


def said_by(prefix: str, output: str) -> list[str]:
    return [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]


def in_order(expected: list[str], lines: list[str]) -> bool:
    """Whether there is, in this order, a line that begins with each of `expected`."""
    left = iter(lines)
    return all(any(line.startswith(text) for line in left) for text in expected)


@pytest.fixture(scope="module")
def played(no_process_left, tmp_path_factory) -> Program:
    """The demo, played to its end."""
    pytest.importorskip("claude_agent_sdk", reason="the claude extra is not installed")
    program = Program(tmp_path_factory.mktemp("demo"))
    program.environ["TMPDIR"] = str(program.folder / "tmp")
    (program.folder / "tmp").mkdir()
    program.start("demo")
    try:
        program.status()
    finally:
        program.end()
    return program


def test_it_ends_by_itself_with_status_0_and_leaves_no_process_and_no_file(played):
    assert played.status() == 0, played.said()
    assert played.processes() == []
    assert list((played.folder / "tmp").iterdir()) == []


def test_claude_code_repairs_the_project_on_alpha_with_its_real_tools(played):
    transcript = said_by(ALPHA, played.said())
    expected = ["▸ ", "[thinking] ", "Bash → python3 -m unittest", "→ error Exit code 1", "Read → ", "Edit → "]
    expected += ["Bash → python3 -m unittest", "→ Ran 3 tests", "Write → ", "Repaired: "]
    assert in_order(expected, transcript), played.said()


def test_the_scripted_agent_works_on_beta(played):
    expected = ["▸ ", "[thinking] ", "Bash → git log", "→ Listen on IPv6 too (2 lines)", "Edit → "]
    assert in_order(expected, said_by(BETA, played.said())), played.said()


@pytest.mark.parametrize(
    ("prefix", "artifact"),
    [(ALPHA, "demo/durations/artifacts/report.md"), (BETA, "demo/changelog/artifacts/announcement.md")],
)
def test_each_transcript_ends_with_its_artifacts_and_its_complete_turn(played, prefix, artifact):
    transcript = said_by(prefix, played.said())
    assert transcript[-4:-1] == ["Published 1 artifact(s), skipped 0", f"  {artifact}", "Turn complete"]
    assert re.match(r"  \d+ tokens in \(\d+ cached\), \d+ out, ", transcript[-1])


def test_the_end_names_hosts_artifacts_and_changes(played):
    ending = played.said().partition("demo/durations ran on alpha")[2]
    for part in (
        "artifact demo/durations/artifacts/report.md",
        "durations.py | 7",
        "demo/changelog ran on beta",
        "artifact demo/changelog/artifacts/announcement.md",
        "CHANGELOG.md | 5",
    ):
        assert part in ending, played.said()


def test_without_the_sdk_both_threads_are_scripted_and_it_says_so(tmp_path):
    program = Program(tmp_path)
    # As if it were not installed, for this program and its workers.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['claude_agent_sdk'] = None")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    program.environ |= {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    program.start("demo")
    try:
        assert program.status() == 0, program.said()
    finally:
        program.end()
    said = program.said()
    assert "Claude Code's SDK is not installed" in said
    assert said.count("Turn complete") == 2
    assert "durations.py | 7" in said
    assert program.processes() == []


def test_a_demo_that_cannot_play_says_why_and_fails(tmp_path):
    program = Program(tmp_path)
    program.environ |= {"PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    program.start("demo")
    assert program.status() == 1
    assert "git is not on PATH" in program.said()
    assert sys.executable not in " ".join(program.processes())
