"""`fleet.post_items`: a thread's journal to the platform, on any worker."""

from __future__ import annotations

from fleet.drain import drain
from tasks.runtime import run, task, thread_ref


@task("fleet.post_items")
def post_items(session: str, alias: str) -> None:
    """Post what waits in a thread's journal, in order, unless somebody is at it."""
    ref = thread_ref(session, alias)
    run(lambda fleet: drain(fleet, ref))
