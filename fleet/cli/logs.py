"""`fleet logs ALIAS`: what this machine's own log has of a thread, in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleet.cli.options import config_option, found_config, json_option, make_console

if TYPE_CHECKING:
    from rich.console import Console

    from fleet.hostfiles import HostFiles

#: Keys of an item's metadata that its brief does not show.
LONG_KEYS = ("tool", "detail", "reasoning")


@click.command()
@click.argument("alias")
@click.option("--turn", type=click.IntRange(min=1), help="Only this turn.")
@click.option("--path", is_flag=True, help="Only the path of the log.")
@json_option
@config_option
def logs(alias: str, turn: int | None, path: bool, as_json: bool, config_file: Path | None) -> None:
    """Show the log of the thread ALIAS on this machine, nothing shortened.

    The platform's copy of an item may be cut to the budget; this is the original.
    """
    from fleet.aliases import check_alias
    from fleet.config import read_environment

    check_alias(alias)
    _, environ = found_config(config_file)
    found = _files(read_environment(environ).home, alias)
    if path:
        for files in found:
            click.echo(files.log)
        return
    console = make_console()
    for files in found:
        for entry in files.said() if turn is None else files.said_in(turn):
            if as_json:
                click.echo(json.dumps(entry))
            else:
                _show(console, entry)


def _files(home: Path, alias: str) -> list[HostFiles]:
    """Return the logs of a thread below `home`; `fleet up` has a folder for each of its hosts.

    Raises:
        FleetError: `log_missing`.
    """
    from fleet.errors import FleetError
    from fleet.hostfiles import JOB_PREFIX, HostFiles
    from fleet.refs import ThreadRef

    homes = [home, *sorted(home.glob("hosts/*"))]
    jobs = [(host, job) for host in homes for job in sorted((host / "jobs").glob(f"{JOB_PREFIX}*"))]
    found = [HostFiles(host, ThreadRef(job.name.removeprefix(JOB_PREFIX), alias)) for host, job in jobs]
    logged = [files for files in found if files.log.exists()]
    if not logged:
        raise FleetError("log_missing", f"there is no log of {alias} below {home}")
    return logged


def _show(console: Console, entry: dict[str, Any]) -> None:
    import yaml
    from rich.text import Text

    from fleet.cli.text import plain
    from fleet.cli.transcript import show

    item = entry["item"]
    prefix = Text(f"{entry['turn']}.{entry['n']} ", style="dim")
    show(console, item, prefix)
    more = {key: item["metadata"][key] for key in LONG_KEYS if item["metadata"].get(key)}
    if more:
        text = yaml.safe_dump(more, sort_keys=False, allow_unicode=True, width=10**6)
        console.print(Text(plain(text)), soft_wrap=True, highlight=False)
