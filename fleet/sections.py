"""Sections: the sessions that the fleet serves. Each is attached, read event by event, and now and then compared whole.

Key `NS:sections` (hash): section name → session id, written when the section is attached. Key `NS:poll` (sorted set):
section name → Redis time in ms when it is due; written by whoever polls it. Key `NS:{SESSION}:section:NAME` (hash):
`cursor` (created_at of the newest event read, as JSON), `resync_at` and `refresh_at` (ms), `resync_from` (alias where
the next comparison goes on); its one writer is the holder of the section's lock.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from fleet import metrics
from fleet.activation import verdict
from fleet.aliases import is_alias
from fleet.attach import (
    DETACHED,
    StandDownError,
    attach,
    refresh,
    resolve,
    stand_down,
    stand_down_of,
)
from fleet.config import SectionConfig
from fleet.context import Fleet
from fleet.envelope import WORKER_ALIAS, parse
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
#: Events after which a session may not be open any more.
SESSION_ENDS = frozenset({"session_closing", "session_closed", "session_deleting", "session_deleted"})
#: Slack in ms within which a section counts as due, so that a tick that is a little early does not skip it.
DUE_SLACK_MS = 20
#: Life of a section's lock in ms, and how often it is renewed in it: the section is not polled for as long after a
#: crash. What a poller without the lock has read is not committed.
LOCK_MS, LOCK_RENEWALS = 15_000, 3
#: ms for which event ids are remembered after they were last seen: longer than any overlap.
EVENTS_KEPT_MS = 600_000
#: ms until what became due is nudged again.
DUE_PATIENCE_MS = 5000
#: ms for which ids of our own items are remembered, so that their events cost nothing.
OURS_KEPT_MS = 600_000
#: ms until a section that stands down is looked at again.
REFUSED_PAUSE_MS = 30_000
#: ms between two writes of `last_seen_at` into the worker object.
REFRESH_MS = 300_000
#: Threads compared with their records in one resync; more go on in the next one.
RESYNC_THREADS = 500
#: Reads of one section that are under way at once.
READS_AT_ONCE = 8


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
    polling = fleet.config.polling
    result = "retrying"
    try:
        with metrics.POLL_SECONDS.labels(fleet.host).time():
            busy = await _poll(fleet, section)
    except TransientError as error:
        failures = await fleet.store.redis.hincrby(_state_key(fleet, section), "failures", 1)
        pause_ms = min(polling.interval_idle_ms * 2**failures, polling.backoff_max_ms)
        await _note_state(fleet, section, "retrying", str(error))
    except PlatformError as error:
        pause_ms = REFUSED_PAUSE_MS
        await _note_state(fleet, section, "retrying", str(error))
    except StandDownError as error:
        result = "down"
        pause_ms = REFUSED_PAUSE_MS
        await _note_state(fleet, section, error.state, error.reason)
    else:
        result = "read"
        active_ms = min(polling.interval_idle_ms, polling.interval_active_ms, BUSY_INTERVAL_MAX_MS)
        pause_ms = active_ms if busy else polling.interval_idle_ms
    metrics.POLLS.labels(fleet.host, result).inc()
    await fleet.store.redis.zadd(fleet.store.key("poll"), {section.name: started + pause_ms})


def _state_key(fleet: Fleet, section: SectionConfig) -> str:
    return fleet.store.key("section-state", section.name)


async def _note_state(fleet: Fleet, section: SectionConfig, state: str, reason: str) -> None:
    before = await fleet.store.hash(_state_key(fleet, section))
    if (before.get("state"), before.get("reason")) != (state, reason):
        log.log(
            logging.INFO if state == "attached" else logging.WARNING, "section %s: %s %s", section.name, state, reason
        )
    await fleet.store.put(_state_key(fleet, section), {"state": state, "reason": reason})


async def _poll(fleet: Fleet, section: SectionConfig) -> bool:
    """Poll a section once; return whether a thread of it has something under way.

    Raises:
        StandDownError: it can't be served as things are.
        PlatformError: the platform did not answer.
    """
    before = await fleet.store.hash(_state_key(fleet, section))
    if before.get("state") == DETACHED:
        raise StandDownError(DETACHED, before["reason"])
    known_session = await fleet.store.redis.hget(fleet.store.key("sections"), section.name)
    session = str(known_session) if known_session else (await _resolved(fleet, section)).session_id
    keys = fleet.store.session(session)
    token = secrets.token_hex(16)
    if not await fleet.store.redis.set(keys.lock(section.name), token, nx=True, px=LOCK_MS):
        return True
    keeper = asyncio.create_task(_keep(fleet, keys.lock(section.name), token))
    try:
        return await _poll_locked(fleet, section, session, token)
    except RefusedError as error:
        standing_down = stand_down_of(error)
        await stand_down(fleet, session, standing_down)
        raise standing_down from error
    except StandDownError as error:
        await stand_down(fleet, session, error)
        raise
    finally:
        keeper.cancel()
        await fleet.store.run("release_lease", [keys.lock(section.name)], [token])


async def _keep(fleet: Fleet, lock: str, token: str) -> None:
    """Keep a section's lock alive, until cancelled."""
    while True:
        await asyncio.sleep(LOCK_MS / 1000 / LOCK_RENEWALS)
        with suppress(RedisError):
            await fleet.store.run("extend_lease", [lock], [token, LOCK_MS])


