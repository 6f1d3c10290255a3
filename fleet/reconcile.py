"""Level-triggered repair: whatever stands still is nudged again.

Every change that leaves something outstanding puts its thread on the session's list `attention` with the time when to
look. Looking is cheap and harmless, since a nudge too many changes nothing.
"""

from __future__ import annotations

import logging

from fleet import lifecycle
from fleet.context import Fleet
from fleet.refs import ThreadRef

log = logging.getLogger(__name__)

#: Threads of one session that are looked at in one round; the others are looked at in the next.
THREADS_PER_ROUND = 500
#: ms until a thread is looked at again after it was nudged: the first time, and at most, when it still stands.
#: A turn may wait for a place for hours, and each nudge is a message in the queue.
AGAIN_MS, AGAIN_MAX_MS = 10_000, 300_000


async def reconcile(fleet: Fleet) -> None:
    """Look at every thread whose time has come, and give the nudges that it is waiting for."""
    for session in set((await fleet.store.hash(fleet.store.key("sections"))).values()):
        await _reconcile_session(fleet, session)


async def host_came(fleet: Fleet) -> None:
    """Look again at every thread that waits for a host."""
    for session in set((await fleet.store.hash(fleet.store.key("sections"))).values()):
        for record in await fleet.records.all(session):
            if record.step == "wait_host" or (record.live and record.host == fleet.host):
                await lifecycle.dispatch(fleet, record)


async def _reconcile_session(fleet: Fleet, session: str) -> None:
    if await fleet.at(session) is None:
        return
    keys = fleet.store.session(session)
    now = await fleet.store.now_ms()
    rows = await fleet.store.scores(keys.attention, until=now, limit=THREADS_PER_ROUND)
    if not rows:
        return
    due = await fleet.store.hash(keys.due)
    for alias, score in rows.items():
        ref = ThreadRef(session, alias)
        if await _nudge(fleet, ref, due):
            standing = await fleet.store.redis.hincrby(keys.standing, ref.alias, 1)
            pause = min(AGAIN_MS * 2 ** (standing - 1), AGAIN_MAX_MS)
            await fleet.store.redis.zadd(keys.attention, {ref.alias: now + pause}, gt=True)
        else:
            await fleet.store.redis.hdel(keys.standing, ref.alias)
            await fleet.store.run("attention_settle", [keys.attention], [ref.alias, f"{score:.0f}"])


async def _nudge(fleet: Fleet, ref: ThreadRef, due: dict[str, str]) -> bool:
    """Give a thread the nudges it is waiting for; return whether anything is outstanding."""
    outstanding = False
    if f"object {ref.alias}" in due:
        await fleet.nudges.activate(ref)
        outstanding = True
    if any(name.startswith(f"item {ref.alias} ") for name in due):
        await fleet.nudges.ingest(ref)
        outstanding = True
    if await fleet.store.journal_depth(ref):
        await fleet.nudges.post_items(ref)
        outstanding = True
    record = await fleet.records.read(ref)
    if record.step in ("", "end"):
        return outstanding
    waits = record.step != "idle" or bool(record.stop)
    if record.step == "idle":
        await lifecycle.advance(fleet, ref)
    elif not await fleet.leases.held(record):
        log.info("%s stands still in step %s: nudged", ref, record.step)
        await lifecycle.dispatch(fleet, record)
    return outstanding or waits
