"""The journal: an ordered outbox per thread of everything that the platform must still be told.

Entries are of three kinds: `item` (post into the thread), `audit` (post into the section's worker thread) and `state`
(write `instance.state` into the envelope). They are carried out strictly in order by one drainer (`fleet.drain`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from redis.exceptions import RedisError

from fleet.leases import Lease
from fleet.record import Record
from fleet.redaction import Redactor
from fleet.refs import ThreadRef, post_id
from fleet.store import Store

Kind = Literal["item", "audit", "state"]
Json = dict[str, Any]

#: Idempotency keys that are remembered per thread. A cause repeats within minutes, or after a lost Redis.
CAUSES_KEPT = 1000
#: Entries and bytes from which on a turn stops reading its agent until the journal has drained.
DEPTH_LIMIT = 1000
BYTES_LIMIT = 16 * 1024 * 1024
#: Life of a drainer's lease in ms, and how often it is renewed in it: a thread is silent for as long after a crash.
DRAIN_TTL_MS, DRAIN_RENEWALS = 10_000, 4


@dataclass(frozen=True, slots=True)
class Draft:
    """Something to be told to the platform. `body`: an item ({content, metadata}), or {"state", "epoch"}."""

    kind: Kind
    body: Json


@dataclass(frozen=True, slots=True)
class Entry:
    """The head of a journal.

    Fields:
        again: an earlier drainer may have posted it already.
        since: Redis time in ms from which on Redis forgot nothing; what was posted before, it may have forgotten.
        since_ms: ms that have passed since then.
    """

    id: str
    kind: str
    post_id: str
    body: Json
    again: bool
    since: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class Numbered:
    """A turn's item: its number in the turn, its idempotency key, and the stamped item as JSON."""

    n: int
    post_id: str
    body: str


@dataclass(frozen=True, slots=True)
class Appended:
    """The answer to an append: the last number taken (None: the lease is not ours any more), and the journal's size."""

    last: int | None
    depth: int
    bytes: int
    idle: bool

    @property
    def full(self) -> bool:
        """Whether the turn must wait for the drainer."""
        return self.depth >= DEPTH_LIMIT or self.bytes >= BYTES_LIMIT


def item_draft(item: Json) -> Draft:
    """Return a draft that posts `item` into the thread."""
    return Draft("item", item)


def audit_draft(item: Json) -> Draft:
    """Return a draft that posts `item` into the section's worker thread."""
    return Draft("audit", item)


def state_draft(state: Literal["active", "failed"], epoch: int, *, force: bool = False) -> Draft:
    """Return a draft that writes the envelope's state, unless a newer epoch has been claimed by then.

    Without `force` it is written only where the envelope says `pending` or `active`.
    """
    return Draft("state", {"state": state, "epoch": epoch, "force": force})


def stamped(item: Json, key: str) -> Json:
    """Return `item` with its `post_id`, the key of its idempotence (protocol §4)."""
    return {**item, "metadata": {**item["metadata"], "post_id": key}}


