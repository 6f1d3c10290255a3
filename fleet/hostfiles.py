"""A host's own files of a thread: the full log and the checkpoint.

Under the state folder, `jobs/session_agent_harness-SESSION/threads/ALIAS/`:

- `logs/thread.log`: every item in full, one JSON object a line, before anybody else learns of it. Appended by the
  process that holds the thread's lease. A line is handed to the kernel at once, so that it outlives the process;
  the disk is asked to keep it (fsync) at the end of each turn, so that it outlives a power cut.
- `thread.yaml`: the checkpoint, replaced as a whole by the holder of the lease.
- `terms.json`: what the epoch's turns run on (`fleet.terms`).

All of it is readable by its owner alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import yaml

from fleet.refs import ThreadRef

Json = dict[str, Any]

#: Rotated logs that are kept beside `thread.log`, which is rotated at `items.log_bytes`.
LOGS_KEPT = 3


def job_id(session: str) -> str:
    """Return the name of a session's folder (protocol §4, budget)."""
    return f"session_agent_harness-{session}"


def log_name(ref: ThreadRef) -> str:
    """Return the path of a thread's log as items name it: relative to the jobs folder."""
    return f"{job_id(ref.session)}/threads/{ref.alias}/logs/thread.log"


class HostFiles:
    """The files of one thread below a host's state folder."""

    def __init__(self, home: Path, ref: ThreadRef) -> None:
        self.folder = home / "jobs" / job_id(ref.session) / "threads" / ref.alias
        self.log = self.folder / "logs" / "thread.log"
        self.checkpoint = self.folder / "thread.yaml"
        self.terms = self.folder / "terms.json"
        self.agent_state = self.folder / "agent"
        self.process = self.folder / "agent.json"

    def create(self) -> None:
        """Make the folders."""
        for folder in (self.log.parent, self.agent_state):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def rotate(self) -> None:
        """Begin a new log, and forget the oldest."""
        logs = self._logs()
        for older, newer in pairwise(logs):
            with suppress(FileNotFoundError):
                newer.replace(older)

    def _logs(self) -> list[Path]:
        """Return the paths of the logs, the oldest first."""
        rotated = [self.log.with_name(f"thread.log.{index}") for index in range(LOGS_KEPT, 0, -1)]
        return [*rotated, self.log]

    def said(self) -> Iterator[Json]:
        """Yield all lines of the logs, in order. A line that a crash cut short ends nothing but itself."""
        for log in self._logs():
            with suppress(FileNotFoundError), log.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    with suppress(ValueError):
                        entry = json.loads(line)
                        if isinstance(entry, dict) and isinstance(entry.get("item"), dict):
                            yield entry

    def said_in(self, turn: int) -> Iterator[Json]:
        """Yield the lines of one turn, whatever epoch they are of."""
        return (entry for entry in self.said() if entry.get("turn") == turn)


class LogWriter:
    """Appends to a thread's log, and begins a new one when it has `max_bytes`."""

    def __init__(self, files: HostFiles, max_bytes: int) -> None:
        files.create()
        self._files = files
        self._max_bytes = max_bytes
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._files.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end_cut_line(self._files.log)

    def _end_cut_line(self, log: Path) -> None:
        size = os.fstat(self._fd).st_size
        if size:
            with log.open("rb") as reader:
                reader.seek(size - 1)
                if reader.read(1) != b"\n":
                    os.write(self._fd, b"\n")

    def write(self, entry: str) -> None:
        """Append one line of JSON. Raises OSError when the disk does not take it whole."""
        if os.fstat(self._fd).st_size >= self._max_bytes:
            self.close()
            self._files.rotate()
            self._open()
        data = memoryview(entry.encode() + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Ask the disk to keep what was written, and close."""
        os.fsync(self._fd)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a host remembers of a thread so that its record can be rebuilt; the fields are those of `fleet.record`.

    `step` is `run` or `publish` while a turn is under way, else empty; the fields behind it belong to that turn.
    """

    epoch: int = 0
    turn: int = 0
    agent_session: str = ""
    consumed_at: str | int | float | None = None
    consumed: tuple[str, ...] = ()
    step: str = ""
    prompted: bool = False
    turn_items: tuple[str, ...] = ()
    turn_newest: str | int | float | None = None
    began_ms: int = 0
    turn_status: str = ""
    error: str = ""
    fail_code: str = ""
    stats: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Return the checkpoint, or an empty one when there is none or it is damaged."""
        try:
            value = yaml.safe_load(path.read_text(encoding="utf-8"))
            known = {name: value[name] for name in asdict(cls()) if name in value}
            checkpoint = cls(**known)
            return replace(checkpoint, consumed=tuple(checkpoint.consumed), turn_items=tuple(checkpoint.turn_items))
        except (OSError, yaml.YAMLError, TypeError, ValueError):
            return cls()

    def write(self, path: Path) -> None:
        """Replace the checkpoint on disk."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            lists = {"consumed": list(self.consumed), "turn_items": list(self.turn_items)}
            yaml.safe_dump(asdict(self) | lists, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
