"""Whether a path that a tool names leaves a folder (protocol §4, Policy: `outside`).

A path is followed component by component as the kernel would at this moment. Nothing holds the file system still until
the tool runs; that is a bound of any check by path, and docs/policy.md says so.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path

#: Symlinks on one path; the kernel gives up there too.
MAX_LINKS = 40

#: A mode that no file has.
_REFUSED = -1


def is_outside(path: str | None, work_folder: Path, root: str | None) -> bool:
    """Return whether `path`, relative to `work_folder`, leaves `root`. What can't be resolved does.

    Tools differ in how they read a path: some take the white space around it away, some compose its characters, some
    take `link/..` for nothing before the kernel sees it. Every reading must stay inside.
    """
    if not path or root is None or not _is_text(path):
        return True
    composed = unicodedata.normalize("NFC", path)
    for reading in {path, path.strip(), composed, composed.strip()}:
        whole = os.path.join(work_folder, reading)  # noqa: PTH118 - Path would drop what the kernel looks at
        if not reading or not _is_below(resolve(whole), root) or not _is_below(resolve(os.path.normpath(whole)), root):
            return True
    return False


def resolve(path: str) -> str | None:
    """Return where an absolute `path` leads; components that don't exist yet stay as they are.

    None when the kernel would refuse it (loop, NUL, a file taken for a folder, `..` behind what is missing), and when
    it would lead another process elsewhere (a link in /proc).
    """
    pending, at, missing, links = path.split("/")[::-1], "/", False, 0
    while pending:
        name = pending.pop()
        if name in ("", "."):
            continue
        if name == "..":
            if missing:
                return None
            at = os.path.dirname(at)  # noqa: PTH120 - surrogates and all
            continue
        here = f"{at.rstrip('/')}/{name}"
        mode = None if missing else _mode(here)
        if mode == _REFUSED:
            return None
        if mode is None:
            missing, at = True, here
        elif stat.S_ISLNK(mode):
            links += 1
            if links > MAX_LINKS or _is_below(here, "/proc"):
                return None
            target = os.readlink(here)  # noqa: PTH115 - Path would normalize it
            at = "/" if target.startswith("/") else at
            pending.extend(target.split("/")[::-1])
        elif pending and not stat.S_ISDIR(mode):
            return None
        else:
            at = here
    return at


def outbox_root(work_folder: Path, outbox: Path | None) -> str | None:
    """Return the outbox's real path; None without one, or when a symlink on the way to it could lead elsewhere."""
    base = resolve(str(work_folder))
    if outbox is None or base is None:
        return None
    relative = os.path.relpath(work_folder / outbox, work_folder)
    expected = os.path.normpath(f"{base}/{relative}")
    real = resolve(f"{base}/{relative}")
    return real if real == expected and _is_below(real, base) else None


def _mode(path: str) -> int | None:
    """Return the mode of what is at `path`, a link not followed; None for nothing, `_REFUSED` for an error."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return _REFUSED


def _is_text(path: str) -> bool:
    """Return whether every program writes `path` as the same bytes, and the kernel takes them."""
    return "\0" not in path and not any("\ud800" <= character <= "\udfff" for character in path)


def _is_below(path: str | None, root: str) -> bool:
    return path is not None and (path == root or path.startswith(f"{root.rstrip('/')}/"))
