"""Sections: the sessions that the fleet serves. Each is attached, read event by event, and now and then compared whole.

Key `NS:sections` (hash): section name → session id, written when the section is attached. Key `NS:poll` (sorted set):
section name → Redis time in ms when it is due; written by whoever polls it. Key `NS:{SESSION}:section` (hash):
`revision_id`, `name`, `cursor` (created_at of the newest event read, as JSON), `resync_at` (ms), `resync_from` (alias
where the next comparison goes on); its one writer is the holder of the section's lock. Key `NS:section-state:NAME`
(hash): `state` (attached or waiting), `reason`, `failures`; written by whoever polls the section.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fleet import __version__, items
from fleet.activation import verdict
from fleet.aliases import is_alias
from fleet.config import SectionConfig
from fleet.context import Fleet
from fleet.envelope import WORKER_ALIAS, WorkerInstance, parse, worker_object, worker_owner
from fleet.journal import audit_draft
from fleet.platform.client import SessionRef
from fleet.platform.errors import PlatformError, RefusedError, TransientError
from fleet.platform.paging import overlapped
from fleet.record import Record
from fleet.refs import ThreadRef

log = logging.getLogger(__name__)

Json = dict[str, Any]

#: The longest interval in ms at which a section with something under way is polled: `completed` must stop a turn
#: within two seconds.
BUSY_INTERVAL_MAX_MS = 1000
#: Slack in ms within which a section counts as due, so that a tick that is a little early does not skip it.
DUE_SLACK_MS = 20
#: Life of a section's lock in ms; longer than one poll may take.
LOCK_MS = 120_000
#: ms for which event ids are remembered after they were last seen: longer than any overlap.
EVENTS_KEPT_MS = 600_000
#: ms until reconcile looks at a thread that became due.
DUE_PATIENCE_MS = 5000
#: ms for which ids of our own items are remembered, so that their events cost nothing.
OURS_KEPT_MS = 600_000
#: Seconds until a section that was refused is looked at again.
REFUSED_PAUSE_S = 30
#: Threads compared with their records in one resync; more go on in the next one.
RESYNC_THREADS = 500
#: Reads of one section that are under way at once.
READS_AT_ONCE = 8


class SectionRefusedError(Exception):
    """A section can't be served as things are; it is looked at again later."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something that a poll saw: `kind` is `object`, `item` or empty for what needs no handling."""

    id: str
    kind: str = ""
    alias: str = ""
    item: str = ""


async def due_sections(fleet: Fleet) -> list[str]:
    """Return the names of the sections whose time has come, and put off their next time: no other tick takes them."""
    key = fleet.store.key("poll")
    now = await fleet.store.now_ms()
    times = await fleet.store.scores(key)
    due = [s.name for s in fleet.config.sections if times.get(s.name, 0) <= now + DUE_SLACK_MS]
    if due:
        await fleet.store.redis.zadd(key, dict.fromkeys(due, now + fleet.config.polling.interval_idle_ms))
    return due


async def poll_sections(fleet: Fleet, names: list[str]) -> None:
    """Poll several sections at once; what goes wrong in one of them holds up no other."""
    by_name = {section.name: section for section in fleet.config.sections}
    await asyncio.gather(*(poll_section(fleet, by_name[name]) for name in names if name in by_name))


async def poll_section(fleet: Fleet, section: SectionConfig) -> None:
    """Attach a section or read its new events, and set when it is due again."""
    started = await fleet.store.now_ms()
    state_key = fleet.store.key("section-state", section.name)
    try:
        busy = await _poll(fleet, section)
    except TransientError as error:
        failures = await fleet.store.redis.hincrby(state_key, "failures", 1)
        pause_ms = min(fleet.config.polling.interval_idle_ms * 2**failures, fleet.config.polling.backoff_max_ms)
        await _note_state(fleet, section, "waiting", str(error))
    except (SectionRefusedError, PlatformError) as error:
        pause_ms = REFUSED_PAUSE_S * 1000
        await _note_state(fleet, section, "waiting", str(error))
    else:
        polling = fleet.config.polling
        active_ms = min(polling.interval_idle_ms, polling.interval_active_ms, BUSY_INTERVAL_MAX_MS)
        pause_ms = active_ms if busy else polling.interval_idle_ms
        await fleet.store.redis.hset(state_key, mapping={"state": "attached", "reason": "", "failures": 0})
    await fleet.store.redis.zadd(fleet.store.key("poll"), {section.name: started + pause_ms})


