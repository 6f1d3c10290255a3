"""A session is ours to serve, or the section stands down: in a named state, its turns interrupted, its words waiting.

Key `NS:section-state:NAME` (hash): `state`, `reason`, `failures` (polls in a row that failed); written by whoever polls
the section, under its lock once it is attached, and by `detach`. States: `attached`; `retrying` (the platform does not
answer); any other is the name of why the section stands down.
Key `NS:{SESSION}:session` (hash): `revision_id`, sealed; `down`, the state in which it stands down, absent while it is
served.
"""

from __future__ import annotations

import logging
import secrets
from datetime import UTC, datetime

from fleet import __version__, items, lifecycle
from fleet.config import SectionConfig
from fleet.context import Fleet, revision_purpose
from fleet.envelope import WORKER_ALIAS, WorkerInstance, with_worker_instance, worker_object, worker_owner
from fleet.errors import FleetError
from fleet.journal import audit_draft
from fleet.platform.client import SessionRef
from fleet.platform.errors import AccessDeniedError, RefusedError
from fleet.record import INTERRUPTED, TURN_STEPS
from fleet.refs import ThreadRef

log = logging.getLogger(__name__)

#: The state of a section whose worker object was deleted: only a person attaches it again.
DETACHED = "detached"
#: Refusals of the platform that are states of a section by themselves (protocol §1); others are `refused`.
NAMED_REFUSALS = frozenset({"session_not_open", "revision_not_writable", "revision_not_ready", "revision_not_found"})


class StandDownError(Exception):
    """A section can't be served as things are. `state` names why."""

    def __init__(self, state: str, reason: str) -> None:
        self.state = state
        self.reason = reason
        super().__init__(f"{state}: {reason}")


def stand_down_of(error: RefusedError) -> StandDownError:
    """Return the state that a refusal of the platform puts a section into."""
    if isinstance(error, AccessDeniedError):
        return StandDownError("access_lost", str(error))
    return StandDownError(error.code if error.code in NAMED_REFUSALS else "refused", str(error))


async def resolve(fleet: Fleet, section: SectionConfig) -> SessionRef:
    """Return the ids of a section's revision and session (protocol §1), where both can be worked on.

    Raises:
        StandDownError: they can't.
        PlatformError: the platform did not answer, or refused.
    """
    where = section.session
    revision = await fleet.platform.revision(where.org_id, where.blob_id, where.revision_id)
    if revision.get("phase") not in ("draft", "managed"):
        raise StandDownError("revision_not_writable", f"revision {where.revision_id} is {revision.get('phase')}")
    if revision.get("status") != "ready":
        raise StandDownError("revision_not_ready", f"revision {where.revision_id} is {revision.get('status')}")
    found = await fleet.platform.session(str(revision["id"]), where.session_id)
    if found.get("status") != "open":
        raise StandDownError(f"session_{found.get('status')}", f"session {where.session_id} is not open")
    return SessionRef(str(revision["id"]), str(found["id"]))


async def attach(fleet: Fleet, section: SectionConfig, at: SessionRef) -> None:
    """Take a session: its worker object says that it is ours. Threads that a stand-down interrupted go on.

    Raises:
        StandDownError: it belongs to somebody else.
    """
    await _take_worker_object(fleet, at)
    keys = fleet.store.session(at.session_id)
    await fleet.store.put(
        keys.session, {"revision_id": fleet.seal.seal(revision_purpose(at.session_id), at.revision_id)}
    )
    await fleet.store.redis.hdel(keys.session, "down")
    await fleet.store.redis.hset(fleet.store.key("sections"), section.name, at.session_id)
    await _audit(fleet, at, items.audit("attached"))
    log.info("section %s is attached to session %s", section.name, at.session_id)
    for record in await fleet.records.all(at.session_id):
        if record.stop == INTERRUPTED:
            await fleet.records.request_stop(record, "")
            await lifecycle.dispatch(fleet, await fleet.records.read(record.ref))


async def stand_down(fleet: Fleet, session: str, error: StandDownError) -> None:
    """Stop serving a session: turns are interrupted so that they can go on, open prompts and journals stay."""
    await fleet.store.put(fleet.store.session(session).session, {"down": error.state})
    for record in await fleet.records.all(session):
        if record.step in TURN_STEPS and not record.stop:
            await fleet.records.request_stop(record, INTERRUPTED)


async def detach(fleet: Fleet, name: str, reason: str) -> None:
    """Stop serving a section until `reattach`, because an operator says so; the worker thread says it too.

    Raises:
        FleetError: `session_unknown`, the section is not attached.
        PlatformError: the platform did not take the audit item.
    """
    session = await fleet.store.redis.hget(fleet.store.key("sections"), name)
    at = await fleet.at(str(session)) if session else None
    if at is None:
        raise FleetError("session_unknown", f"section {name} is not attached")
    await stand_down(fleet, at.session_id, StandDownError(DETACHED, reason))
    await fleet.store.put(fleet.store.key("section-state", name), {"state": DETACHED, "reason": reason})
    await fleet.platform.post_item(at, WORKER_ALIAS, items.audit("detached", reason=reason))


async def reattach(fleet: Fleet, name: str) -> None:
    """Let a section that was detached be attached at the next poll."""
    await fleet.store.redis.delete(fleet.store.key("section-state", name))
    await fleet.store.redis.zrem(fleet.store.key("poll"), name)


async def refresh(fleet: Fleet, at: SessionRef) -> None:
    """Write `last_seen_at` into the worker object, when it is still there and ours.

    Raises:
        StandDownError: it was deleted, or is somebody else's by now.
    """
    value = await _worker_object(fleet, at)
    if value is None:
        raise StandDownError(DETACHED, "SESSION_DETACHED_EXTERNALLY: the object `worker` was deleted")
    await _check_owner(fleet, value)
    await fleet.platform.upload_object(at, WORKER_ALIAS, with_worker_instance(value, _instance(fleet)))


async def _take_worker_object(fleet: Fleet, at: SessionRef) -> None:
    value = await _worker_object(fleet, at)
    if value is None:
        value = worker_object(await fleet.user_id(), _instance(fleet))
        await fleet.platform.upload_object(at, WORKER_ALIAS, value)
    else:
        await _check_owner(fleet, value)


async def _worker_object(fleet: Fleet, at: SessionRef) -> object | None:
    """Return the value of the worker object, None when there is none."""
    try:
        value: object = (await fleet.platform.download_object(at, WORKER_ALIAS)).get("value")
    except RefusedError as error:
        deleted = isinstance(error, AccessDeniedError) and await fleet.platform.is_open(at)
        if deleted or error.code == "not_found":
            return None
        raise
    return value


async def _check_owner(fleet: Fleet, value: object) -> None:
    owner = worker_owner(value)
    if owner is None:
        raise StandDownError("SECTION_WORKER_OBJECT_MALFORMED", "the object `worker` names no user")
    if owner != await fleet.user_id():
        raise StandDownError("SESSION_OWNED_BY_DIFFERENT_USER", f"the session belongs to user {owner}")


def _instance(fleet: Fleet) -> WorkerInstance:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return WorkerInstance(f"fleet-{fleet.host}", __version__, now, now)


async def _audit(fleet: Fleet, at: SessionRef, item: items.Item) -> None:
    ref = ThreadRef(at.session_id, WORKER_ALIAS)
    if await fleet.journal.append_once(ref, f"section:{secrets.token_hex(8)}", audit_draft(item)):
        await fleet.nudges.post_items(ref)
