"""The chain of a turn: `fleet.run_turn`, `fleet.publish_artifacts`, `fleet.close_turn`, on the thread's host."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import FrameType

from agents import base, process
from fleet import finish, turn
from fleet.context import Fleet
from fleet.events import Agent
from tasks.runtime import checked_number, loop, run, task, thread_ref

#: Sent to a pool process by its worker when the grace of a shutdown is over.
INTERRUPT_SIGNAL = signal.SIGUSR2


class Runtime:
    """`fleet.turn.AgentRuntime`, as the adapters of `agents` provide it."""

    def load(self, agent_type: str) -> Agent:
        """Return the adapter of an agent type."""
        return base.load(agent_type)

    def end_leftovers(self, process_file: Path, grace_s: float) -> int:
        """End what a crash left behind of an agent."""
        return process.end_leftovers(process_file, term_grace_s=grace_s)


# Acknowledged at its start: the broker would deliver it again after its visibility timeout while the turn still runs.
# Its crash safety is the lease.
@task("fleet.run_turn", acks_late=False)
def run_turn(session: str, alias: str, epoch: int, number: int) -> None:
    """Run a turn of the thread's agent."""
    ref, epoch, number = thread_ref(session, alias), checked_number(epoch), checked_number(number)
    shutdown = asyncio.Event()

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        loop().events.call_soon_threadsafe(shutdown.set)

    previous = signal.signal(INTERRUPT_SIGNAL, interrupt)
    try:
        run(lambda fleet: turn.run_turn(fleet, Runtime(), ref, epoch, number, shutdown))
    finally:
        signal.signal(INTERRUPT_SIGNAL, previous)


@task("fleet.publish_artifacts")
def publish_artifacts(session: str, alias: str, epoch: int, number: int) -> None:
    """Publish what a turn left in the outbox."""
    ref, epoch, number = thread_ref(session, alias), checked_number(epoch), checked_number(number)

    async def work(fleet: Fleet) -> None:
        await finish.publish_artifacts(fleet, ref, epoch, number)

    run(work)


@task("fleet.close_turn")
def close_turn(session: str, alias: str, epoch: int, number: int) -> None:
    """Say how a turn ended, and go on with the thread."""
    ref, epoch, number = thread_ref(session, alias), checked_number(epoch), checked_number(number)

    async def work(fleet: Fleet) -> None:
        await finish.close_turn(fleet, ref, epoch, number)

    run(work)