class Journal:
    """Appends to journals and hands out their heads."""

    def __init__(self, store: Store, redactor: Redactor) -> None:
        self._store = store
        self._redactor = redactor

    def _keys(self, ref: ThreadRef) -> tuple[str, str, str, str]:
        keys = self._store.thread(ref)
        return keys.journal, keys.journal_meta, keys.drain, keys.session.attention

    async def append(self, lease: Lease, turn: int, items: Sequence[Numbered], *, again: bool = False) -> Appended:
        """Append a turn's items as the holder of its lease. Idempotent in the numbers.

        `again`: they may have been appended before, and even posted, by what a Redis knew that has forgotten it.
        """
        record = lease.record
        keys = self._store.thread(record.ref)
        args: list[str | int] = [record.ref.alias, str(record.epoch), lease.token, turn, "1" if again else ""]
        for item in items:
            args += [item.n, item.post_id, item.body]
        last, depth, size, idle = await self._store.run(
            "journal_append", [keys.record, keys.lease, *self._keys(record.ref)], args
        )
        return Appended(None if last < 0 else last, depth, size, bool(idle))

    async def last_of(self, record: Record) -> int:
        """Return the number of the last item that was taken from the turn of `record`; 0 when none was."""
        meta = await self._store.hash(self._store.thread(record.ref).journal_meta)
        epoch, turn = str(record.epoch), str(record.turn)
        return int(meta["n"]) if (meta.get("epoch", epoch), meta.get("turn")) == (epoch, turn) else 0

    async def append_once(self, ref: ThreadRef, cause: str, *drafts: Draft, epoch: int | None = None) -> bool:
        """Append drafts that no turn numbers, once for each `cause`.

        Parameters:
            epoch: refuse when the record is of another epoch by now.

        Returns:
            Whether a drainer must be called.
        """
        args: list[str | int] = [ref.alias, "" if epoch is None else str(epoch), cause, CAUSES_KEPT]
        for index, draft in enumerate(drafts):
            key = (draft.body.get("metadata") or {}).get("post_id") or post_id(ref, cause, index)
            body = draft.body if draft.kind == "state" else stamped(draft.body, key)
            args += [draft.kind, key, self._redactor.json(json.dumps(body))]
        keys = self._store.thread(ref)
        _, call = await self._store.run("journal_append_once", [keys.record, keys.causes, *self._keys(ref)], args)
        return bool(call)

    async def was_appended(self, ref: ThreadRef, cause: str) -> None:
        """Note a cause whose drafts are stored already, so that they are not appended again."""
        now = await self._store.now_ms()
        await self._store.redis.zadd(self._store.thread(ref).causes, {cause: now}, nx=True)

    async def waiting(self, ref: ThreadRef) -> set[str]:
        """Return the `post_id`s of what waits in a thread's journal."""
        rows = cast("list[tuple[str, Json]]", await self._store.redis.xrange(self._store.thread(ref).journal))
        return {fields["post_id"] for _, fields in rows}

    async def begin(self, ref: ThreadRef) -> tuple[str, Entry | None] | None:
        """Become the drainer of a thread.

        Returns:
            A token and the first entry (None: nothing waits, and the lease is given up), or None when somebody else
            is draining.
        """
        token = secrets.token_hex(16)
        answer = await self._next(ref, token, "", "")
        return None if answer == "busy" else (token, answer)

    async def stored(self, ref: ThreadRef, token: str, entry: Entry, item_id: str = "") -> Entry | None:
        """Take away an entry that the platform has stored as `item_id`, and return the next one.

        Returns None when nothing waits any more, or when the drainer was replaced: in both cases it is done.
        """
        answer = await self._next(ref, token, entry.id, item_id)
        return None if answer == "busy" else answer

    async def keep(self, ref: ThreadRef, token: str) -> None:
        """Keep a drainer's lease alive; return when it must be given up: somebody else has it, or may have it soon.

        Without an answer of Redis for two thirds of its life it counts as lost.
        """
        lease = self._store.thread(ref).drain
        clock = asyncio.get_running_loop().time
        life_s = DRAIN_TTL_MS / 1000
        renewed = clock()
        while clock() < renewed + life_s * 2 / 3:
            await asyncio.sleep(life_s / DRAIN_RENEWALS)
            asked = clock()
            with suppress(RedisError, OSError):
                async with asyncio.timeout_at(renewed + life_s * 2 / 3):
                    if not await self._store.run("extend_lease", [lease], [token, DRAIN_TTL_MS]):
                        return
                renewed = asked

    async def release(self, ref: ThreadRef, token: str) -> None:
        """Stop draining with entries left."""
        await self._store.run("release_lease", [self._store.thread(ref).drain], [token])

    async def _next(self, ref: ThreadRef, token: str, entry_id: str, item_id: str) -> Entry | Literal["busy"] | None:
        keys = self._store.thread(ref)
        answer = await self._store.run(
            "drain_next",
            [keys.drain, keys.journal, keys.journal_meta, keys.session.ours, keys.session.due, keys.session.due_at],
            [token, DRAIN_TTL_MS, entry_id, item_id, ref.alias],
        )
        if answer[0] != "entry":
            return None if answer[0] == "empty" else "busy"
        _, id_, kind, key, body, again, since, since_ms = answer
        return Entry(id_, kind, key, json.loads(body), again == "1", int(since), since_ms)
