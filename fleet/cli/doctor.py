"""`fleet doctor`: is everything there that this machine needs, and what is to be done if not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleet.cli.options import config_option, given_environment, json_option, make_console
from fleet.cli.text import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.text import Text

    from fleet.doctor import Finding, Report

#: Narrowest column in which a long line is still broken.
MIN_WIDTH = 20
#: State of a finding → its mark and style.
MARKS = {"ok": ("✓", "green"), "warning": ("!", "bold yellow"), "problem": ("✗", "bold red")}


@click.command()
@json_option
@config_option
def doctor(as_json: bool, config_file: Path | None) -> int:
    """Check what this machine needs, and say what to do. Changes nothing.

    Configuration, keys, Redis, platform, clocks, work folders, sections, agents and the other hosts. Ends with status 1
    when there is a problem; warnings are none.
    """
    from rich.text import Text

    from fleet.doctor import examine

    with make_console(stderr=True).status("Looking …") as spinner:

        def progress(waiting: Sequence[str]) -> None:
            spinner.update(Text(plain(f"Looking at {', '.join(waiting)} …")))

        report = examine(given_environment(config_file), progress)
    if as_json:
        findings = [
            {"subject": each.subject, "state": each.state, "detail": each.detail, "remedy": each.remedy}
            for each in report.findings
        ]
        click.echo(json.dumps({"ok": report.ok, "findings": findings}))
    else:
        _show(report)
    status = 0 if report.ok else 1
    if report.hangs:
        # What hangs in the kernel, such as a look at a dead mount, would keep Python from ending.
        sys.stdout.flush()
        os._exit(status)
    return status


def _show(report: Report) -> None:
    console = make_console()
    subjects = max(len(plain(finding.subject)) for finding in report.findings)
    for finding in report.findings:
        for line in _lines(console, finding, subjects):
            console.print(line, soft_wrap=True, highlight=False)
    counts = {state: sum(each.state == state for each in report.findings) for state in MARKS}
    console.print(f"{counts['ok']} ok, {counts['warning']} warning(s), {counts['problem']} problem(s)", highlight=False)


def _lines(console: Console, finding: Finding, subjects: int) -> Iterator[Text]:
    """Yield a finding in three columns. Only a terminal gets long lines broken: what is piped stays whole."""
    from rich.text import Text

    mark, style = MARKS[finding.state]
    head = Text.assemble((mark, style), f" {plain(finding.subject):{subjects}}  ")
    body = [Text(plain(finding.detail))]
    if finding.remedy:
        body.append(Text(f"→ {plain(finding.remedy)}", style=style))
    width = max(console.width - head.cell_len, MIN_WIDTH)
    for whole in body:
        for part in whole.wrap(console, width) if console.is_terminal else whole.split("\n"):
            yield head + part
            head = Text(" " * head.cell_len)
