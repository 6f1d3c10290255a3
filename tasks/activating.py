"""`fleet.activate` and `fleet.ingest`: what is due on a thread, on any worker."""

from __future__ import annotations

from fleet import activation, inbound
from tasks.runtime import run, task, thread_ref


@task("fleet.activate")
def activate(session: str, alias: str, force: bool = False) -> None:
    """Compare a thread's envelope with its record. `force` starts it anew, whatever the envelope says."""
    ref = thread_ref(session, alias)
    run(lambda fleet: activation.activate(fleet, ref, force=force is True))


@task("fleet.ingest")
def ingest(session: str, alias: str) -> None:
    """Take in a thread's new items."""
    ref = thread_ref(session, alias)
    run(lambda fleet: inbound.ingest(fleet, ref))
