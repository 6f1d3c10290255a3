"""Start an agent below a guard, and end what is left of one.

`guard_command` gives the command line that runs an agent below `agents/guard.py`; `running` starts it from asyncio.
`end_leftovers` ends all of a turn's processes from what its process file says, whoever started them: a turn that stops
its own agent and a later attempt that follows a crash do the same thing.

The process file is JSON: `mark`, and once the guard runs, `guard` and `agent`, each `pid` and `start` (start time in
clock ticks since boot). Every process of the turn carries the mark in its environment, so an orphan is found although
its parents are gone, and a pid that was given out again is never taken for it. A file that is damaged names nothing;
whoever started the agent knows its mark without the file. What replaced its whole environment and also lost its guard
to a SIGKILL is out of reach. Without /proc nothing can be told with certainty, so nothing is ended there; the guard
then is the only protection.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agents import guard

#: Seconds between SIGTERM and SIGKILL where nothing else is asked for (`turns.stop_grace_s`).
TERM_GRACE_S = 0.3

#: Seconds that a guard may take beyond the grace before it is itself killed.
GUARD_MARGIN_S = 1.0

#: Seconds after which a process that survives SIGKILL (stuck in the kernel) is reported instead of waited for.
KILL_DEADLINE_S = 5.0

#: Seconds between two looks at whether a process has ended.
POLL_S = 0.005

#: Bytes kept of what a dead agent wrote to stderr.
STDERR_TAIL_BYTES = 500

#: Bytes read from an agent at once.
CHUNK_BYTES = 1 << 16

MARK = re.compile(r"[0-9a-f]{32}")


def guard_command(
    argv: Sequence[str], *, env: Mapping[str, str], process_file: Path, term_grace_s: float = TERM_GRACE_S
) -> list[str]:
    """Return the command that runs `argv` below a guard; arguments appended to it are appended to `argv`.

    The command must be started by this very process: the guard stops when its parent is another one. The agent gets
    exactly `env` and the mark, whatever the command is started with. `env` travels in a file of mode 0600, which the
    guard removes, and not on a command line.

    Raises:
        OSError: the process file can't be written.
    """
    process_file.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(16)
    guard.write_process_file(str(process_file), {"mark": mark})
    spec = {
        "worker": os.getpid(),
        "argv": list(argv),
        "env": dict(env),
        "mark": mark,
        "process_file": str(process_file),
        "term_grace_s": term_grace_s,
    }
    spec_file = _beside(process_file, "spec")
    guard.write_process_file(str(spec_file), spec)
    # env -i keeps the worker's environment out of the guard's too, where the agent could read it.
    clean = ["/usr/bin/env", "-i", f"{guard.MARK_VARIABLE}={mark}"]
    return [*clean, sys.executable, "-I", "-S", guard.__file__, str(spec_file)]


def write_launcher(path: Path, command: Sequence[str]) -> None:
    """Write an executable that runs `command` with its own arguments appended, for an SDK that takes only a path."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    path.chmod(0o700)


@dataclass(frozen=True, slots=True)
class Running:
    """An agent below its guard. `process` is the guard, which ends with the agent's status."""

    process: asyncio.subprocess.Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader


@asynccontextmanager
async def running(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, process_file: Path, term_grace_s: float = TERM_GRACE_S
) -> AsyncIterator[Running]:
    """Run `argv` below a guard with pipes for stdin and stdout; after the block nothing of it is alive.

    Raises:
        OSError: it can't be started.
    """
    stderr_file = _beside(process_file, "stderr")
    agent, mark = None, ""
    try:
        command = guard_command(argv, env=env, process_file=process_file, term_grace_s=term_grace_s)
        mark, _ = _recorded(process_file)
        with stderr_file.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr, cwd=cwd
            )
        pipes = cast("tuple[asyncio.StreamWriter, asyncio.StreamReader]", (process.stdin, process.stdout))
        agent = Running(process, *pipes)
        yield agent
    finally:
        await _uninterrupted(lambda: _end_started(process_file, mark, term_grace_s))
        if agent is not None:
            await _collect(agent)
        stderr_file.unlink(missing_ok=True)


async def end(process_file: Path, *, term_grace_s: float = TERM_GRACE_S) -> None:
    """`end_leftovers` in a thread. Being cancelled doesn't cut it short: the cancellation is raised afterwards."""
    await _uninterrupted(lambda: end_leftovers(process_file, term_grace_s=term_grace_s))


async def _uninterrupted(work: Callable[[], object]) -> None:
    working = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled = False
    while not working.done():
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            cancelled = True
    working.result()
    if cancelled:
        raise asyncio.CancelledError