async def _resolved(fleet: Fleet, section: SectionConfig) -> SessionRef:
    try:
        return await resolve(fleet, section)
    except RefusedError as error:
        raise stand_down_of(error) from error


async def _poll_locked(fleet: Fleet, section: SectionConfig, session: str, token: str) -> bool:
    keys = fleet.store.session(session)
    at = await fleet.at(session)
    if at is None:
        at = await resolve(fleet, section)
        await attach(fleet, section, at)
    known = await fleet.store.hash(keys.section(section.name))
    if not known:
        newest = await fleet.platform.newest_event(at)
        known = {"cursor": json.dumps(newest.get("created_at") if newest else None)}
        await fleet.store.put(keys.section(section.name), known)
    poller = Poller(fleet, section, at, token)
    await poller.read_events(json.loads(known["cursor"]))
    read_ms = await _now_and_then(fleet, poller, known)
    await fleet.store.put(_state_key(fleet, section), {"failures": "0", "read_ms": str(read_ms)})
    await _note_state(fleet, section, "attached", "")
    return bool(await fleet.store.redis.zcard(keys.attention))


async def _now_and_then(fleet: Fleet, poller: Poller, known: dict[str, str]) -> int:
    """Do what is done every `polling.resync_s`, and every `REFRESH_MS`. Returns when it was decided, in Redis time."""
    now = await fleet.store.now_ms()
    key = poller.keys.section(poller.section.name)
    if now >= int(known.get("resync_at", "0")):
        await poller.resync(known.get("resync_from", ""))
        await fleet.store.put(key, {"resync_at": str(now + int(fleet.config.polling.resync_s * 1000))})
        await fleet.store.redis.zremrangebyscore(poller.keys.ours, "-inf", now - OURS_KEPT_MS)
    if now >= int(known.get("refresh_at", "0")):
        await refresh(fleet, poller.at)
        await fleet.store.put(key, {"refresh_at": str(now + REFRESH_MS)})
    return now


