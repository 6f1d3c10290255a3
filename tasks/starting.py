"""`fleet.start_thread`: the start of an epoch, on the host that owns the work folder."""

from __future__ import annotations

from fleet import start
from tasks.runtime import checked_number, run, task, thread_ref


@task("fleet.start_thread")
def start_thread(session: str, alias: str, epoch: int) -> None:
    """Check a thread, take in what was said to it, and tell its envelope."""
    ref, epoch = thread_ref(session, alias), checked_number(epoch)
    run(lambda fleet: start.start_thread(fleet, ref, epoch))
