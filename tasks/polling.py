"""`fleet.poll` and `fleet.poll_sessions`: from the platform's events to what is due."""

from __future__ import annotations

from fleet.celery import tick_s
from fleet.context import Fleet
from fleet.sections import due_sections, poll_sections
from tasks.runtime import run, task

#: Sections that one task polls at once.
SHARD = 50
#: Part of a tick for which the first beat that ticks keeps others out: a spare beat does no harm.
TICK_GATE = 0.7


@task("fleet.poll")
def poll() -> None:
    """Hand out the sections whose time has come."""

    async def work(fleet: Fleet) -> None:
        gate_ms = int(tick_s(fleet.config) * 1000 * TICK_GATE)
        if not await fleet.store.redis.set(fleet.store.key("tick", "poll"), "1", nx=True, px=gate_ms):
            return
        due = await due_sections(fleet)
        for first in range(0, len(due), SHARD):
            await fleet.nudges.poll_sessions(due[first : first + SHARD])

    run(work)


@task("fleet.poll_sessions")
def poll_sessions(names: list[str]) -> None:
    """Read the events of the sections `names`."""
    run(lambda fleet: poll_sections(fleet, [name for name in names if isinstance(name, str)]))
