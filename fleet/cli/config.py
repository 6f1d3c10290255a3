"""`fleet config …`: the configuration in force, and the reference of all that there is to configure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from fleet.cli.options import config_option, found_config, json_option

if TYPE_CHECKING:
    from fleet.config import FleetConfig


@click.group()
def config() -> None:
    """Look at the configuration, and at what there is to configure."""


@config.command()
@json_option
@config_option
def show(as_json: bool, config_file: Path | None) -> None:
    """Show the configuration in force, without its secrets."""
    import yaml

    values = without_secrets(found_config(config_file)[0])
    text = json.dumps(values) if as_json else yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    click.echo(text.rstrip())


@config.command()
def reference() -> None:
    """Print the reference of all keys and variables, as Markdown."""
    from fleet.config_reference import reference as page

    click.echo(page(), nl=False)


def without_secrets(config: FleetConfig) -> dict[str, Any]:
    """Return a configuration as its file has it, with Redis's password and the agents' variables hidden."""
    from fleet.redaction import REDACTED

    values = config.model_dump(mode="json")
    if config.redis.url:
        parts = urlsplit(config.redis.url)
        _, credentials, place = parts.netloc.rpartition("@")
        hidden = (f"{REDACTED}@" if credentials else "", f"?{REDACTED}" if parts.query else "")
        values["redis"]["url"] = f"{parts.scheme}://{hidden[0]}{place}{parts.path}{hidden[1]}"
    for agent in values["agents"].values():
        agent["env"] = dict.fromkeys(agent["env"], REDACTED)
    return values
