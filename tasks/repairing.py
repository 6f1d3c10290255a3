"""`fleet.reconcile`: whatever stands still is nudged again."""

from __future__ import annotations

from fleet import reconcile as domain
from tasks.runtime import run, task


@task("fleet.reconcile")
def reconcile() -> None:
    """Look at every thread whose time has come."""
    run(domain.reconcile)
