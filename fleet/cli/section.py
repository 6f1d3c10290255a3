"""`fleet section …`: which sessions the fleet serves, and how an operator takes one out and back in."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from fleet.cli.options import config_option, found_config, json_option, make_console
from fleet.cli.text import plain

#: Why a section is detached when the operator says nothing else.
REASON = "detached by an operator"


@click.group()
def section() -> None:
    """Serve the sessions of the configuration, or leave them alone for a while."""


@section.command()
@json_option
@config_option
def ls(as_json: bool, config_file: Path | None) -> None:
    """List the sections, with the state of each."""
    from fleet.cli.status import sections_listing
    from fleet.status import gather

    config, _ = found_config(config_file)
    found = asyncio.run(gather(config))["sections"]
    if as_json:
        click.echo(json.dumps(found))
    else:
        make_console().print(sections_listing(found))


@section.command()
@click.argument("name")
@config_option
def attach(name: str, config_file: Path | None) -> None:
    """Serve the section NAME again, or look again now at one that stands down."""
    from fleet.attach import reattach
    from fleet.operating import operated
    from fleet.person import chosen_section
    from fleet.reach import redis_errors

    config, environ = found_config(config_file)
    name = chosen_section(config, name).name

    async def work() -> str:
        async with operated(config, environ) as fleet, redis_errors(str(config.redis.url)):
            state = await fleet.store.hash(fleet.store.key("section-state", name))
            if state.get("state") == "attached":
                return f"Section {name} is attached."
            await reattach(fleet, name)
            return f"Section {name} is attached with the next poll; `fleet section ls` shows what came of it."

    _say(asyncio.run(work()))


@section.command()
@click.argument("name")
@click.option("--reason", default=REASON, show_default=True, metavar="TEXT", help="What the worker thread says.")
@config_option
def detach(name: str, reason: str, config_file: Path | None) -> None:
    """Leave the section NAME alone until it is attached again. Its turns are interrupted, and go on then."""
    from fleet.attach import detach as detach_section
    from fleet.errors import FleetError
    from fleet.operating import operated
    from fleet.person import chosen_section
    from fleet.reach import FIRST_ANSWER_S, platform_errors, redis_errors

    config, environ = found_config(config_file)
    name = chosen_section(config, name).name

    async def work() -> None:
        async with operated(config, environ) as fleet:
            # Asked first, so that what takes too long behind it is the platform.
            async with redis_errors(str(config.redis.url)):
                await fleet.store.redis.ping()
            with platform_errors(config.platform.url):
                async with asyncio.timeout(FIRST_ANSWER_S):
                    await detach_section(fleet, name, reason)

    try:
        asyncio.run(work())
    except FleetError as error:
        if error.code not in ("platform_unreachable", "key_refused", "argument_invalid"):
            raise
        # The audit item is the last step: all but it is done.
        raise FleetError(error.code, f"section {name} is detached, but nobody was told: {error.detail}") from error
    _say(f"Section {name} is detached.")


def _say(line: str) -> None:
    click.echo(plain(line))
