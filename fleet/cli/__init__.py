"""The `fleet` command.

Modules here import click at their top and the rest where it is used, so that `fleet --help` is there at once.
"""

from fleet.cli.app import main

__all__ = ["main"]