def end_leftovers(process_file: Path, *, term_grace_s: float = TERM_GRACE_S) -> int:
    """End every process of the turn that `process_file` records, remove the file, and return how many had to be ended.

    Returns 0 when there is no such file, or it is damaged: it names nothing then.

    Raises:
        TimeoutError: a process survives SIGKILL; the file stays.
    """
    mark, recorded_guard = _recorded(process_file)
    ended: set[int] = set()
    if mark:
        ended |= _end_by_guard(recorded_guard, mark, term_grace_s)
        ended |= _end_marked(mark, term_grace_s)
    spec = _beside(process_file, "spec")
    for file in (_beside(spec, "draft"), spec, _beside(process_file, "draft"), process_file):
        file.unlink(missing_ok=True)
    return len(ended)


def _end_started(process_file: Path, mark: str, term_grace_s: float) -> None:
    """End the turn that was started with `mark`, also when its process file was lost or damaged meanwhile."""
    recorded_mark, _ = _recorded(process_file)
    end_leftovers(process_file, term_grace_s=term_grace_s)
    if mark and mark != recorded_mark:
        _end_marked(mark, term_grace_s)


def stderr_tail(process_file: Path) -> str:
    """Return the end of what the running agent wrote to stderr."""
    try:
        written = _beside(process_file, "stderr").read_bytes()
    except OSError:
        return ""
    return written[-STDERR_TAIL_BYTES:].decode("utf-8", "replace").strip()


async def read_lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length, split at newline bytes only. A last line without its newline is dropped."""
    pending: list[bytes] = []
    while chunk := await stream.read(CHUNK_BYTES):
        first, *more = chunk.split(b"\n")
        pending.append(first)
        for line in more:
            yield b"".join(pending)
            pending = [line]


def _beside(process_file: Path, suffix: str) -> Path:
    return process_file.with_name(f"{process_file.name}.{suffix}")


async def _collect(agent: Running) -> None:
    """Take what is left in the pipes of an ended agent: asyncio doesn't let go of its process before."""
    agent.stdin.close()
    while await agent.stdout.read(CHUNK_BYTES):
        pass
    await agent.process.wait()


def _recorded(process_file: Path) -> tuple[str, dict[str, Any]]:
    """Return the mark and the guard that a process file names; empty ones when it is missing or damaged."""
    try:
        record = json.loads(process_file.read_bytes())
        mark, recorded_guard = record["mark"], record.get("guard", {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return "", {}
    if not isinstance(mark, str) or not MARK.fullmatch(mark):
        return "", {}
    return mark, recorded_guard if isinstance(recorded_guard, dict) else {}


def _end_by_guard(recorded: dict[str, Any], mark: str, term_grace_s: float) -> set[int]:
    """Let a guard that is still alive end its tree; it alone knows what has left it. Return what was below it."""
    if not isinstance(pid := recorded.get("pid"), int):
        return set()
    if not _has_mark(pid, mark) or guard.start_time(pid) != recorded.get("start"):
        return set()
    ended = {pid, *guard.descendants(pid)}
    guard.send(pid, signal.SIGTERM)
    deadline = time.monotonic() + term_grace_s + GUARD_MARGIN_S
    while _has_mark(pid, mark):
        if time.monotonic() >= deadline:
            for straggler in (*guard.descendants(pid), pid):
                guard.send(straggler, signal.SIGKILL)
        time.sleep(POLL_S)
    return ended


def _end_marked(mark: str, term_grace_s: float) -> set[int]:
    """End all processes with `mark` and all below them; return them."""
    ended: set[int] = set()
    began = time.monotonic()
    while left := _marked_trees(mark):
        waited = time.monotonic() - began
        if waited > term_grace_s + KILL_DEADLINE_S:
            raise TimeoutError(f"processes survive SIGKILL: {sorted(left)}")
        for pid in left if waited >= term_grace_s else left - ended:
            guard.send(pid, signal.SIGKILL if waited >= term_grace_s else signal.SIGTERM)
        ended |= left
        time.sleep(POLL_S)
    return ended


def _marked_trees(mark: str) -> set[int]:
    marked = [pid for pid in guard.processes() if _has_mark(pid, mark)]
    below = guard.descendants(*marked) if marked else set()
    return {pid for pid in (*marked, *below) if not _is_zombie(pid)}


def _has_mark(pid: int, mark: str) -> bool:
    """Whether the process lives and belongs to the turn; a zombie has no environment any more."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{guard.MARK_VARIABLE}={mark}".encode() in environ.split(b"\0")


def _is_zombie(pid: int) -> bool:
    fields = guard.stat_fields(pid)
    return fields is None or fields[0] in "ZX"
