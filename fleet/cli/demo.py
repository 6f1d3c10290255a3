"""`fleet demo`: two hosts, two agents, two threads, on this machine and without an account."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from fleet.cli.options import make_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from fleet.person import Desk
    from fleet.sandbox.demo import Stage, Story
    from fleet.supervisor import Child, Supervisor
    from fleet.up import Plan

#: Seconds in which both turns must have ended.
PATIENCE_S = 100.0
#: Seconds between two looks at the threads.
LOOK_S = 0.2
#: Where Flower listens when that port is free.
FLOWER_PORT = 5555
#: Host → the colour of its lines.
COLOURS = {"alpha": "green", "beta": "blue"}
#: Variables that would lead the demo's fleet to another one.
_ELSEWHERE = ("FLEET_CONFIG", "FLEET_HOST", "FLEET_HOME", "FLEET_REDIS_URL", "BLOBHUB_API_URL")


class DemoError(Exception):
    """The demo did not come to its end; the message says why."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What came of a story."""

    story: Story
    host: str
    artifacts: tuple[str, ...]
    changes: str


@click.command()
@click.option("--keep", is_flag=True, help="Leave everything running afterwards, in .demo, until Ctrl-C.")
def demo(keep: bool) -> int:
    """Show the fleet at work on this machine: no account and no model is needed.

    The real Claude Code repairs a small project on host alpha, its model played by a stand-in; the scripted agent
    works on host beta.
    """
    from subprocess import CalledProcessError

    from fleet.supervisor import ChildNotReadyError

    # The end of a SIGTERM is that of a Ctrl-C: all processes gone, the folder too.
    signal.signal(signal.SIGTERM, _leave)
    console = make_console()
    with _folder(keep) as folder:
        try:
            _run(console, folder, keep=keep)
        except (DemoError, ChildNotReadyError) as error:
            _say_failed(console, folder, str(error))
            return 1
        except CalledProcessError as error:
            _say_failed(console, folder, f"{' '.join(error.cmd[:2])}: {error.stderr.strip()}")
            return 1
    return 0


def _leave(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)


@contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    """Yield a new folder. It stays when it is to be kept, or when the demo failed and its logs are worth a look."""
    from fleet.errors import FleetError
    from fleet.local import running

    if not keep:
        folder = Path(tempfile.mkdtemp(prefix="fleet-demo-"))
    else:
        folder = Path(".demo").absolute()
        if running(folder / "home"):
            raise FleetError("argument_invalid", f"a demo is running in {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        if not keep and not (folder / "failed").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _run(console: Console, folder: Path, *, keep: bool) -> None:
    """Play the demo, and with `keep` go on until Ctrl-C."""
    from fleet.local import announced
    from fleet.sandbox.demo import build, claude_executable
    from fleet.supervisor import Supervisor
    from fleet.up import planned

    began = time.monotonic()
    if shutil.which("git") is None:
        raise DemoError("git is not on PATH: install it")
    environ = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    environ["FLEET_HOME"] = str(folder / "home")
    claude = claude_executable()
    if claude is None:
        console.print("Claude Code's SDK is not installed (the extra `claude`): both threads are scripted.")
    stage = build(folder, environ, claude)
    with planned(stage.config, environ) as plan:
        flower = [_flower(plan)] if keep else []
        console.print("Starting Redis, the platform, beat, and the workers of [green]alpha[/] and [blue]beta[/] …")
        groups = [list(stage.servers), *plan.groups, flower]
        with Supervisor(groups, plan.logs) as supervisor, announced(plan.home, plan.up):
            console.print(f"Up after {time.monotonic() - began:.0f} s.\n", highlight=False)
            endings = asyncio.run(_play(console, stage, plan))
            for ending in endings:
                _say_ending(console, ending)
            console.print(f"Both turns are complete, after {time.monotonic() - began:.0f} s.", highlight=False)
            if keep:
                _stay(console, plan, supervisor, flower[0])


async def _play(console: Console, stage: Stage, plan: Plan) -> list[Ending]:
    from fleet.person import desk

    person = {"FLEET_PERSON_API_KEY_FILE": str(plan.up.person_key_file)}
    async with desk(plan.config, person) as open_desk:
        for story in stage.stories:
            await _hand_over(open_desk, story)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*(_follow(console, open_desk, story) for story in stage.stories))
        except TimeoutError:
            raise DemoError(f"a turn did not end within {PATIENCE_S:.0f} s") from None
        console.print()
        return [await _ending(plan, open_desk, story) for story in stage.stories]