async def _note_state(fleet: Fleet, section: SectionConfig, state: str, reason: str) -> None:
    key = fleet.store.key("section-state", section.name)
    if await fleet.store.redis.hget(key, "reason") != reason:
        log.warning("section %s is %s: %s", section.name, state, reason)
    await fleet.store.redis.hset(key, mapping={"state": state, "reason": reason})


async def _poll(fleet: Fleet, section: SectionConfig) -> bool:
    """Poll a section once; return whether a thread of it has something under way."""
    session = await fleet.store.redis.hget(fleet.store.key("sections"), section.name)
    if session is None:
        at = await _resolve(fleet, section)
        session = at.session_id
    session = str(session)
    keys = fleet.store.session(session)
    token = secrets.token_hex(16)
    if not await fleet.store.redis.set(keys.lock, token, nx=True, px=LOCK_MS):
        return True
    try:
        known = await fleet.store.hash(keys.section)
        if "revision_id" not in known:
            known = await _attach(fleet, section, await _resolve(fleet, section))
        poller = Poller(fleet, section, SessionRef(known["revision_id"], session), token)
        await poller.read_events(json.loads(known.get("cursor", "null")))
        now = await fleet.store.now_ms()
        if now >= int(known.get("resync_at", "0")):
            await poller.resync(known.get("resync_from", ""))
            next_ms = now + int(fleet.config.polling.resync_s * 1000)
            await fleet.store.redis.hset(keys.section, "resync_at", str(next_ms))
            await fleet.store.redis.zremrangebyscore(keys.ours, "-inf", now - OURS_KEPT_MS)
        return bool(await fleet.store.redis.zcard(keys.attention))
    finally:
        await fleet.store.run("release_lease", [keys.lock], [token])


async def _resolve(fleet: Fleet, section: SectionConfig) -> SessionRef:
    """Return the ids of a section's revision and session (protocol §1).

    Raises:
        SectionRefusedError: the revision or session can't be worked on just now.
    """
    where = section.session
    revision = await fleet.platform.revision(where.org_id, where.blob_id, where.revision_id)
    if revision.get("phase") not in ("draft", "managed") or revision.get("status") != "ready":
        raise SectionRefusedError(f"revision {where.revision_id} is {revision.get('phase')}/{revision.get('status')}")
    found = await fleet.platform.session(str(revision["id"]), where.session_id)
    if found.get("status") != "open":
        raise SectionRefusedError(f"session {where.session_id} is {found.get('status')}")
    return SessionRef(str(revision["id"]), str(found["id"]))


async def _attach(fleet: Fleet, section: SectionConfig, at: SessionRef) -> dict[str, str]:
    """Take a session: its worker object, then the place where its events begin for us."""
    await _take_worker_object(fleet, at)
    newest = await fleet.platform.newest_event(at)
    known = {
        "revision_id": at.revision_id,
        "name": section.name,
        "cursor": json.dumps(newest.get("created_at") if newest else None),
        "resync_at": "0",
    }
    await fleet.store.put(fleet.store.session(at.session_id).section, known)
    await fleet.store.redis.hset(fleet.store.key("sections"), section.name, at.session_id)
    log.info("section %s is attached to session %s", section.name, at.session_id)
    return known


async def _take_worker_object(fleet: Fleet, at: SessionRef) -> None:
    """Claim a session for our user, or find it claimed by us (protocol §2, the worker object).

    Raises:
        SectionRefusedError: it belongs to somebody else.
    """
    own = await fleet.user_id()
    try:
        found = (await fleet.platform.download_object(at, WORKER_ALIAS)).get("value")
    except RefusedError as error:
        if error.code != "not_found":
            raise
        now = datetime.now(UTC).isoformat(timespec="seconds")
        instance = WorkerInstance(f"fleet-{fleet.host}", __version__, now, now)
        await fleet.platform.upload_object(at, WORKER_ALIAS, worker_object(own, instance))
    else:
        owner = worker_owner(found)
        if owner is None:
            raise SectionRefusedError("SECTION_WORKER_OBJECT_MALFORMED: the object `worker` is no worker object")
        if owner != own:
            raise SectionRefusedError(f"SESSION_OWNED_BY_DIFFERENT_USER: the session belongs to user {owner}")
    ref = ThreadRef(at.session_id, WORKER_ALIAS)
    cause = f"attached:{secrets.token_hex(8)}"
    if await fleet.journal.append_once(ref, cause, audit_draft(items.audit("attached"))):
        await fleet.nudges.post_items(ref)


