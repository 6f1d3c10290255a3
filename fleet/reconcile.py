"""Level-triggered repair: whatever stands still is nudged again.

Every change that leaves something outstanding puts its thread on one of the session's lists, with the time when to
look: `attention` for its step and its journal, `due_at` for what was noticed and is not handled. Looking is cheap and
harmless, since a nudge too many changes nothing.
"""

from __future__ import annotations

import logging

from fleet import lapse, lifecycle
from fleet.context import Fleet
from fleet.errors import FleetError
from fleet.refs import ThreadRef

log = logging.getLogger(__name__)

#: Threads of one session that are looked at in one round; the others are looked at in the next.
THREADS_PER_ROUND = 500
#: ms until a thread is looked at again after it was nudged. Twice as long each time while it still stands, for the
#: nudge may have been lost, or the platform may be away; but no longer than `AGAIN_MAX_MS`, or `WAITING_MAX_MS` where
#: it waits for a host or for a place, which may take hours: each nudge is a message in the queue.
AGAIN_MS, AGAIN_MAX_MS, WAITING_MAX_MS = 10_000, 20_000, 300_000


async def reconcile(fleet: Fleet) -> None:
    """Look at every thread whose time has come, and give the nudges that it is waiting for."""
    for session in set((await fleet.store.hash(fleet.store.key("sections"))).values()):
        await _reconcile_session(fleet, session)


async def host_came(fleet: Fleet) -> None:
    """Look again at every thread that waits for a host, or that this one knows more of than Redis does."""
    for session in set((await fleet.store.hash(fleet.store.key("sections"))).values()):
        for record in await fleet.records.all(session):
            if record.step in lapse.NOT_HELD and await lapse.recovered(fleet, record):
                await lifecycle.dispatch(fleet, await fleet.records.read(record.ref))
            elif record.step == "wait_host" or (record.live and record.host == fleet.host):
                await lifecycle.dispatch(fleet, record)


async def _reconcile_session(fleet: Fleet, session: str) -> None:
    if await fleet.at(session) is None:
        return
    keys = fleet.store.session(session)
    now = await fleet.store.now_ms()
    overdue = await fleet.store.scores(keys.due_at, until=now, limit=THREADS_PER_ROUND)
    due = await fleet.store.hash(keys.due) if overdue else {}
    for alias, score in overdue.items():
        again_ms = await _nudge_due(fleet, ThreadRef(session, alias), due)
        await _look_again(fleet, keys.due_at, alias, score, "due ", again_ms)
    standing = await fleet.store.scores(keys.attention, until=now, limit=THREADS_PER_ROUND)
    hosts = await fleet.hosts.all() if standing else []
    away = {host.name for host in hosts if not host.alive}
    full = {host.name for host in hosts if not host.takes_turns or host.free <= 0}
    for alias, score in standing.items():
        again_ms = await _nudge_step(fleet, ThreadRef(session, alias), away, full)
        await _look_again(fleet, keys.attention, alias, score, "", again_ms)


async def _look_again(fleet: Fleet, key: str, alias: str, score: float, kind: str, at_most_ms: int) -> None:
    """Set when a thread is looked at again, later each time; or, with 0, strike it off the list `key`."""
    standing = key.rpartition(":")[0] + ":standing"
    if at_most_ms:
        times = await fleet.store.redis.hincrby(standing, kind + alias, 1)
        pause_ms = min(AGAIN_MS * 2 ** min(times - 1, 8), at_most_ms)
        await fleet.store.redis.zadd(key, {alias: await fleet.store.now_ms() + pause_ms}, gt=True)
    else:
        await fleet.store.redis.hdel(standing, kind + alias)
        await fleet.store.run("attention_settle", [key], [alias, f"{score:.0f}"])


async def _nudge_due(fleet: Fleet, ref: ThreadRef, due: dict[str, str]) -> int:
    """Give the nudges for what is due on a thread; return in how many ms, at most, they are given again."""
    changed = f"object {ref.alias}" in due
    said = f"list {ref.alias}" in due or any(name.startswith(f"item {ref.alias} ") for name in due)
    drained = f"journal {ref.alias}" in due
    if changed:
        await fleet.nudges.activate(ref)
    if said:
        await fleet.nudges.ingest(ref)
    if drained:
        await fleet.nudges.post_items(ref)
    return AGAIN_MAX_MS if changed or said or drained else 0


async def _nudge_step(fleet: Fleet, ref: ThreadRef, away: set[str], full: set[str]) -> int:
    """Give a thread the nudge that its step is waiting for; return as `_nudge_due`.

    On a host of `full` no turn can begin now. One that is `away` looks by itself when it comes.
    """
    journal = await fleet.store.journal_depth(ref) > 0
    if journal:
        await fleet.nudges.post_items(ref)
    try:
        record = await fleet.records.read(ref)
    except FleetError as error:
        log.warning("%s is left to others: %s", ref, error)
        return WAITING_MAX_MS
    if record.step in ("", "end"):
        return AGAIN_MAX_MS if journal else 0
    if record.step == "idle":
        await lifecycle.advance(fleet, ref)
        return AGAIN_MAX_MS if journal or record.stop else 0
    if record.host not in away and not await fleet.leases.held(record):
        log.info("%s stands still in step %s: nudged", ref, record.step)
        await lifecycle.dispatch(fleet, record)
    waits = record.step == "wait_host" or record.host in full
    return WAITING_MAX_MS if waits and not journal else AGAIN_MAX_MS
