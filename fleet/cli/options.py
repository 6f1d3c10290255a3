"""What several commands share: the option `--config`, and the environment that follows from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from fleet.config import FleetConfig

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="The configuration; default: FLEET_CONFIG, else fleet.yaml.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


def found_config(config_file: Path | None) -> tuple[FleetConfig, dict[str, str]]:
    """Return the configuration in force, and the environment in which the rest is found.

    Raises:
        ConfigError: `config_*`.
    """
    from fleet.config import load_config
    from fleet.local import effective_environment

    environ = effective_environment(given_environment(config_file))
    return load_config(None, environ), environ


def given_environment(config_file: Path | None) -> dict[str, str]:
    """Return the environment of this process, in which the option `--config` wins."""
    return dict(os.environ) | ({"FLEET_CONFIG": str(config_file)} if config_file else {})


def make_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr. NO_COLOR is heeded by rich itself."""
    from rich.console import Console

    return Console(stderr=stderr)
