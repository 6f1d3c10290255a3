"""Reading the outbox, a folder that an agent fills and that may be hostile (protocol §4, Artifacts).

Nothing outside the work folder is ever read, also not while another process swaps files, folders and links:

- Every component is opened relative to the descriptor of its parent and never through a symlink; a file is then judged
  and read through its own descriptor. Opening does not block, so that a FIFO can't stop the walk.
- A hard link gives a file outside a name inside, and nothing tells the two apart. So only a file with a single name is
  published; an agent that wants a linked file published copies it. A link that is taken away while it is opened would
  pass, so the name is looked up again after the reading. Linking and unlinking move a file's ctime and not its mtime,
  by which they are told from writing: a file that was linked, unlinked or renamed meanwhile is not published.
- Depth, number and time are bounded. What was found within the bounds is published.

All functions here block. No descriptor outlives its call, so that a thread whose caller was cancelled can't meet one
that was closed and given to another file.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

#: Segments of a path. An alias of 256 characters has 128 at most, so nothing deeper could be published.
MAX_DEPTH = 128
#: Entries of any kind. About as many as can be uploaded in the time that a publication has.
MAX_ENTRIES = 10_000
#: Seconds. That many entries take less than one on a local disk; this is for a disk that hardly answers.
WALK_MAX_S = 30.0
#: Seconds after which a further change shows in ctime: two ticks of the slowest clock that kernels stamp files with.
SETTLE_S = 0.02

#: The worker's own file in the outbox: it keeps the artifacts out of the commits of the repository around them.
GITIGNORE = ".gitignore"
GITIGNORE_CONTENT = b"*\n"

_GUARDS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _GUARDS
_READ_FILE = os.O_RDONLY | _GUARDS
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _GUARDS


class OutboxError(Exception):
    """The outbox can't be used. The message names no path of the machine."""


class UnreadableError(Exception):
    """A file is not read; `reason` is the protocol's word for it."""

    def __init__(self, reason: Literal["unreadable", "too_large"]) -> None:
        self.reason = reason
        super().__init__(reason)


class _BoundError(Exception):
    """The walk has reached a bound."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """A folder below a work folder: `base` is the work folder's real path, `parts` lead from there, none a symlink."""

    base: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Regular files and unreadable folders, as paths relative to the outbox; a name that is not UTF-8 has surrogates.

    The files are sorted by the bytes of their paths. `error` says which bound left something out.
    """

    files: tuple[str, ...]
    unreadable: tuple[str, ...]
    error: str | None


def locate(work_folder: Path, source: str) -> Outbox:
    """Resolve `source` against `work_folder`, a real path. Nothing needs to be there.

    The work folder itself is refused: all of the repository would be published, its `.git` too, and the worker's
    `.gitignore` would hide its files from git.

    Raises:
        OutboxError: `source` can't be resolved, or not to a place below the work folder; or that is a symlink by now.
    """
    try:
        base = work_folder.resolve()
        parts = (base / source).resolve().relative_to(base).parts
    except (OSError, RuntimeError, ValueError):
        # RuntimeError: a loop of links. ValueError: a null byte, or a place outside.
        raise OutboxError("the outbox does not resolve to a place inside the work folder") from None
    if base != work_folder:
        raise OutboxError("the work folder leads elsewhere")
    if not parts:
        raise OutboxError("the outbox is the work folder itself")
    return Outbox(str(base), parts)


def create(outbox: Outbox) -> None:
    """Make the folder and what is missing above it, and its `.gitignore` unless something has that name already.

    Raises:
        OutboxError: it can't be made, or a component is no folder, or is a symlink by now.
    """
    try:
        with (
            opened_folder(outbox, create=True) as folder,
            suppress(FileExistsError),
            _opened(GITIGNORE, _CREATE_FILE, folder) as file,
        ):
            os.write(file, GITIGNORE_CONTENT)
    except OSError as error:
        raise OutboxError(f"the outbox can't be made: {error.strerror}") from error


def walk(outbox: Outbox) -> Found:
    """List everything below the outbox, without links, FIFOs, sockets, devices and the worker's own `.gitignore`.

    Raises:
        OutboxError: the outbox itself can't be opened.
    """
    found = _Walk(outbox).run()
    if not _has_own_gitignore(outbox):
        return found
    return replace(found, files=tuple(path for path in found.files if path != GITIGNORE))


def read(outbox: Outbox, path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file with a single name. At most `max_bytes` + 1 are ever in memory.

    Raises:
        UnreadableError: `too_large`, or `unreadable`: can't be opened, is something else, or was replaced meanwhile.
    """
    *folders, name = path.split("/")
    try:
        with opened_folder(outbox, tuple(folders)) as folder, _opened(name, _READ_FILE, folder) as file:
            status = os.fstat(file)
            if not _has_one_name(status):
                raise UnreadableError("unreadable")
            if status.st_size > max_bytes:
                raise UnreadableError("too_large")
            with open(file, "rb", closefd=False) as reader:
                content = reader.read(max_bytes + 1)
            _settle(status)
            named = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        raise UnreadableError("unreadable") from error
    if not _has_one_name(named) or not _kept_its_name(status, named):
        raise UnreadableError("unreadable")
    if len(content) > max_bytes:
        raise UnreadableError("too_large")
    return content


