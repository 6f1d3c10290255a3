from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from fleet import items
from fleet.artifacts import Published
from fleet.cli.transcript import is_trouble, lines, show
from fleet.person import spoken


def shown(item: dict, **console) -> str:
    output = io.StringIO()
    show(Console(file=output, **console), item, Text("alpha │ "))
    return output.getvalue()


def texts(item: dict) -> list[str]:
    return [line.plain for line in lines(item)]


def test_what_an_agent_writes_cannot_control_the_terminal():
    item = {"content": [{"type": "text", "text": "a\x1b[2Jb\x07\x9b31m\u202ec\r"}], "metadata": {"type": "text"}}
    assert texts(item) == ["a�[2Jb��31m�c�"]


def test_each_line_of_an_item_stands_behind_the_prefix():
    assert shown(spoken("one\ntwo")) == "alpha │ ▸ one\nalpha │ ▸ two\n"


def test_a_long_line_is_broken_for_a_terminal_and_stays_whole_in_a_pipe():
    item = spoken("word " * 30)
    assert shown(item, width=40).count("\n") == 1
    in_a_terminal = shown(item, width=40, force_terminal=True, color_system=None).splitlines()
    assert len(in_a_terminal) > 1
    assert all(line.startswith("alpha │ ") and len(line.rstrip()) <= 40 for line in in_a_terminal)


def test_the_end_of_a_turn_shows_its_tokens_and_its_time():
    stats = {"input_tokens": 100, "input_tokens_cached": 60, "output_tokens": 7, "duration_ms": 1500}
    assert texts(items.turn_end("completed", stats)) == ["Turn complete", "  100 tokens in (60 cached), 7 out, 1.5 s"]
    assert "no way" in texts(items.turn_end("failed", stats, "no way"))[-1]


def test_published_artifacts_are_named():
    report = Published(aliases=["a/plan.md"], skipped=[], published_count=1, skipped_count=0, error="")
    assert texts(items.artifacts_published(report)) == ["Published 1 artifact(s), skipped 0", "  a/plan.md"]


@pytest.mark.parametrize(
    ("item", "trouble"),
    [
        (items.turn_end("completed", {}), False),
        (items.turn_end("failed", {}), True),
        (items.error("AGENT_CRASHED", "three times"), True),
        (items.status("retrying"), False),
        (items.tool_result("1", "no such file", is_error=True), False),
        (spoken("turn_end"), False),
    ],
)
def test_trouble_is_a_turn_that_did_not_complete_or_a_thread_that_failed(item, trouble):
    assert is_trouble(item) is trouble


@pytest.mark.parametrize("item", [{}, {"content": None, "metadata": None}, {"content": ["x"], "metadata": {"type": 5}}])
def test_an_item_of_another_shape_is_shown_as_well_as_it_goes(item):
    assert texts(item) == ["▸ "]
