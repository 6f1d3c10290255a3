"""`fleet status`: hosts, sections and threads at a glance."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleet.cli.options import config_option, found_config, json_option, make_console
from fleet.cli.text import plain

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

#: Seconds between two looks of `--watch`.
WATCH_S = 1.0

#: Columns that are folded where a terminal is narrow, so that the others stay whole.
LONG = frozenset({"Agents", "Error", "Reason", "Work folder", "Work folders"})

#: State of a thread → its style.
STATE_STYLES = {"pending": "yellow", "active": "green", "completed": "dim", "failed": "bold red", "removed": "dim"}


@click.command()
@config_option
@json_option
@click.option("--watch", is_flag=True, help="Look again and again, until Ctrl-C.")
def status(config_file: Path | None, as_json: bool, watch: bool) -> None:
    """Show hosts, sections and threads."""
    import asyncio

    from fleet.status import gather

    config, _ = found_config(config_file)

    def look() -> dict[str, Any]:
        return asyncio.run(gather(config))

    if not watch:
        found = look()
        if as_json:
            click.echo(json.dumps(found))
        else:
            make_console().print(tables(found))
        return
    if as_json:
        while True:
            click.echo(json.dumps(look()))
            time.sleep(WATCH_S)
    _watch(look)


def _watch(look: Callable[[], dict[str, Any]]) -> None:
    from rich.live import Live

    with Live(tables(look()), console=make_console(), auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(tables(look()), refresh=True)


def tables(found: Mapping[str, Any]) -> Group:
    """Return the status as three tables."""
    from rich.console import Group

    threads = listing(
        ("Thread", "State", "Host", "Turn", "Step", "Journal", "Agent", "Work folder", "Error"),
        [
            (
                thread["alias"],
                (thread["state"], STATE_STYLES.get(thread["state"], "default")),
                *(thread[key] for key in ("host", "turn", "step", "journal", "agent", "work_folder", "error")),
            )
            for thread in found["threads"]
        ],
    )
    return Group(hosts_listing(found["hosts"]), sections_listing(found["sections"]), threads)


def hosts_listing(hosts: Iterable[Mapping[str, Any]]) -> Table:
    """Return the hosts as a table."""
    return listing(
        ("Host", "", "Turns", "Work folders", "Agents", "Version"),
        [
            (
                host["name"],
                _host_state(host),
                f"{host['running']} of {host['max_agents']}",
                "\n".join(host["work_folders"]),
                ", ".join(host["agents"]),
                host["version"],
            )
            for host in hosts
        ],
    )


def _host_state(host: Mapping[str, Any]) -> tuple[str, str]:
    if not host["alive"]:
        return ("away", "bold red")
    return ("draining", "yellow") if host["draining"] else ("up", "green")


def sections_listing(sections: Iterable[Mapping[str, Any]]) -> Table:
    """Return the sections as a table."""
    return listing(
        ("Section", "", "Session", "Reason"),
        [
            (
                section["name"],
                (section["state"], "green" if section["state"] == "attached" else "yellow"),
                section["session"] or "",
                section["reason"],
            )
            for section in sections
        ],
    )


def listing(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; a cell is a value, or a value and its style."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in LONG)
    for row in rows:
        table.add_row(*(Text(plain(c[0]), style=c[1]) if isinstance(c, tuple) else Text(plain(c)) for c in row))
    return table


def pairs(rows: Iterable[tuple[str, object]]) -> Table:
    """Return names and values in two columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(plain(value)))
    return table