class Poller:
    """Reads one attached section, as the holder of its lock."""

    def __init__(self, fleet: Fleet, section: SectionConfig, at: SessionRef, token: str) -> None:
        self._fleet = fleet
        self._prefix = section.session.session_prefix
        self._at = at
        self._token = token
        self._keys = fleet.store.session(at.session_id)

    async def read_events(self, cursor: str | int | float | None) -> None:
        """Read the events behind `cursor`, a little before it, and make due what they name."""
        since = overlapped(cursor) if cursor is not None else None
        async for page in self._fleet.platform.events(self._at, since):
            if page:
                await self._commit([self._noticed(event) for event in page], page[-1].get("created_at"))

    def _noticed(self, event: Json) -> Noticed:
        id_ = str(event.get("id", ""))
        described = event.get("session_object")
        alias = (described if isinstance(described, dict) else event).get("alias", event.get("alias"))
        if not isinstance(alias, str) or not is_alias(alias) or not self._is_ours(alias):
            return Noticed(id_)
        item_id = event.get("item_id")
        match event.get("type"):
            case "session_object_modified" | "session_object_deleted":
                return Noticed(id_, "object", alias)
            case "session_thread_item_posted" if isinstance(item_id, str) and item_id:
                return Noticed(id_, "item", alias, item_id)
            case _:
                return Noticed(id_)

    def _is_ours(self, alias: str) -> bool:
        return alias != WORKER_ALIAS and alias.startswith(self._prefix)

    async def _commit(self, noticed: list[Noticed], cursor: str | int | float | None) -> None:
        echoes = await self._echoes(noticed)
        args: list[str | int] = [
            self._token,
            "" if cursor is None else json.dumps(cursor),
            EVENTS_KEPT_MS,
            DUE_PATIENCE_MS,
        ]
        for one in noticed:
            args += [one.id, "" if one.item in echoes else one.kind, one.alias, one.item]
        keys = self._keys
        answer = await self._fleet.store.run(
            "section_commit", [keys.section, keys.lock, keys.events, keys.due, keys.attention], args
        )
        if answer == ["lost"]:
            raise TransientError("the poll took longer than its lock lives")
        for kind, alias in zip(answer[::2], answer[1::2], strict=True):
            ref = ThreadRef(self._at.session_id, alias)
            await (self._fleet.nudges.activate(ref) if kind == "object" else self._fleet.nudges.ingest(ref))

    async def _echoes(self, noticed: list[Noticed]) -> set[str]:
        """Return the ids of items that we stored ourselves."""
        ids = [one.item for one in noticed if one.item]
        if not ids:
            return set()
        scores = await self._fleet.store.redis.zmscore(self._keys.ours, ids)
        return {id_ for id_, score in zip(ids, scores, strict=True) if score is not None}

    async def resync(self, begin: str) -> None:
        """Compare the envelopes of the section's threads with their records, and make due those that differ.

        `begin` is the alias where the last comparison left off.
        """
        aliases = sorted(await self._thread_aliases())
        ordered = [a for a in aliases if a > begin] + [a for a in aliases if a <= begin]
        chosen = ordered[:RESYNC_THREADS]
        records = {r.ref.alias: r for r in await self._fleet.records.all(self._at.session_id)}
        gone = [Noticed(f"gone {a} {self._token}", "object", a) for a in records.keys() - set(aliases)]
        gate = asyncio.Semaphore(READS_AT_ONCE)
        noticed = await asyncio.gather(*(self._compared(gate, alias, records) for alias in chosen))
        await self._commit([*gone, *(one for one in noticed if one is not None)], None)
        if chosen:
            await self._fleet.store.redis.hset(self._keys.section, "resync_from", chosen[-1])

    async def _compared(self, gate: asyncio.Semaphore, alias: str, records: dict[str, Record]) -> Noticed | None:
        async with gate:
            try:
                found = await self._fleet.platform.download_object(self._at, alias)
            except RefusedError:
                return None
        value = found.get("value")
        thread = parse(value)
        if thread is None:
            await self._fleet.store.redis.hset(self._keys.kinds, alias, "other")
            return None
        record = records.get(alias) or Record(ThreadRef(self._at.session_id, alias))
        if verdict(record, thread) == "none":
            return None
        return Noticed(f"resync {alias} {self._token}", "object", alias)

    async def _thread_aliases(self) -> list[str]:
        kinds = await self._fleet.store.hash(self._keys.kinds)
        aliases: list[str] = []
        async for page in self._fleet.platform.objects(self._at, self._prefix):
            for row in page:
                alias, type_ = row.get("alias"), row.get("type")
                if not isinstance(alias, str) or not is_alias(alias) or not self._is_ours(alias):
                    continue
                if type_ == "thread" or (type_ is None and kinds.get(alias) != "other"):
                    aliases.append(alias)
        return aliases
