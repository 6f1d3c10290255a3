"""What the turns of an epoch run on: folder, agent, permissions, policy, as its start has checked them.

They are kept by the host that runs the turns, and Redis does not have them: who can write there decides nothing about
how an agent runs. `terms.json` is replaced by each start, readable by its owner alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fleet.events import Permissions
from fleet.hostfiles import Checkpoint, Count, HostFiles, replace_file
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

    @classmethod
    def read(cls, files: HostFiles) -> Terms | None:
        """Return the terms of the last epoch that this host started; None when there are none or they are damaged."""
        try:
            value = json.loads(files.terms.read_bytes())
            _Shape.model_validate(value, strict=True)
            return cls(**value)
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def write(self, files: HostFiles) -> None:
        """Replace what the host knows of a thread's terms.

        Raises:
            HostUnwritableError: the disk does not take it.
        """
        replace_file(files.terms, json.dumps(asdict(self)))


class _Outbox(BaseModel):
    prefix: str
    source: str


class _Settings(BaseModel):
    executable: str
    model: str
    effort: str
    permissions: Permissions
    artifacts: _Outbox | None
    inbox: str
    policy: Any


class _Shape(BaseModel):
    """What turns rely on in `terms.json`."""

    epoch: Count
    work_folder: str
    agent: str
    settings: _Settings


def on_terms(record: Record, home: Path) -> Record | None:
    """Return `record` with the terms of its epoch; None when this host did not start it, or has lost its files.

    What this host knows to be consumed stays consumed.
    """
    files = HostFiles(home, record.ref)
    terms = Terms.read(files)
    if terms is None or terms.epoch != record.epoch:
        return None
    known = dict.fromkeys((*record.consumed, *Checkpoint.read(files.checkpoint).consumed))
    return replace(
        record,
        work_folder=terms.work_folder,
        agent=terms.agent,
        settings=terms.settings,
        consumed=tuple(known)[-CONSUMED_KEPT:],
    )
