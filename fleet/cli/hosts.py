"""`fleet hosts …`: the machines of the fleet, and how one is taken out for a reboot."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from fleet.cli.options import config_option, found_config, json_option, make_console
from fleet.cli.text import plain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fleet.config import FleetConfig
    from fleet.store import Store

T = TypeVar("T")

#: Seconds between two looks at a host that is being drained.
LOOK_S = 0.5
#: Threads that are named while they are waited for.
NAMED = 5


@click.group()
def hosts() -> None:
    """List the machines, and take one out for a while."""


@hosts.command()
@json_option
@config_option
def ls(as_json: bool, config_file: Path | None) -> None:
    """List the machines, with what runs on each."""
    from fleet.cli.status import hosts_listing
    from fleet.status import gather

    config, _ = found_config(config_file)
    found = asyncio.run(gather(config))["hosts"]
    if as_json:
        click.echo(json.dumps(found))
    else:
        make_console().print(hosts_listing(found))


@hosts.command()
@click.argument("name")
@click.option("--wait/--no-wait", default=True, help="Wait until it is safe to reboot.")
@config_option
def drain(name: str, wait: bool, config_file: Path | None) -> None:
    """Let the turns on the machine NAME end, and begin none there. Ctrl-C ends the waiting, not the draining."""
    from fleet.hosts import Hosts
    from fleet.status import under_way

    config, _ = found_config(config_file)
    _on_host(config, name, lambda store: Hosts(store).drain(name))
    if not wait:
        click.echo(plain(f"{name} begins no turn any more."))
        return
    console = make_console(stderr=True)
    with console.status("") as shown:
        while threads := _on_host(config, name, lambda store: under_way(store, name)):
            more = f" and {len(threads) - NAMED} more" if len(threads) > NAMED else ""
            shown.update(plain(f"{name} begins no turn any more; under way: {', '.join(threads[:NAMED])}{more}"))
            time.sleep(LOOK_S)
    click.echo(plain(f"{name} is drained: it is safe to reboot. `fleet hosts undrain {name}` lets turns begin again."))


@hosts.command()
@click.argument("name")
@config_option
def undrain(name: str, config_file: Path | None) -> None:
    """Let turns begin again on the machine NAME."""
    from fleet.hosts import Hosts

    config, _ = found_config(config_file)
    _on_host(config, name, lambda store: Hosts(store).undrain(name))
    click.echo(plain(f"{name} takes turns again."))


def _on_host(config: FleetConfig, name: str, work: Callable[[Store], Awaitable[T]]) -> T:
    """Do `work` on Redis, if the host `name` is one that ever registered.

    Raises:
        FleetError: `host_unknown`, `redis_unreachable`, or `config_invalid` when it is not known where Redis is.
    """
    from fleet.errors import FleetError
    from fleet.hosts import Hosts
    from fleet.reach import redis_errors
    from fleet.status import opened_store

    async def run() -> T:
        store = opened_store(config)
        try:
            async with redis_errors(str(config.redis.url)):
                known = [host.name for host in await Hosts(store).all()]
                if name not in known:
                    there = ", ".join(known) or "none"
                    raise FleetError("host_unknown", f"{name!r} is no host that was ever up; there are: {there}")
                return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())
