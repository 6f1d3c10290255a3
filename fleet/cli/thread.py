"""`fleet thread …`: what a person does with threads."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fleet.cli.options import config_option, found_config, json_option, make_console

if TYPE_CHECKING:
    from fleet.config import FleetConfig
    from fleet.envelope import Artifacts, State
    from fleet.person import Desk, Tail
    from fleet.prompts import Prompt

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

#: Seconds between two looks for new items, and at most while the platform does not answer.
FOLLOW_S, FOLLOW_MAX_S = 0.5, 10.0
#: Seconds for which a turn's end that was there from the beginning is not taken for the end of the turn that is
#: waited for: lists lag, a message just posted may not show yet.
SETTLE_S = 3.0
#: Items that `show` ends with.
SHOWN_ITEMS = 10


@click.group()
def thread() -> None:
    """Hand threads over, talk to them, read along.

    With FLEET_PERSON_API_KEY or FLEET_PERSON_API_KEY_FILE, or the embedded platform of `fleet up`.
    """


def thread_options(command: F) -> F:
    """Add the options that every command on threads has."""
    section = click.option(
        "--section", help="Name of the section, or id of its session; not needed where there is one."
    )
    return config_option(section(command))


def run(
    config_file: Path | None, section: str | None, work: Callable[[Desk, FleetConfig], Awaitable[T]], alias: str = ""
) -> T:
    """Run `work` with the section open, `alias` checked."""
    from fleet.aliases import check_alias
    from fleet.person import desk

    if alias:
        check_alias(alias)
    config, environ = found_config(config_file)

    async def opened() -> T:
        async with desk(config, environ, section) as open_desk:
            return await work(open_desk, config)

    return asyncio.run(opened())


@thread.command()
@click.argument("alias")
@click.option("--work-folder", required=True, help="Absolute path on the host that owns it.")
@click.option("--agent", default="claude_code", show_default=True, help="Type of the agent.")
@click.option("--permissions", type=click.Choice(["autonomous", "approval", "guarded"]), help="Default: the host's.")
@click.option("--model", default="", help="Default: the host's.")
@click.option("--artifacts", metavar="PREFIX=SOURCE", help="Publish the files below SOURCE as PREFIX/…")
@click.option("--message", default="", metavar="TEXT", help="The first message; - reads stdin.")
@click.option("--no-start", is_flag=True, help="Leave the thread's state unset.")
@thread_options
def new(
    alias: str,
    work_folder: str,
    agent: str,
    permissions: str | None,
    model: str,
    artifacts: str | None,
    message: str,
    no_start: bool,
    section: str | None,
    config_file: Path | None,
) -> None:
    """Create the thread ALIAS and hand it over."""
    from fleet.envelope import new_thread
    from fleet.person import thread_value

    value = new_thread(checked_folder(work_folder), agent, permissions or "", parsed_artifacts(artifacts))
    value = thread_value(value, model=model)
    text = given_text(message)

    async def work(desk: Desk, _: FleetConfig) -> None:
        await desk.hand_over(alias, value, text, start=not no_start)

    run(config_file, section, work, alias)


def parsed_artifacts(given: str | None) -> Artifacts | None:
    """Return the artifacts block of PREFIX=SOURCE.

    Raises:
        FleetError: `argument_invalid`.
    """
    from fleet.aliases import is_alias_prefix
    from fleet.envelope import Artifacts
    from fleet.errors import FleetError

    if given is None:
        return None
    prefix, _, source = given.partition("=")
    prefix = f"{prefix.rstrip('/')}/"
    if not source or source.startswith("/") or prefix == "/" or not is_alias_prefix(prefix):
        raise FleetError(
            "argument_invalid",
            f"--artifacts is {given!r}, must be PREFIX=SOURCE: the beginning of aliases, a path in the work folder",
        )
    return Artifacts(prefix, source)


def given_text(text: str) -> str:
    """Return the text of an argument; `-` stands for stdin."""
    return sys.stdin.read().strip() if text == "-" else text


@thread.command()
@click.argument("alias")
@click.argument("text")
@thread_options
def send(alias: str, text: str, section: str | None, config_file: Path | None) -> None:
    """Say TEXT in the thread ALIAS; - reads stdin."""
    from fleet.errors import FleetError

    message = given_text(text)
    if not message:
        raise FleetError("argument_invalid", "TEXT is empty")

    async def work(desk: Desk, _: FleetConfig) -> None:
        await desk.say(alias, message)

    run(config_file, section, work, alias)


@thread.command()
@click.argument("alias")
@thread_options
def stop(alias: str, section: str | None, config_file: Path | None) -> None:
    """Stop the thread ALIAS: its state becomes `completed`."""
    _set_state(config_file, section, alias, "completed")


@thread.command()
@click.argument("alias")
@thread_options
def retry(alias: str, section: str | None, config_file: Path | None) -> None:
    """Hand the thread ALIAS over again: its state becomes `pending`. A running turn is restarted."""
    _set_state(config_file, section, alias, "pending")


@thread.command()
@click.argument("alias")
@click.argument("work_folder")
@thread_options
def move(alias: str, work_folder: str, section: str | None, config_file: Path | None) -> None:
    """Hand the thread ALIAS over again in WORK_FOLDER, to the host that owns it. A running turn is ended.

    On another host, or in another folder, the agent begins anew: its own session stays where it was.
    """
    absolute = checked_folder(work_folder)

    async def work(desk: Desk, _: FleetConfig) -> None:
        await desk.move(alias, absolute)

    run(config_file, section, work, alias)


def checked_folder(work_folder: str) -> str:
    """Return a work folder as it was given.

    Raises:
        FleetError: `argument_invalid`, it is no absolute path.
    """
    from fleet.errors import FleetError

    if not work_folder.startswith("/"):
        raise FleetError("argument_invalid", f"the work folder is {work_folder!r}, must be an absolute path")
    return work_folder


def _set_state(config_file: Path | None, section: str | None, alias: str, state: State) -> None:
    async def work(desk: Desk, _: FleetConfig) -> None:
        await desk.set_state(alias, state)

    run(config_file, section, work, alias)


@thread.command()
@click.argument("alias")
@click.option("--follow/--no-follow", default=True, help="Wait for what comes, until Ctrl-C.")
@click.option("--until-turn-end", is_flag=True, help="End with the turn; status 1 when it did not complete.")
@json_option
@thread_options
def tail(
    alias: str, follow: bool, until_turn_end: bool, as_json: bool, section: str | None, config_file: Path | None
) -> int:
    """Read the thread ALIAS, live."""
    from fleet.cli.transcript import hint, show
    from fleet.person import Tail
    from fleet.questions import QuestionWatch
    from fleet.reach import platform_errors

    console = make_console()

    async def work(desk: Desk, _: FleetConfig) -> int:
        await desk.thread(alias)
        reading, watch = Tail(desk, alias), QuestionWatch(await desk.worker())

        def say(items: list[dict[str, Any]]) -> None:
            if as_json:
                for item in items:
                    click.echo(json.dumps(item))
                return
            before = watch.open
            watch.see(items)
            for item in items:
                show(console, item)
            if watch.open is not None and watch.open != before:
                console.print(hint(watch.open, alias, section), soft_wrap=True, highlight=False)

        with platform_errors(desk.platform.url):
            if until_turn_end:
                return await _follow_turn(reading, say)
            say(await reading.new())
            while follow:
                await asyncio.sleep(FOLLOW_S)
                say(await _patiently(reading))
        return 0

    return run(config_file, section, work, alias)


async def _patiently(reading: Tail) -> list[dict[str, Any]]:
    """Return the new items; a platform that is away for a while is waited for."""
    from fleet.platform.errors import TransientError

    pause = FOLLOW_S
    while True:
        try:
            return await reading.new()
        except TransientError as error:
            print(f"fleet: {error}; looking again", file=sys.stderr)
            await asyncio.sleep(pause)
            pause = min(2 * pause, FOLLOW_MAX_S)


async def _follow_turn(reading: Tail, say: Callable[[list[dict[str, Any]]], None]) -> int:
    """Say items until a turn has ended after the last words of a person. Return 1 when it did not complete."""
    from fleet.cli.transcript import is_trouble, kind_of

    began = time.monotonic()
    last: dict[str, Any] | None = None  # the item that ended the turn
    live = False
    while True:
        items = await _patiently(reading)
        say(items)
        for item in items:
            if kind_of(item) == "turn_end" or is_trouble(item):
                last = item
            elif not kind_of(item):
                last = None
        if last is not None and (live or time.monotonic() - began > SETTLE_S):
            return int(is_trouble(last))
        live = last is None or live
        await asyncio.sleep(FOLLOW_S)


@thread.command()
@click.argument("alias")
@json_option
@thread_options
def show(alias: str, as_json: bool, section: str | None, config_file: Path | None) -> None:
    """Show the thread ALIAS: its envelope, what the fleet knows of it, its last items, its open question."""

    async def work(desk: Desk, config: FleetConfig) -> dict[str, Any]:
        from fleet.refs import ThreadRef
        from fleet.status import gather_thread

        newest = await desk.newest(alias)
        # A person's own machine may know the platform alone.
        known = await gather_thread(config, ThreadRef(desk.at.session_id, alias)) if config.redis.url else None
        return {
            "alias": alias,
            "envelope": newest.envelope,
            "record": known,
            "items": newest.items[-SHOWN_ITEMS:],
            "question": newest.question,
        }

    found = run(config_file, section, work, alias)
    if as_json:
        question = found["question"] and question_json(found["question"])
        click.echo(json.dumps(found | {"question": question}))
    else:
        _show(found, section)


def question_json(prompt: Prompt) -> dict[str, Any]:
    """Return an open question for programs: as its item has it, without what is the fleet's own."""
    return {
        "prompt_id": prompt.id,
        "kind": prompt.kind,
        "questions": [
            {
                "question": question.question,
                "header": question.header,
                "options": [{"label": label, "description": description} for label, description in question.options],
                "multiSelect": question.multi_select,
            }
            for question in prompt.questions
        ],
    }


