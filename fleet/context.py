"""Everything a station of the way of a message works with, and the nudges it can give."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Protocol

from fleet.config import Environment, FleetConfig
from fleet.hosts import Hosts
from fleet.inbox import Inbox
from fleet.journal import Journal
from fleet.leases import Leases
from fleet.platform.client import PlatformClient, SessionRef
from fleet.prompts import Prompts
from fleet.record import Record, Records
from fleet.redaction import Redactor
from fleet.refs import ThreadRef
from fleet.signing import Seal, TamperedError
from fleet.store import Store

log = logging.getLogger(__name__)


def revision_purpose(session: str) -> str:
    """Return the purpose for which the revision of a session is sealed: whose envelopes are read decides what runs."""
    return f"revision {session}"


class Nudges(Protocol):
    """Celery messages, seen from the domain. A nudge may be lost, late or doubled: that changes only latency."""

    async def poll_sessions(self, names: list[str]) -> None:
        """Ask any worker to poll these sections."""
        ...

    async def activate(self, ref: ThreadRef) -> None:
        """Ask any worker to compare a thread's envelope with its record."""
        ...

    async def ingest(self, ref: ThreadRef) -> None:
        """Ask any worker to take in a thread's new items."""
        ...

    async def start_thread(self, record: Record) -> None:
        """Ask the thread's host to start the epoch of `record`."""
        ...

    async def run_turn(self, record: Record) -> None:
        """Ask the thread's host for the turn of `record`, and for what follows it."""
        ...

    async def finish_turn(self, record: Record) -> None:
        """Ask the thread's host to go on with the turn of `record` behind its run."""
        ...

    async def post_items(self, ref: ThreadRef) -> None:
        """Ask any worker to drain a thread's journal."""
        ...


@dataclass(slots=True)
class Fleet:
    """The services of one process and one event loop.

    `agents` are the agent types that have an adapter here, `bundled` those of them that need no configured executable.
    `seal` seals and opens what Redis keeps of what decides about agents.
    """

    config: FleetConfig
    environment: Environment
    store: Store
    platform: PlatformClient
    nudges: Nudges
    agents: frozenset[str]
    bundled: frozenset[str]
    redactor: Redactor
    seal: Seal = field(default_factory=Seal)
    records: Records = field(init=False)
    leases: Leases = field(init=False)
    journal: Journal = field(init=False)
    hosts: Hosts = field(init=False)
    inbox: Inbox = field(init=False)
    prompts: Prompts = field(init=False)
    _user_id: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.records = Records(self.store, self.seal)
        self.leases = Leases(self.store, self.config.turns.lease_s)
        self.journal = Journal(self.store, self.redactor)
        self.hosts = Hosts(self.store)
        self.inbox = Inbox(self.store, self.seal)
        self.prompts = Prompts(self.store, self.journal, self.seal)

    @property
    def host(self) -> str:
        """This machine's name."""
        return self.environment.host

    async def user_id(self) -> str:
        """Return the id of the worker's own user, whose items are echoes (protocol §3, self-filter)."""
        if not self._user_id:
            self._user_id = str((await self.platform.me())["id"])
        return self._user_id

    async def at(self, session: str) -> SessionRef | None:
        """Return where a session's data lives; None when no section is attached to it, or it stands down."""
        known = await self.store.hash(self.store.session(session).session)
        if "down" in known or "revision_id" not in known:
            return None
        try:
            return SessionRef(self.seal.open(revision_purpose(session), known["revision_id"]), session)
        except TamperedError as error:
            log.warning("where session %s lives is not known: %s", session, error)
            return None

    async def item_budget(self) -> int:
        """Return the bytes that an item may have: the configured budget, or the platform's lower cap if it is known."""
        cap = await self.store.redis.hget(self._platform_key, "item_cap")
        return min(self.config.items.budget_bytes, int(cap)) if cap else self.config.items.budget_bytes

    async def learn_item_cap(self, cap: int) -> None:
        """Remember that the platform refuses items of the budget's size (protocol §4, budget, step 5)."""
        await self.store.redis.hset(self._platform_key, "item_cap", str(cap))

    @property
    def _platform_key(self) -> str:
        """Hash: what was learned of a platform: `item_cap` in bytes; written by the drainer that was refused."""
        return self.store.key("platform", self.platform.url)

    async def add_due(self, ref: ThreadRef, kind: str, after_ms: int) -> None:
        """Make something due on a thread: `list` (its items are read again) or `journal`; nudged in `after_ms`."""
        keys = self.store.session(ref.session)
        await self.store.run("due_add", [keys.due, keys.due_at], [ref.alias, f"{kind} {ref.alias}", after_ms])

    async def due_items(self, ref: ThreadRef) -> list[str]:
        """Return the ids of a thread's items that events named and nobody has handled yet."""
        prefix = f"item {ref.alias} "
        fields = await self.store.hash(self.store.session(ref.session).due)
        return [name.removeprefix(prefix) for name in fields if name.startswith(prefix)]

    async def close(self) -> None:
        """Close all connections."""
        await self.platform.close()
        await self.store.close()
