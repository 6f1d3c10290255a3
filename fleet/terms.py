"""What the turns of an epoch run on: folder, agent, permissions, policy, as its start has checked them.

They are kept by the host that runs the turns, and Redis does not have them: who can write there decides nothing about
how an agent runs. `terms.json` is replaced by each start, readable by its owner alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fleet.hostfiles import Checkpoint, HostFiles
from fleet.local import write_private
from fleet.rebuild import CONSUMED_KEPT
from fleet.record import Record


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one epoch.

    `settings` are those of the agent (`fleet.config.AgentSettings`), and the blocks `artifacts`, `inbox` and `policy`.
    """

    epoch: int
    work_folder: str
    agent: str
    settings: dict[str, Any]

    def write(self, files: HostFiles) -> None:
        """Replace what the host knows of a thread's terms."""
        write_private(files.terms, json.dumps(asdict(self)))


def on_terms(record: Record, home: Path) -> Record | None:
    """Return `record` with the terms of its epoch; None when this host did not start it, or has lost its files.

    What this host knows to be consumed stays consumed.
    """
    files = HostFiles(home, record.ref)
    try:
        terms = Terms(**json.loads(files.terms.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    if terms.epoch != record.epoch:
        return None
    known = dict.fromkeys((*record.consumed, *Checkpoint.read(files.checkpoint).consumed))
    return replace(
        record,
        work_folder=terms.work_folder,
        agent=terms.agent,
        settings=terms.settings,
        consumed=tuple(known)[-CONSUMED_KEPT:],
    )
