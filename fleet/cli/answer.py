"""`fleet thread answer`: the open question of a thread, and what a person says to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleet.cli.options import json_option, make_console
from fleet.cli.text import plain
from fleet.cli.thread import run, thread_options

if TYPE_CHECKING:
    from rich.console import Console

    from fleet.config import FleetConfig
    from fleet.events import Answer, Question
    from fleet.person import Desk
    from fleet.prompts import Prompt


@click.command()
@click.argument("alias")
@click.argument("answers", nargs=-1, metavar="[ANSWER]...")
@json_option
@thread_options
def answer(alias: str, answers: tuple[str, ...], as_json: bool, section: str | None, config_file: Path | None) -> None:
    """Answer the open question of the thread ALIAS.

    An ANSWER is the number or the label of an option, several for a question that takes several (1,3), or your own
    words. Several questions take an ANSWER each, one question takes all words as one. Without an ANSWER the question is
    shown and the answer read from the terminal.
    """
    from fleet.errors import FleetError

    async def read(desk: Desk, _: FleetConfig) -> Prompt | None:
        return (await desk.newest(alias)).question

    prompt = run(config_file, section, read, alias)
    if prompt is None:
        raise FleetError(
            "argument_invalid", f"no question is open in {alias}; `fleet thread send` says something there"
        )
    # Not while an event loop runs: it would keep Ctrl-C from whoever is being asked.
    given = given_answer(prompt, answers) if answers else asked_answer(prompt, make_console(stderr=as_json))

    async def post(desk: Desk, _: FleetConfig) -> None:
        await desk.answer(alias, prompt, given)

    run(config_file, section, post, alias)
    if as_json:
        from fleet.questions import answering

        said = answering(prompt.questions, given)["metadata"]["answers"]
        click.echo(json.dumps({"prompt_id": prompt.id, "answers": said}))
        return
    for texts in given.answers:
        click.echo(f"✓ Answered: {plain(', '.join(texts))}")


def given_answer(prompt: Prompt, words: tuple[str, ...]) -> Answer:
    """Return the answer that the command line gives.

    Raises:
        FleetError: `argument_invalid`.
    """
    from fleet.errors import FleetError
    from fleet.events import Answer
    from fleet.questions import picked

    if len(prompt.questions) == 1:
        words = (" ".join(words),)
    if len(words) != len(prompt.questions):
        raise FleetError(
            "argument_invalid", f"{len(prompt.questions)} questions are open, and {len(words)} answers are given"
        )
    return Answer(tuple(picked(question, text) for question, text in zip(prompt.questions, words, strict=True)))


def asked_answer(prompt: Prompt, console: Console) -> Answer:
    """Show the questions one after another, and return what the terminal answers.

    Raises:
        FleetError: `argument_invalid`, the input ended before.
    """
    from fleet.errors import FleetError
    from fleet.events import Answer

    try:
        return Answer(tuple(_asked(console, prompt, question) for question in prompt.questions))
    except EOFError:
        raise FleetError("argument_invalid", "the input ended before every question was answered") from None


def _asked(console: Console, prompt: Prompt, question: Question) -> tuple[str, ...]:
    """Ask until there is an answer."""
    from rich.prompt import Prompt as Ask

    from fleet.answers import DENY
    from fleet.cli.transcript import one_question
    from fleet.errors import FleetError
    from fleet.questions import picked

    console.print(*one_question(question), sep="\n", soft_wrap=True, highlight=False)
    while True:
        try:
            chosen = picked(question, Ask.ask("Answer", console=console))
        except FleetError as error:
            console.print(plain(error.detail), style="red", markup=False, highlight=False)
            continue
        if prompt.kind == "approval" and chosen == (DENY,):
            return denial(Ask.ask("Why not? The agent is told", console=console))
        return chosen


def denial(reason: str) -> tuple[str, ...]:
    """Return the answer that denies a call. A reason that would read as an approval, such as "ok", is left out."""
    from fleet.answers import APPROVALS, DENY

    reason = reason.strip()
    return (DENY if not reason or reason.lower() in APPROVALS else reason,)
