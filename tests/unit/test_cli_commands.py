"""docs/commands.md has every command there is, as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fleet.cli.app import CALLERS_STATUS, INTERRUPTED_STATUS, OTHER_STATUS, cli

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
STATUSES = {0, OTHER_STATUS, CALLERS_STATUS, INTERRUPTED_STATUS}


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def usage(path: str, command: click.Command) -> str:
    context = click.Context(command)
    arguments = [param.make_metavar(context) for param in command.params if isinstance(param, click.Argument)]
    return " ".join([path, *arguments])


def rows() -> dict[str, list[str]]:
    """The usage of each command of the page → the other cells of its row."""
    lines = re.findall(r"^\| `(fleet [^`]*)` \|(.*)\|$", PAGE, re.MULTILINE)
    return {command: [cell.strip() for cell in rest.split("|")] for command, rest in lines}


def test_every_command_is_listed_with_its_arguments_and_what_it_does():
    described = {usage(path, command): command.get_short_help_str(500) for path, command in commands(cli, "fleet")}
    assert {command: cells[0] for command, cells in rows().items()} == described


def test_the_page_knows_which_commands_speak_json():
    speaks = {usage(p, c): any("--json" in param.opts for param in c.params) for p, c in commands(cli, "fleet")}
    assert {command: cells[1] == "yes" for command, cells in rows().items()} == speaks


def test_every_status_that_is_listed_is_explained():
    listed = {int(status) for cells in rows().values() for status in cells[2].split(",")}
    explained = {int(status) for status in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert listed == explained == STATUSES


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_after_the_line_of_the_page(shell):
    assert f"_FLEET_COMPLETE={shell}_source fleet" in PAGE
    words = {"COMP_WORDS": "fleet thread ans", "COMP_CWORD": "ans" if shell == "fish" else "2"}
    env = os.environ | words | {"_FLEET_COMPLETE": f"{shell}_complete"}
    code = "import sys; sys.argv = ['fleet']; import fleet.cli; fleet.cli.main()"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "answer" in done.stdout
