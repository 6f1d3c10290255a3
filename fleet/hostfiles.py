"""A host's own files of a thread: the full log and the checkpoint.

Under the state folder, `jobs/session_agent_harness-SESSION/threads/ALIAS/`:

- `logs/thread.log`: every item in full, one JSON object a line, before anybody else learns of it. Appended by the
  process that holds the thread's lease. A line is handed to the kernel at once, so that it outlives the process;
  the disk is asked to keep it (fsync) at the end of each turn, so that it outlives a power cut.
- `thread.yaml`: the checkpoint, replaced as a whole by the holder of the lease. It is JSON, the part of YAML that is
  read in no time, whatever has become of it.
- `terms.json`: what the epoch's turns run on (`fleet.terms`).
- `excused`: a line for each attempt that was interrupted by no fault of its agent's. Appended by the process that ran
  it, which may have lost its lease.

All of it is readable by its owner alone. Whatever is read may be damaged, and then counts as not there; what the disk
does not take is a `HostUnwritableError`, and leaves the file as it was.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, TypeAdapter

from fleet.errors import FleetError
from fleet.refs import ThreadRef

log = logging.getLogger(__name__)

Json = dict[str, Any]

#: What the name of a session's folder begins with (protocol §4, budget).
JOB_PREFIX = "session_agent_harness-"
#: Rotated logs that are kept beside `thread.log`, which is rotated at `items.log_bytes`.
LOGS_KEPT = 3
#: Bytes that a disk must take for a turn to begin: without a margin each item that finds room would start an agent.
ROOM_BYTES = 1024 * 1024

#: A number of the record: Redis's scripts count in doubles.
Count = Annotated[int, Field(ge=0, lt=2**53)]
#: A `created_at` of the platform (protocol §1).
Moment = str | int | FiniteFloat | None


class HostUnwritableError(FleetError):
    """The state folder can't be written: its disk is full or read-only. That passes; no thread fails with it."""

    def __init__(self, error: OSError) -> None:
        super().__init__("host_unwritable", error.strerror or type(error).__name__)


@contextmanager
def writing() -> Iterator[None]:
    """Raise what keeps the body from writing the state folder as `HostUnwritableError`."""
    try:
        yield
    except OSError as error:
        raise HostUnwritableError(error) from error


def replace_file(path: Path, text: str) -> None:
    """Replace `path`, whole, by a file that its owner alone can read and that outlives a power cut.

    Raises:
        HostUnwritableError: the disk does not take it; `path` is as it was.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with writing():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def job_id(session: str) -> str:
    """Return the name of a session's folder."""
    return f"{JOB_PREFIX}{session}"


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
        self._excused = self.folder / "excused"

    def create(self) -> None:
        """Make the folders.

        Raises:
            HostUnwritableError: they can't be made.
        """
        with writing():
            for folder in (self.log.parent, self.agent_state):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def check_room(self) -> None:
        """Make sure that there is room for a turn to begin. Blocks.

        Raises:
            HostUnwritableError: the disk does not take `ROOM_BYTES` more.
        """
        self.create()
        with writing(), TemporaryFile(dir=self.folder) as probe:
            probe.write(bytes(ROOM_BYTES))

    def excuse(self, epoch: int, turn: int) -> None:
        """Note that an attempt does not count among those of its turn. Without room it counts."""
        with suppress(OSError), self._excused.open("a", encoding="utf-8") as file:
            file.write(f"{epoch} {turn}\n")

    def excused(self, epoch: int, turn: int) -> int:
        """Return how many attempts of a turn do not count."""
        with suppress(OSError), self._excused.open(encoding="utf-8", errors="replace") as lines:
            return sum(line == f"{epoch} {turn}\n" for line in lines)
        return 0

    def forget_excused(self) -> None:
        """Forget the excused attempts: their turn has ended."""
        with suppress(OSError):
            self._excused.unlink(missing_ok=True)

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
        """Yield all lines of the logs, in order. A line that is cut short or damaged ends nothing but itself."""
        for path in self._logs():
            with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if (entry := _entry(line)) is not None:
                        yield entry

    def said_in(self, turn: int) -> Iterator[Json]:
        """Yield the lines of one turn, whatever epoch they are of."""
        return (entry for entry in self.said() if entry.get("turn") == turn)


def _entry(line: str) -> Json | None:
    """Return a line of a log: `epoch`, `turn`, `n`, `uid`, and the stamped `item`. None when it is damaged."""
    try:
        entry = json.loads(line)
        numbers = (entry["epoch"], entry["turn"], entry["n"])
        uid, post_id = entry["uid"], entry["item"]["metadata"]["post_id"]
        content = entry["item"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    whole = (
        all(type(number) is int for number in numbers)
        and (uid is None or isinstance(uid, str))
        and isinstance(post_id, str)
        and isinstance(content, list)
    )
    return entry if whole else None


class LogWriter:
    """Appends to a thread's log, and begins a new one when it has `max_bytes`.

    Raises:
        HostUnwritableError: the log can't be opened.
    """

    def __init__(self, files: HostFiles, max_bytes: int) -> None:
        files.create()
        self._files = files
        self._max_bytes = max_bytes
        with writing():
            self._fd = _open_log(files.log)

    def write(self, entry: str) -> None:
        """Append one line of JSON, whole or not at all.

        Raises:
            HostUnwritableError: the disk does not take it.
        """
        with writing():
            size = os.fstat(self._fd).st_size
            if size >= self._max_bytes:
                self._begin_anew()
                size = os.fstat(self._fd).st_size
            try:
                _write_whole(self._fd, entry.encode() + b"\n")
            except OSError:
                os.ftruncate(self._fd, size)
                raise

    def _begin_anew(self) -> None:
        self._files.rotate()
        full, self._fd = self._fd, _open_log(self._files.log)
        _close_log(full)

    def close(self) -> None:
        """Ask the disk to keep what was written, and close."""
        _close_log(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_log(path: Path) -> int:
    """Open a log for appending, behind a last line that is whole."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            _write_whole(fd, b"\n")
    except OSError:
        os.close(fd)
        raise
    return fd


def _close_log(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:  # what it holds is in the journal: only a power cut before that is posted would miss it
        log.warning("the disk may not keep a thread's log: %s", error.strerror)
    finally:
        os.close(fd)


def _write_whole(fd: int, content: bytes) -> None:
    data = memoryview(content)
    while data:
        data = data[os.write(fd, data) :]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a host remembers of a thread so that its record can be rebuilt; the fields are those of `fleet.record`.

    `step` is `run` or `publish` while a turn is under way, else empty; the fields behind it belong to that turn.
    """

    epoch: Count = 0
    turn: Count = 0
    agent_session: str = ""
    consumed_at: Moment = None
    consumed: tuple[str, ...] = ()
    step: Literal["", "run", "publish"] = ""
    prompted: bool = False
    turn_items: tuple[str, ...] = ()
    turn_newest: Moment = None
    began_ms: Count = 0
    turn_status: str = ""
    error: str = ""
    fail_code: str = ""
    stats: dict[str, Count] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Return the checkpoint, or an empty one when there is none or it is damaged."""
        try:
            return _CHECKPOINT.validate_json(path.read_bytes(), strict=True)
        except (OSError, ValueError):
            return cls()

    def write(self, path: Path) -> None:
        """Replace the checkpoint on disk.

        Raises:
            HostUnwritableError: the disk does not take it.
        """
        replace_file(path, json.dumps(asdict(self), indent=1))


_CHECKPOINT = TypeAdapter(Checkpoint)