def _show(found: dict[str, Any], section: str | None) -> None:
    import yaml

    from fleet.cli.status import pairs
    from fleet.cli.text import plain
    from fleet.cli.transcript import hint, question_lines
    from fleet.cli.transcript import show as show_item
    from fleet.questions import asked_in

    console = make_console()
    envelope = yaml.safe_dump(found["envelope"]["thread"]["metadata"], sort_keys=False, allow_unicode=True)
    console.print(plain(envelope), markup=False)
    if found["record"]:
        console.print(pairs((name, value) for name, value in found["record"].items() if value != ""))
        console.print()
    question = found["question"]
    if question is not None and question not in map(asked_in, found["items"]):
        console.print(*question_lines(question), sep="\n", soft_wrap=True, highlight=False)
    for item in found["items"]:
        show_item(console, item)
    if question is not None:
        console.print(hint(question, found["alias"], section), soft_wrap=True, highlight=False)


@thread.command()
@json_option
@thread_options
def ls(as_json: bool, section: str | None, config_file: Path | None) -> None:
    """List the threads of a section."""

    async def work(desk: Desk, _: FleetConfig) -> list[dict[str, Any]]:
        from fleet.envelope import parse

        parsed = [(alias, parse(value)) for alias, value in await desk.threads()]
        return [
            {"alias": alias, "state": each.state, "agent": each.agent_type, "work_folder": each.work_folder}
            for alias, each in parsed
            if each is not None
        ]

    found = run(config_file, section, work)
    if as_json:
        click.echo(json.dumps(found))
        return
    from fleet.cli.status import STATE_STYLES, listing

    make_console().print(
        listing(
            ("Thread", "State", "Agent", "Work folder"),
            [
                (
                    row["alias"],
                    (row["state"] or "-", STATE_STYLES.get(row["state"] or "", "default")),
                    row["agent"],
                    row["work_folder"],
                )
                for row in found
            ],
        )
    )
