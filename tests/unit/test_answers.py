from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.answers import APPROVALS, approval, in_words, read_answer
from fleet.events import Answer, Question

COLOURS = Question("Which?", "Colour", (("Red", ""), ("Dark blue", ""), ("Green", "")))
SEVERAL = Question("Which ones?", "Colours", COLOURS.options, multi_select=True)


def said(text: str, **metadata: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "metadata": metadata}


@pytest.mark.parametrize("text", ["approve", " Approved ", "YES", "y", "ok", "Allow", "1"])
def test_these_words_approve(text: str):
    assert approval(read_answer("approval", (COLOURS,), said(text))).allow


@pytest.mark.parametrize("text", ["no", "2", "yes please", "approve it", "ok.", "", "deny: too risky"])
def test_anything_else_denies_and_its_words_are_the_reason(text: str):
    decision = approval(read_answer("approval", (COLOURS,), said(text)))
    assert not decision.allow
    assert text in decision.message


@given(st.text())
def test_only_the_exact_words_approve(text: str):
    decision = approval(read_answer("approval", (COLOURS,), said(text)))
    assert decision.allow == (text.strip().lower() in APPROVALS)


@pytest.mark.parametrize(
    ("question", "text", "expected"),
    [
        (COLOURS, "2", ("Dark blue",)),
        (COLOURS, "dark BLUE", ("Dark blue",)),
        (COLOURS, "something else", ("something else",)),
        (COLOURS, "4", ("4",)),
        (SEVERAL, "1, 3", ("Red", "Green")),
        (SEVERAL, "1 3", ("Red", "Green")),
        (SEVERAL, "red, dark blue", ("Red", "Dark blue")),
        (SEVERAL, "3, 3", ("Green",)),
        (SEVERAL, "red and purple", ("red and purple",)),
        (Question("Name?"), "Ada Lovelace", ("Ada Lovelace",)),
    ],
)
def test_a_number_or_a_label_picks_an_option(question: Question, text: str, expected: tuple[str, ...]):
    assert read_answer("ask_user_question", (question,), said(text)).answers == (expected,)


def test_each_of_several_questions_is_answered_by_a_line():
    answer = read_answer("ask_user_question", (COLOURS, Question("Why?")), said("1\nbecause"))
    assert answer.answers == (("Red",), ("because",))


def test_structured_answers_win_when_they_fit_and_are_passed_over_when_not():
    fitting = said("1", answers=[{"question": "Which?", "answer": ["Green"]}])
    assert read_answer("ask_user_question", (COLOURS,), fitting).answers == (("Green",),)
    for broken in ([], "x", [{"answer": 5}], [None], [{"answer": ["a"]}, {"answer": ["b"]}]):
        assert read_answer("ask_user_question", (COLOURS,), said("1", answers=broken)).answers == (("Red",),)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
def test_no_item_breaks_the_reading(value: Any):
    for item in ({"content": value}, {"metadata": value}, {"metadata": {"answers": value}, "content": value}):
        assert len(read_answer("ask_user_question", (COLOURS, SEVERAL), item).answers) == 2


def test_a_parked_agent_is_told_in_words():
    asked = (Question("Allow Bash → make deploy?"),)
    assert "approved this call: Bash → make deploy" in in_words("approval", asked, Answer((("yes",),)))
    refused = in_words("approval", asked, Answer((("too risky",),)))
    assert "too risky" in refused
    assert "Do not make it" in refused
    assert "Which?\nRed" in in_words("ask_user_question", (COLOURS,), Answer((("Red",),)))