async def _hand_over(desk: Desk, story: Story) -> None:
    from fleet.envelope import new_thread

    value = new_thread(str(story.repository), story.agent, "autonomous", story.artifacts)
    await desk.hand_over(story.alias, value, story.message)


async def _follow(console: Console, desk: Desk, story: Story) -> None:
    """Show a thread until its turn has ended.

    Raises:
        DemoError: it did not complete.
    """
    from fleet.cli.transcript import is_trouble, kind_of, show
    from fleet.person import Tail

    reading = Tail(desk, story.alias)
    while True:
        for item in await reading.new():
            show(console, item, _prefix(story))
            if is_trouble(item):
                raise DemoError(f"{story.alias} on {story.host}: {item['content'][0]['text']}")
            if kind_of(item) == "turn_end":
                return
        await asyncio.sleep(LOOK_S)


def _prefix(story: Story) -> Text:
    from rich.text import Text

    return Text(f"{story.host:5} {story.agent:11} │ ", style=COLOURS[story.host])


async def _ending(plan: Plan, desk: Desk, story: Story) -> Ending:
    from fleet.refs import ThreadRef
    from fleet.sandbox.demo import changes
    from fleet.status import gather_thread

    artifacts: list[str] = []
    async for page in desk.platform.objects(desk.at, story.artifacts.prefix):
        artifacts += [str(row["alias"]) for row in page]
    record = await gather_thread(plan.config, ThreadRef(desk.at.session_id, story.alias))
    stat = await asyncio.to_thread(changes, story.repository)
    if record is None or not artifacts or not stat:
        raise DemoError(f"{story.alias}: no record, no artifact or no change was left")
    return Ending(story, str(record["host"]), tuple(artifacts), stat)


def _say_ending(console: Console, ending: Ending) -> None:
    console.print(f"[bold]{ending.story.alias}[/] ran on [{COLOURS[ending.host]}]{ending.host}[/]", highlight=False)
    for alias in ending.artifacts:
        console.print(f"  artifact {alias}", soft_wrap=True, highlight=False)
    for line in ending.changes.splitlines():
        console.print(f"  {line.strip()}", soft_wrap=True, highlight=False, markup=False)
    console.print()


def _say_failed(console: Console, folder: Path, reason: str) -> None:
    """Say why the demo failed, with the last lines of the logs of those who worked."""
    from fleet.supervisor import tail

    (folder / "failed").touch()
    console.print("The demo failed:", style="bold red")
    console.print(reason, soft_wrap=True, highlight=False, markup=False)
    for log in sorted((folder / "home" / "logs").glob("*-*.log")):
        console.print(f"\n{log}", style="bold", soft_wrap=True, highlight=False)
        console.print(tail(log, 0), soft_wrap=True, highlight=False, markup=False)
    console.print(f"\nAll logs and files are in {folder}", soft_wrap=True, highlight=False)


def _flower(plan: Plan) -> Child:
    """Return Flower, the dashboard of Celery."""
    import socket

    from fleet.machine import celery_command, free_port
    from fleet.supervisor import Child

    def listens(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    port = free_port() if listens(FLOWER_PORT) else FLOWER_PORT
    command = celery_command("flower", "--address=127.0.0.1", f"--port={port}")
    return Child(f"flower-{port}", command, plan.environ, ready=lambda: listens(port), ready_timeout_s=60)


def _stay(console: Console, plan: Plan, supervisor: Supervisor, flower: Child) -> None:
    """Look after the children until Ctrl-C."""
    from fleet.cli.processes import shell_exports
    from fleet.supervisor import TICK_S

    session = plan.config.sections[0].session.session_id
    force = """--kwargs '{"force": true}'"""
    lines = (
        *shell_exports(plan.home),
        "fleet status --watch",
        "fleet thread show demo/durations",
        'fleet thread send demo/changelog "Once more the changelog, please."',
        "fleet thread tail demo/changelog",
        f"""celery -A fleet call fleet.activate --args '["{session}", "demo/changelog"]' {force}""",
    )
    console.print("\n[bold]All goes on until Ctrl-C.[/] In another terminal:")
    for line in lines:
        console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
    console.print(
        f"Flower: http://127.0.0.1:{flower.name.rpartition('-')[2]}   Logs: {plan.logs}",
        soft_wrap=True,
        highlight=False,
    )
    try:
        while True:
            time.sleep(TICK_S)
            supervisor.check()
    except KeyboardInterrupt:
        console.print("Ending …")
