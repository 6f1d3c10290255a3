"""The thread record: what the fleet knows of a thread, and the steps it goes through.

The record is a Redis hash. It has one writer at a time: whoever wins the compare-and-set on (epoch, step), and while
a step is held, the holder of its lease. An epoch is one activation; a newer one makes everything older invalid.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from fleet.errors import FleetError
from fleet.formats import FORMAT, check_format
from fleet.refs import ThreadRef
from fleet.signing import Seal, TamperedError
from fleet.store import Store

log = logging.getLogger(__name__)

Step = Literal["wait_host", "start", "idle", "run", "publish", "close", "end"]

#: Every change of step there is, by name: the steps it may come from and the step it leads to.
TRANSITIONS: dict[str, tuple[frozenset[Step], Step]] = {
    "started": (frozenset({"start"}), "idle"),
    "run_restored": (frozenset({"start"}), "run"),
    "publish_restored": (frozenset({"start"}), "publish"),
    "turn_begun": (frozenset({"idle"}), "run"),
    "turn_ran": (frozenset({"run"}), "publish"),
    "published": (frozenset({"publish"}), "close"),
    "turn_closed": (frozenset({"close"}), "idle"),
    "turn_parked": (frozenset({"run"}), "idle"),
    "failed": (frozenset({"wait_host", "start", "idle", "close"}), "end"),
    "stopped": (frozenset({"wait_host", "start", "idle", "close"}), "end"),
}

#: Steps in which a turn is under way.
TURN_STEPS: frozenset[Step] = frozenset({"run", "publish", "close"})
#: The stop of a turn that is to go on later, where it left off: its section stands down.
INTERRUPTED = "interrupted"
#: ms until reconcile looks at a thread whose next step was nudged. Longer than a busy worker needs to take a message.
NUDGE_PATIENCE_MS = 10_000
#: ms for which an ended thread is remembered, so that `fleet status` can show it and a repeated cause says nothing.
ENDED_TTL_MS = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Record:
    """A thread record as it was read.

    Fields:
        epoch: the activation; grows only. 0: there is no record.
        step: what is done or due, see `TRANSITIONS`.
        host: who owns the work folder; empty while nobody does.
        turn: number of the current or last turn, from 1.
        attempt: how often the current step `run` was begun.
        agent_session: the agent's own session id, resumed by every later turn.
        turn_items: ids of the items that the current turn was given.
        turn_newest: `created_at` of the newest of them.
        consumed_at, consumed: where the last finished turn ended: the newest item's `created_at`, and recent ids.
        stop: why the running turn should stop; empty: go on.
        outcome: how an ended thread ended: `completed`, `failed`, `removed`.
        turn_status, error: how the current turn ended.
        settings: what the turns run on; not in Redis, see `fleet.terms`.
        first: whether nothing was known of the thread before this epoch.
        forced: whether an operator started the epoch, whatever the envelope said.
        prompted: whether the agent is known to have taken the current turn's prompt.
        began_ms: Redis time when the current turn was first begun; 0 before that.
        fail_code: code with which the thread fails once the current turn is closed.
        said: number of the current turn's last item, known when the turn has ended.
        stats: tokens of the current turn and its duration in ms (protocol §4, `turn_end`).
        told: the last `instance.state` that was written to the envelope in this epoch.
    """

    ref: ThreadRef
    epoch: int = 0
    step: Step | Literal[""] = ""
    host: str = ""
    work_folder: str = ""
    agent: str = ""
    turn: int = 0
    attempt: int = 0
    agent_session: str = ""
    turn_items: tuple[str, ...] = ()
    turn_newest: str | int | float | None = None
    consumed_at: str | int | float | None = None
    consumed: tuple[str, ...] = ()
    stop: str = ""
    outcome: str = ""
    turn_status: str = ""
    error: str = ""
    stats: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    prompted: bool = False
    first: bool = False
    forced: bool = False
    said: int = 0
    began_ms: int = 0
    fail_code: str = ""
    told: str = ""

    @property
    def exists(self) -> bool:
        """Whether there is a record at all."""
        return self.epoch > 0

    @property
    def live(self) -> bool:
        """Whether the thread is with us: claimed and not ended."""
        return self.exists and self.step != "end"

    @property
    def state(self) -> str:
        """The thread's state in the envelope's words."""
        if not self.exists:
            return ""
        if self.step == "end":
            return self.outcome
        return "pending" if self.step in ("wait_host", "start") else "active"


_PLAIN = (
    "step",
    "host",
    "work_folder",
    "agent",
    "agent_session",
    "stop",
    "outcome",
    "turn_status",
    "error",
    "told",
    "fail_code",
)
_NUMBERS = ("epoch", "turn", "attempt", "said", "began_ms")
_JSON = ("turn_items", "turn_newest", "consumed_at", "consumed", "stats", "prompted", "first", "forced")


def decode(ref: ThreadRef, fields: dict[str, str], seal: Seal) -> Record:
    """Return the record that a Redis hash holds; unknown fields, of a newer release, are passed over.

    Raises:
        FleetError: `format_newer`, see `fleet.formats`.
    """
    check_format(fields.get("format"), f"the record of {ref}")
    values: dict[str, Any] = {name: fields[name] for name in _PLAIN if name in fields}
    values |= {name: int(fields[name]) for name in _NUMBERS if name in fields}
    values |= {name: json.loads(fields[name]) for name in _JSON if name in fields}
    if "agent_session" in values:
        values["agent_session"] = _opened_session(ref, values["agent_session"], seal)
    for name in ("turn_items", "consumed"):
        if name in values:
            values[name] = tuple(values[name])
    return Record(ref=ref, **values)


def _opened_session(ref: ThreadRef, sealed: str, seal: Seal) -> str:
    """Return the agent's session, which decides what the agent knows already; none when it can't be trusted."""
    try:
        return seal.open(f"agent_session {ref}", sealed)
    except TamperedError as error:
        log.warning("%s: the agent's session is forgotten: %s", ref, error)
        return ""


def encode(ref: ThreadRef, changes: dict[str, Any], seal: Seal) -> list[str]:
    """Return field, value pairs for a script."""
    if "agent_session" in changes:
        changes = changes | {"agent_session": seal.seal(f"agent_session {ref}", changes["agent_session"])}
    pairs = ["format", str(FORMAT)]
    for name, value in changes.items():
        pairs += [name, json.dumps(value) if name in _JSON else str(value)]
    return pairs


class Records:
    """Reads records and changes them, each change one compare-and-set."""

    def __init__(self, store: Store, seal: Seal | None = None) -> None:
        self._store = store
        self._seal = seal or Seal()

    async def read(self, ref: ThreadRef) -> Record:
        """Return the record of `ref`; one that does not exist has epoch 0."""
        return decode(ref, await self._store.hash(self._store.thread(ref).record), self._seal)

    async def all(self, session: str) -> list[Record]:
        """Return the records of a session's threads, by alias, but for those that only a newer release can read."""
        aliases = sorted(await self._store.members(self._store.session(session).threads))
        refs = [ThreadRef(session, alias) for alias in aliases]
        async with self._store.redis.pipeline(transaction=False) as pipe:
            for ref in refs:
                pipe.hgetall(self._store.thread(ref).record)
            rows = await pipe.execute()
        expired = [ref.alias for ref, fields in zip(refs, rows, strict=True) if not fields]
        for alias in expired:
            keys = self._store.thread(ThreadRef(session, alias))
            await self._store.run("forget_expired", [keys.session.threads, keys.record], [alias])
        found: list[Record] = []
        for ref, fields in zip(refs, rows, strict=True):
            with suppress(FleetError):
                found += [decode(ref, fields, self._seal)] if fields else []
        return found

    async def claim(
        self, seen: Record, step: Literal["start", "wait_host"], *, above: int = 0, **changes: Any
    ) -> int | None:
        """Claim the next epoch, one above `above`, if the record is still as `seen`.

        Returns the epoch, or None when the record has changed.
        """
        keys = self._store.thread(seen.ref)
        epoch = await self._store.run(
            "claim",
            [
                keys.record,
                keys.session.attention,
                keys.session.threads,
                keys.session.standing,
                keys.journal_meta,
                *keys.kept,
            ],
            [
                seen.ref.alias,
                str(seen.epoch) if seen.exists else "",
                seen.step,
                step,
                NUDGE_PATIENCE_MS,
                above,
                *encode(seen.ref, changes, self._seal),
            ],
        )
        return int(epoch) if epoch else None

    async def transition(
        self,
        record: Record,
        name: str,
        *,
        token: str = "",
        release: bool = False,
        consumed_ids: tuple[str, ...] = (),
        **changes: Any,
    ) -> bool:
        """Make the transition `name` of `TRANSITIONS` from the step that `record` shows.

        Parameters:
            token: the lease that must be held; empty: nobody may hold one.
            release: give the lease up in the same stroke.
            consumed_ids: items that leave the inbox in the same stroke.

        Returns:
            Whether it was made; False when the record is elsewhere by now.
        """
        sources, target = TRANSITIONS[name]
        if record.step not in sources:
            return False
        keys = self._store.thread(record.ref)
        outstanding = "" if target in ("idle", "end") else NUDGE_PATIENCE_MS
        done = await self._store.run(
            "transition",
            [
                keys.record,
                keys.lease,
                keys.session.attention,
                keys.inbox,
                keys.journal,
                keys.journal_meta,
                keys.session.standing,
                *keys.kept,
            ],
            [
                record.ref.alias,
                str(record.epoch),
                str(record.turn),
                record.step,
                token,
                target,
                outstanding,
                "1" if release else "",
                ENDED_TTL_MS if target == "end" else "",
                len(consumed_ids),
                *consumed_ids,
                *encode(record.ref, changes, self._seal),
            ],
        )
        return bool(done)

    async def set_held(self, record: Record, token: str, **changes: Any) -> bool:
        """Set fields as the holder of the lease `token`. Returns False when that is not the caller any more."""
        return await self._set(record, token, "", changes)

    async def request_stop(self, record: Record, reason: str) -> bool:
        """Ask the holder of the thread's turn to stop."""
        return await self._set(record, "*", NUDGE_PATIENCE_MS, {"stop": reason})

    async def set_told(self, record: Record, state: str) -> bool:
        """Note that the envelope now says `state`. Written by the drainer alone."""
        return await self._set(record, "*", "", {"told": state})

    async def _set(self, record: Record, token: str, patience_ms: int | str, changes: dict[str, Any]) -> bool:
        keys = self._store.thread(record.ref)
        return bool(
            await self._store.run(
                "set_fields",
                [keys.record, keys.lease, keys.session.attention],
                [record.ref.alias, str(record.epoch), token, patience_ms, *encode(record.ref, changes, self._seal)],
            )
        )
