"""Runs the processes of one machine: starts them in order, keeps them alive, leaves none behind.

Children that don't need each other form a group: they start and stop at once, the groups one after another.

Each child has a session and process group of its own, so a terminal's Ctrl-C reaches the supervisor alone, which then
stops the children in reverse order. Should the supervisor itself be killed, the kernel sends every child a SIGTERM.
A child writes straight into its log file, not through the supervisor: a supervisor that is slow or gone neither blocks
a child nor loses its last words.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

#: Seconds before the first restart of a child that died; each further death doubles it.
FIRST_PAUSE_S = 1.0

#: Seconds that a restart waits at most.
LONGEST_PAUSE_S = 30.0

#: Seconds a child must have run for its earlier deaths to be forgotten.
HEALTHY_S = 60.0

#: Seconds between two looks at the children: a pause that no operator notices and no CPU feels.
TICK_S = 0.1

#: Bytes of a log that make it start anew; the one before stays as NAME.log.1.
LOG_LIMIT_BYTES = 50 * 1024 * 1024

#: Lines of a log that are shown with an error, out of its last bytes.
TAIL_LINES = 20
TAIL_BYTES = 16 * 1024

#: Bytes of a child's output that are shown at a time.
SHOW_BYTES = 64 * 1024

# Run by a bare Python that becomes the child itself: unlike a function between fork and exec it is safe in a process
# with threads. prctl 1 is PR_SET_PDEATHSIG; a parent that died before it was set has been replaced by another.
_BECOME = """\
import os, sys
parent, signal, *argv = sys.argv[1:]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, int(signal), 0, 0, 0)
if os.getppid() != int(parent):
    sys.exit("the parent is gone")
try:
    os.execvp(argv[0], argv)
except OSError as error:
    sys.exit(f"{argv[0]}: {error.strerror}")
"""


@dataclass(frozen=True, slots=True)
class Child:
    """A process to run.

    Parameters:
        name: of the child in messages, and of its log file.
        argv: what to execute; without secrets, every user of the machine can read it.
        env: its whole environment.
        ready: tells whether it has come up; asked many times, must return within about a second. None: it is as soon
            as it runs.
        ready_timeout_s: seconds it may take to come up.
        grace_s: seconds it may take to end after SIGTERM.
        restart: start it again when it ends unasked. Otherwise its end ends all others too.
        pass_fds: file descriptors that it inherits.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    ready: Callable[[], bool] | None = None
    ready_timeout_s: float = 30.0
    grace_s: float = 10.0
    restart: bool = True
    pass_fds: tuple[int, ...] = ()


class ChildNotReadyError(Exception):
    """A child ended, or let its time pass, before it was ready. The message has the last lines of its log."""