class Poller:
    """Reads one attached section, as the holder of its lock."""

    def __init__(self, fleet: Fleet, section: SectionConfig, at: SessionRef, token: str) -> None:
        self._fleet = fleet
        self.section = section
        self.at = at
        self._token = token
        self.keys = fleet.store.session(at.session_id)

    async def read_events(self, cursor: str | int | float | None) -> None:
        """Read the events behind `cursor`, a little before it, and make due what they name."""
        since = overlapped(cursor) if cursor is not None else None
        async for page in self._fleet.platform.events(self.at, since):
            if page:
                if any(_ends_attachment(event) for event in page):
                    await resolve(self._fleet, self.section)
                    await refresh(self._fleet, self.at)
                await self._commit([self._noticed(event) for event in page], page[-1].get("created_at"))

    def _noticed(self, event: Json) -> Noticed:
        id_ = str(event.get("id", ""))
        alias = _alias(event)
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
        return alias != WORKER_ALIAS and alias.startswith(self.section.session.session_prefix)

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
        keys, name = self.keys, self.section.name
        answer = await self._fleet.store.run(
            "section_commit",
            [keys.section(name), keys.lock(name), keys.events(name), keys.due, keys.due_at],
            args,
        )
        if answer == ["lost"]:
            raise TransientError("the poll took longer than its lock lives")
        for kind, alias in zip(answer[::2], answer[1::2], strict=True):
            ref = ThreadRef(self.at.session_id, alias)
            await (self._fleet.nudges.activate(ref) if kind == "object" else self._fleet.nudges.ingest(ref))

    async def _echoes(self, noticed: list[Noticed]) -> set[str]:
        """Return the ids of items that we stored ourselves."""
        ids = [one.item for one in noticed if one.item]
        if not ids:
            return set()
        scores = await self._fleet.store.redis.zmscore(self.keys.ours, ids)
        return {id_ for id_, score in zip(ids, scores, strict=True) if score is not None}

    async def resync(self, begin: str) -> None:
        """Compare the envelopes of the section's threads with their records, and make due those that differ.

        `begin` is the alias where the last comparison left off.
        """
        aliases = sorted(await self._thread_aliases())
        ordered = [a for a in aliases if a > begin] + [a for a in aliases if a <= begin]
        chosen = ordered[:RESYNC_THREADS]
        records = {r.ref.alias: r for r in await self._fleet.records.all(self.at.session_id)}
        missing = records.keys() - set(aliases)
        lost = {alias for alias in missing if self._is_ours(alias) and records[alias].live}
        gone = [Noticed(f"gone {alias} {self._token}", "object", alias) for alias in lost]
        gate = asyncio.Semaphore(READS_AT_ONCE)
        noticed = await asyncio.gather(*(self._compared(gate, alias, records) for alias in chosen))
        await self._commit([*gone, *(one for one in noticed if one is not None)], None)
        if chosen:
            await self._fleet.store.redis.hset(self.keys.section(self.section.name), "resync_from", chosen[-1])

    async def _compared(self, gate: asyncio.Semaphore, alias: str, records: dict[str, Record]) -> Noticed | None:
        async with gate:
            try:
                found = await self._fleet.platform.download_object(self.at, alias)
            except RefusedError:
                return None
        value = found.get("value")
        thread = parse(value)
        if thread is None or not thread.is_ours:
            await self._fleet.store.redis.hset(self.keys.kinds, alias, "other" if thread is None else "foreign")
            return None
        record = records.get(alias) or Record(ThreadRef(self.at.session_id, alias))
        if verdict(record, thread) == "none":
            return None
        return Noticed(f"resync {alias} {self._token}", "object", alias)

    async def _thread_aliases(self) -> list[str]:
        kinds = await self._fleet.store.hash(self.keys.kinds)
        deleted = {alias for alias in kinds if self._is_ours(alias)}
        aliases: list[str] = []
        async for page in self._fleet.platform.objects(self.at, self.section.session.session_prefix):
            for row in page:
                alias, type_ = row.get("alias"), row.get("type")
                if not isinstance(alias, str) or not is_alias(alias) or not self._is_ours(alias):
                    continue
                deleted.discard(alias)
                kind = kinds.get(alias)
                if kind != "foreign" and (type_ == "thread" or (type_ is None and kind != "other")):
                    aliases.append(alias)
        if deleted:
            await self._fleet.store.redis.hdel(self.keys.kinds, *deleted)
        return aliases


def _alias(event: Json) -> object:
    """Return the alias that an event is about, at either of its two places (protocol §1)."""
    described = event.get("session_object")
    return described.get("alias", event.get("alias")) if isinstance(described, dict) else event.get("alias")


def _ends_attachment(event: Json) -> bool:
    """Whether an event may mean that the session is closed, or its worker object gone: reason to look."""
    deleted = event.get("type") == "session_object_deleted"
    return event.get("type") in SESSION_ENDS or (deleted and _alias(event) == WORKER_ALIAS)
