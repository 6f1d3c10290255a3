"""The domain as an operator's command uses it. It gives no nudges: workers find in Redis what it leaves there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fleet.config import FleetConfig, read_environment
from fleet.context import Fleet
from fleet.credentials import api_key, signing_key
from fleet.platform.client import PlatformClient
from fleet.record import Record
from fleet.redaction import Redactor, secrets_of
from fleet.refs import ThreadRef
from fleet.signing import Seal
from fleet.status import opened_store


class NoNudges:
    """`fleet.context.Nudges` that nobody gets: what waits is noticed at the next poll or reconcile."""

    async def poll_sessions(self, names: list[str]) -> None:
        """Do nothing."""

    async def activate(self, ref: ThreadRef) -> None:
        """Do nothing."""

    async def ingest(self, ref: ThreadRef) -> None:
        """Do nothing."""

    async def start_thread(self, record: Record) -> None:
        """Do nothing."""

    async def run_turn(self, record: Record) -> None:
        """Do nothing."""

    async def finish_turn(self, record: Record) -> None:
        """Do nothing."""

    async def post_items(self, ref: ThreadRef) -> None:
        """Do nothing."""


@asynccontextmanager
async def operated(config: FleetConfig, environ: Mapping[str, str]) -> AsyncIterator[Fleet]:
    """Open the fleet's services, as the worker's user. Nothing is connected before it is used.

    Raises:
        ConfigError: `config_invalid`, it is not known where Redis is; `key_missing` and what else a key may lack.
    """
    key, signing = api_key(environ, Path.home()), signing_key(environ)
    fleet = Fleet(
        config,
        read_environment(environ),
        opened_store(config),
        PlatformClient(config.platform.url, key),
        NoNudges(),
        agents=frozenset(),
        bundled=frozenset(),
        redactor=Redactor(secrets_of(config, key, signing)),
        seal=Seal(signing),
    )
    try:
        yield fleet
    finally:
        await fleet.close()