class Supervisor:
    """The children of one machine, one by one or in groups, in the order in which they start.

    `run` is a whole program: it handles signals and blocks. Where the calling program has its own work to do, the
    supervisor is a context manager instead: the children are ready when the block begins and gone after it.
    Both belong in the main thread, since a child gets its SIGTERM when the thread that started it ends.

    Parameters:
        children: what to run.
        log_dir: the folder of NAME.log, for the output of each child.
        verbose: show that output on stderr too, each line behind the child's name.
    """

    def __init__(self, children: Sequence[Child | Sequence[Child]], log_dir: Path, *, verbose: bool = False) -> None:
        groups = [[child] if isinstance(child, Child) else child for child in children]
        self._groups = [[_Slot(child, log_dir / f"{child.name}.log") for child in group] for group in groups]
        self._slots = [slot for group in self._groups for slot in group]
        self._signals = _Signals()
        self._verbose = verbose
        self._ended: int | None = None

    def run(self, on_ready: Callable[[], None] | None = None) -> int:
        """Run the children until SIGINT, SIGTERM or SIGHUP asks to stop; SIGINT once more kills them at once.

        `on_ready` is called once, when all children are up.

        Returns:
            The status to exit with: 0 after a requested stop, 1 when a child did not become ready, else the status
            of the child without restart that ended.
        """
        with self._signals.handled():
            try:
                self.start()
                if on_ready and not self._signals.stop:
                    on_ready()
                while not self._signals.stop and self._ended is None:
                    self._pause(TICK_S)
                    self.check()
            except ChildNotReadyError as error:
                _say(str(error))
                return 1
            finally:
                if self._signals.stop:
                    _say("stopping; Ctrl-C kills at once")
                self.stop()
        return self._ended or 0

    def start(self) -> None:
        """Start the groups one after another, each when all of the one before are ready.

        Raises:
            ChildNotReadyError: one is not. Those before it are running.
        """
        for group in self._groups:
            if self._signals.stop:
                return
            for slot in group:
                slot.spawn()
            self._wait_ready(group)

    def check(self) -> None:
        """Start again what died and has paused long enough, and keep the logs from growing without bound."""
        for slot in self._slots:
            slot.limit_log()
            if slot.process is None:
                slot.spawn_when_due()
            elif slot.has_ended():
                status = slot.bury()
                if not slot.child.restart:
                    self._ended = status
                    return
                slot.postpone(f"ended with status {status}")

    def stop(self) -> None:
        """Stop all children, the last group first, and return when no process of theirs is left."""
        try:
            for group in reversed(self._groups):
                self._stop(group)
            self._show()
        except BaseException:
            self._signals.kill = True
            for group in reversed(self._groups):
                self._stop(group)
            raise

    def __enter__(self) -> Self:
        """Start the children.

        Raises:
            ChildNotReadyError: one is not ready. None is left.
        """
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the children."""
        self.stop()

    def _wait_ready(self, group: Sequence[_Slot]) -> None:
        began = time.monotonic()
        waiting = [slot for slot in group if slot.child.ready is not None]
        while waiting and not self._signals.stop:
            waiting = [slot for slot in waiting if not slot.is_ready(time.monotonic() - began)]
            if waiting:
                self._pause(TICK_S)

    def _stop(self, group: Sequence[_Slot]) -> None:
        began = time.monotonic()
        for slot in group:
            slot.terminate()
        left = list(group)
        while left:
            for slot in left:
                late = time.monotonic() - began > slot.child.grace_s and not slot.has_ended()
                if late:
                    _say(f"{slot.child.name} did not end within {slot.child.grace_s:.0f} s: killed")
                if late or self._signals.kill or slot.has_ended():
                    slot.bury()
            left = [slot for slot in left if slot.process is not None]
            if left:
                self._pause(TICK_S)

    def _pause(self, seconds: float) -> None:
        self._signals.wait(seconds)
        self._show()

    def _show(self) -> None:
        if self._verbose:
            for slot in self._slots:
                for line in slot.new_lines():
                    _say(f"{slot.child.name} | {line}")


class _Slot:
    """A child's place: its process, when there is one, and its log."""

    def __init__(self, child: Child, log: Path) -> None:
        self.child = child
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.due = 0.0  # on the monotonic clock: not to be started before
        self._deaths = 0  # since it was last healthy
        self._started = 0.0
        self._log_begin = 0  # where in the log this process's output begins
        self._shown = log.stat().st_size if log.exists() else 0

    def spawn(self) -> None:
        with open_log(self.log) as output:
            self._log_begin = output.tell()
            self._started = time.monotonic()
            self.process = subprocess.Popen(
                dying_with_parent(self.child.argv),
                env=dict(self.child.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=self.child.pass_fds,
            )

    def is_ready(self, waited_s: float) -> bool:
        """Tell whether the process, waited for since `waited_s` seconds, has come up.

        Raises:
            ChildNotReadyError: it has ended, or its time has passed.
        """
        # The end is looked for first: what answers after it is another process, on the same port perhaps.
        if self.has_ended():
            raise self.not_ready(f"ended with status {self.bury()} before it was ready")
        if self.child.ready is None or self.child.ready():
            return True
        if waited_s > self.child.ready_timeout_s:
            raise self.not_ready(f"was not ready within {self.child.ready_timeout_s:.0f} s")
        return False

    def terminate(self) -> None:
        """Ask the process to end."""
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGTERM)

    def has_ended(self) -> bool:
        """Tell whether the process has ended, without reaping it: until then its group's number is nobody else's."""
        return self.process is None or bool(os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def bury(self) -> int:
        """Kill what is left of the process and its group; return its status as a shell would tell it."""
        if self.process is None:
            return 0
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self.process = None
        return status if status >= 0 else 128 - status

    def spawn_when_due(self) -> None:
        if time.monotonic() < self.due:
            return
        try:
            self.spawn()
        except OSError as error:  # no place for one more process or log line: that passes
            self.postpone(f"can't be started ({error})")

    def postpone(self, why: str) -> None:
        """Set when to start the process that died, and say so."""
        now = time.monotonic()
        self._deaths = 1 if now - self._started >= HEALTHY_S else self._deaths + 1
        pause = restart_pause(self._deaths)
        self.due = now + pause
        _say(f"{self.child.name} {why}; it starts again in {pause:.0f} s")

    def not_ready(self, what: str) -> ChildNotReadyError:
        lines = tail(self.log, self._log_begin)
        return ChildNotReadyError(f"{self.child.name} {what}; its log {self.log} ends with:\n{lines}")

    def limit_log(self) -> None:
        # The process holds the file open, in append mode: a truncated file it just goes on filling, a renamed one too.
        if self.log.exists() and self.log.stat().st_size > LOG_LIMIT_BYTES:
            with contextlib.suppress(OSError):  # a full disk is no reason to keep the rest of the log
                shutil.copy(self.log, f"{self.log}.1")
            os.truncate(self.log, 0)

    def new_lines(self) -> Iterator[str]:
        """Yield the lines that were written since the last call. An unfinished line waits for its end."""
        if not self.log.exists():
            return
        with self.log.open("rb") as file:
            if self._shown > os.fstat(file.fileno()).st_size:
                self._shown = 0
            file.seek(self._shown)
            while chunk := file.read(SHOW_BYTES):
                whole = chunk[: chunk.rfind(b"\n") + 1]
                if not whole and len(chunk) < SHOW_BYTES and self.process is not None:
                    return
                whole = whole or chunk
                self._shown += len(whole)
                file.seek(self._shown)
                yield from whole.decode(errors="replace").splitlines()


class _Signals:
    """What the signals have asked for."""

    def __init__(self) -> None:
        self.stop = False
        self.kill = False
        self._wakeup: int | None = None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Take note of the signals instead of dying of them; a `wait` under way ends at once."""
        wakeup, noise = os.pipe()
        os.set_blocking(noise, False)
        earlier_fd = signal.set_wakeup_fd(noise, warn_on_full_buffer=False)
        # A SIGHUP that nohup made ignored stays so.
        names = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            names.append(signal.SIGHUP)
        earlier = {name: signal.signal(name, self._note) for name in names}
        self._wakeup = wakeup
        try:
            yield
        finally:
            self._wakeup = None
            for name, handler in earlier.items():
                signal.signal(name, handler)
            signal.set_wakeup_fd(earlier_fd)
            os.close(wakeup)
            os.close(noise)

    def wait(self, seconds: float) -> None:
        """Sleep, but not longer than until the next signal."""
        if self._wakeup is None:
            time.sleep(seconds)
        elif select.select([self._wakeup], [], [], seconds)[0]:
            os.read(self._wakeup, 1024)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        # Only Ctrl-C is pressed by somebody who tired of waiting: init systems and closing terminals repeat the others.
        self.kill = self.kill or (self.stop and signum == signal.SIGINT)
        self.stop = True


def restart_pause(deaths: int) -> float:
    """Return the seconds to wait before a child starts that died `deaths` times in a row (1 or more)."""
    return float(min(FIRST_PAUSE_S * 2 ** min(deaths - 1, 16), LONGEST_PAUSE_S))


def dying_with_parent(argv: Sequence[str]) -> list[str]:
    """Return the command that becomes `argv` and is sent SIGTERM when the thread that started it ends (on Linux)."""
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), str(int(signal.SIGTERM)), *argv]


def open_log(path: Path) -> FileIO:
    """Open a log for appending that only its owner can read; its folder is created."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(handle, 0o600)
    return os.fdopen(handle, "ab", buffering=0)


def tail(log: Path, begin: int) -> str:
    """Return the last lines of `log` after its byte `begin`."""
    with log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(begin if begin <= size else 0, size - TAIL_BYTES))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])


def _say(line: str) -> None:
    # The terminal may be gone; the children are looked after all the same.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
