"""A person's answer: which question is open, and what words on the command line mean."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fleet import items
from fleet.answers import approval, approval_question, read_answer
from fleet.cli.answer import asked_answer, denial, given_answer
from fleet.cli.transcript import hint, lines
from fleet.errors import FleetError
from fleet.events import Answer, Question
from fleet.person import spoken
from fleet.prompts import Prompt
from fleet.questions import QuestionWatch, answering, asked_in, picked

COLOUR = Question("Which colour?", "Colour", (("Red", "as before"), ("Blue", "")))
PARTS = Question("Which parts?", "", (("Docs", ""), ("Tests", ""), ("Code", "")), multi_select=True)
WORDS = Question("What is its name?")
APPROVAL = Prompt("p", "approval", (approval_question("Bash → make deploy"),))


def asking(*questions: Question) -> Prompt:
    return Prompt("p", "ask_user_question", questions)


def of_worker(item: dict, user: str = "worker") -> dict:
    return {**item, "user_id": user}


def prompt_item(*questions: Question, id_: str = "p", user: str = "worker") -> dict:
    return of_worker(items.pending_prompt(id_, "ask_user_question", questions), user)


@pytest.fixture
def watch() -> QuestionWatch:
    return QuestionWatch("worker")


def test_a_question_is_open_until_the_worker_says_that_it_was_answered(watch):
    watch.see([prompt_item(COLOUR)])
    assert watch.open is not None
    assert watch.open.questions == (COLOUR,)
    watch.see([of_worker(items.prompt_answered("p", "ask_user_question", (COLOUR,), Answer((("Red",),))))])
    assert watch.open is None


@pytest.mark.parametrize(
    "behind",
    [
        {**spoken("thanks"), "user_id": "person"},
        of_worker(items.prompt_closed("p", "ask_user_question", "cancelled", "superseded")),
        of_worker(items.turn_end("failed", {})),
    ],
)
def test_what_ends_a_question(watch, behind):
    watch.see([prompt_item(COLOUR), behind])
    assert watch.open is None


def test_other_words_of_the_worker_and_the_end_of_another_question_leave_it_open(watch):
    closed = items.prompt_closed("other", "ask_user_question", "cancelled", "superseded")
    watch.see([prompt_item(COLOUR), of_worker(items.status("begun")), of_worker(closed)])
    assert watch.open is not None


def test_a_newer_question_takes_the_place_of_the_older(watch):
    watch.see([prompt_item(COLOUR), prompt_item(PARTS, id_="q")])
    assert watch.open is not None
    assert watch.open.id == "q"


def test_a_question_that_somebody_else_put_into_the_thread_is_none(watch):
    watch.see([prompt_item(COLOUR, user="somebody")])
    assert watch.open is None


def test_where_no_worker_is_known_what_has_a_type_is_a_workers():
    watch = QuestionWatch(None)
    watch.see([prompt_item(COLOUR, user="anybody")])
    assert watch.open is not None
    watch.see([of_worker(spoken("Red"), "anybody")])
    assert watch.open is None


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        "x",
        {"type": "pending_prompt"},
        {"type": "pending_prompt", "prompt": {"kind": "text", "questions": [3]}},
        {"type": "pending_prompt", "prompt": {"kind": "text", "questions": []}},
    ],
)
def test_a_prompt_of_another_shape_asks_nothing(metadata):
    assert asked_in({"metadata": metadata}) is None


@pytest.mark.parametrize(
    ("question", "words", "chosen"),
    [
        (COLOUR, "2", ("Blue",)),
        (COLOUR, " red ", ("Red",)),
        (COLOUR, "a darker one", ("a darker one",)),
        (PARTS, "1,3", ("Docs", "Code")),
        (PARTS, "tests, docs", ("Tests", "Docs")),
        (WORDS, "42", ("42",)),
    ],
)
def test_words_pick_what_they_mean_to_the_fleet(question, words, chosen):
    assert picked(question, words) == chosen


@pytest.mark.parametrize(("question", "words"), [(COLOUR, "3"), (COLOUR, "1,2"), (PARTS, "1,7"), (WORDS, "  ")])
def test_numbers_without_an_option_and_an_empty_answer_are_refused(question, words):
    with pytest.raises(FleetError, match="argument_invalid"):
        picked(question, words)


def test_one_question_takes_all_words_and_several_take_one_each():
    assert given_answer(asking(WORDS), ("the", "old", "one")).answers == (("the old one",),)
    assert given_answer(asking(COLOUR, PARTS), ("1", "2 3")).answers == (("Red",), ("Tests", "Code"))
    with pytest.raises(FleetError, match="2 questions are open, and 1 answers"):
        given_answer(asking(COLOUR, PARTS), ("1",))


@pytest.mark.parametrize("structured", [True, False])
def test_the_fleet_reads_an_answer_as_it_was_given_also_from_its_text_alone(structured):
    questions, answer = (COLOUR, PARTS, WORDS), Answer((("Blue",), ("Docs", "Code"), ("old one",)))
    item = answering(questions, answer)
    assert item["metadata"]["answers"][1] == {"question": "Which parts?", "answer": ["Docs", "Code"]}
    assert item["content"][0]["text"] == "Blue\nDocs, Code\nold one"
    read = item if structured else {"content": item["content"]}
    assert read_answer("ask_user_question", questions, read) == answer


@pytest.mark.parametrize(("words", "allow"), [("1", True), ("yes", True), ("2", False), ("not today", False)])
def test_an_approval_is_given_by_yes_or_its_number_and_all_else_denies(words, allow):
    assert approval(given_answer(APPROVAL, (words,))).allow is allow


def test_a_denial_for_a_reason_that_sounds_like_consent_stays_a_denial():
    assert denial("ok") == denial(" ") == ("Deny",)
    assert denial("use staging") == ("use staging",)


def typed(monkeypatch, prompt: Prompt, *typed_lines: str) -> tuple[tuple[tuple[str, ...], ...], str]:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in typed_lines)))
    output = io.StringIO()
    return asked_answer(prompt, Console(file=output)).answers, output.getvalue()


def test_the_terminal_is_asked_one_question_after_another_until_each_is_answered(monkeypatch):
    answers, shown = typed(monkeypatch, asking(COLOUR, PARTS), "", "5", "2", "1 2")
    assert answers == (("Blue",), ("Docs", "Tests"))
    assert "? [Colour] Which colour?\n  1. Red — as before\n  2. Blue\n" in shown
    assert "5 is not one of the 2 options" in shown
    assert shown.index("Which colour?") < shown.index("Which parts?")


def test_who_denies_is_asked_why(monkeypatch):
    assert typed(monkeypatch, APPROVAL, "2", "use staging")[0] == (("use staging",),)
    assert typed(monkeypatch, APPROVAL, "1")[0] == (("Approve",),)


def test_input_that_ends_before_all_is_answered_is_refused(monkeypatch):
    with pytest.raises(FleetError, match="ended before"):
        typed(monkeypatch, asking(COLOUR, PARTS), "1")


def test_a_question_is_shown_with_all_its_options_and_cannot_control_the_terminal():
    item = items.pending_prompt("p", "ask_user_question", (Question("a\x1b[2J", "", (("b\x07", ""),), True),))
    assert [line.plain for line in lines(item)] == ["? a�[2J", "  1. b�", "  One or more may be picked."]


def test_the_hint_is_a_command_that_can_be_copied():
    assert hint(APPROVAL, "a/b", "my desk").plain == (
        "↳ Open: fleet thread answer a/b --section 'my desk' [yes, or why not]"
    )
    assert hint(asking(COLOUR, PARTS), "a", None).plain.endswith("a [2 answers, one for each question]")