def _has_own_gitignore(outbox: Outbox) -> bool:
    try:
        return read(outbox, GITIGNORE, len(GITIGNORE_CONTENT)) == GITIGNORE_CONTENT
    except UnreadableError:
        return False


class _Walk:
    """One walk. Upper levels come before deeper ones, so that a bound cuts off the deepest."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._pending: deque[tuple[str, ...]] = deque([()])
        self._deadline = time.monotonic() + WALK_MAX_S
        self._entries = 0
        self._files: list[str] = []
        self._unreadable: list[str] = []
        self._error: str | None = None

    def run(self) -> Found:
        try:
            while self._pending:
                self._visit(self._pending.popleft())
        except _BoundError as error:
            self._error = str(error)
        return Found(tuple(sorted(self._files, key=os.fsencode)), tuple(self._unreadable), self._error)

    def _visit(self, parts: tuple[str, ...]) -> None:
        try:
            with opened_folder(self._outbox, parts) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    self._count_entry()
                    self._take(parts, entry)
        except OSError as error:
            if not parts:
                raise OutboxError(f"the outbox can't be opened: {error.strerror}") from error
            self._unreadable.append("/".join(parts))

    def _count_entry(self) -> None:
        if self._entries == MAX_ENTRIES:
            raise _BoundError(f"the outbox has more than {MAX_ENTRIES} entries; the others were left out")
        if time.monotonic() > self._deadline:
            raise _BoundError(f"listing the outbox took more than {WALK_MAX_S:g} s; what remained was left out")
        self._entries += 1

    def _take(self, parts: tuple[str, ...], entry: os.DirEntry[str]) -> None:
        path = (*parts, entry.name)
        if entry.is_file(follow_symlinks=False):
            self._files.append("/".join(path))
        elif entry.is_dir(follow_symlinks=False):
            if len(path) < MAX_DEPTH:
                self._pending.append(path)
            else:
                self._error = f"folders {MAX_DEPTH} levels down were left out"


def _has_one_name(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _was_written_last(status: os.stat_result) -> bool:
    """Tell whether the last change was one of the content; links and renames move ctime alone."""
    return status.st_ctime_ns == status.st_mtime_ns


def _settle(status: os.stat_result) -> None:
    """Wait until a further link or unlink can't hide behind the ctime that was seen."""
    age = time.time() - status.st_ctime
    if age < SETTLE_S and not _was_written_last(status):
        # The clock of a file server may be ahead of ours.
        time.sleep(min(SETTLE_S, SETTLE_S - age))


def _kept_its_name(before: os.stat_result, after: os.stat_result) -> bool:
    same_links = before.st_ctime_ns == after.st_ctime_ns or _was_written_last(after)
    return os.path.samestat(before, after) and same_links


@contextmanager
def _opened(name: str, flags: int, folder: int) -> Iterator[int]:
    file = os.open(name, flags, 0o644, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def opened_folder(outbox: Outbox, below: tuple[str, ...] = (), *, create: bool = False) -> Iterator[int]:
    """Open the outbox, or a folder below it, one component after the other."""
    folder = os.open(outbox.base, _READ_FOLDER)
    try:
        for part in (*outbox.parts, *below):
            if create:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
            above, folder = folder, os.open(part, _READ_FOLDER, dir_fd=folder)
            os.close(above)
        yield folder
    finally:
        os.close(folder)
