"""The small process below which every agent runs, so that nothing of an agent outlives its turn.

Started by `agents.process` as `python -I -S guard.py SPEC [further arguments of the agent]`. The guard is a subreaper:
whatever the agent starts stays below it, also what called setsid or daemonised. It ends that whole tree when it gets
SIGTERM, when the worker process ends, or when the agent itself ends, and then exits with the agent's status.
stdin, stdout and stderr belong to the agent alone.

The end of the worker is seen by a changed parent (a pidfd wakes the guard at once where there is one). PDEATHSIG would
not do there: it fires when the forking *thread* ends, and in a worker that may be long before the process does. The
guard has one thread, so for its own end, by SIGKILL, PDEATHSIG on the agent is right.

Without /proc (macOS) only the agent's process group is ended.

The file is run on its own, with the standard library alone and few imports: it is on the way of every turn.
"""

# Importing pathlib would double the time to start.
# ruff: noqa: PTH105, PTH108, PTH110, PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from typing import Any

#: Names a turn's processes in their environment: how `agents.process.end_leftovers` knows them again.
MARK_VARIABLE = "FLEET_TURN_MARK"

#: Milliseconds between two looks at who the parent is: the fallback for systems without a pidfd.
PARENT_CHECK_MS = 200

#: Milliseconds between two rounds of ending what is left; SIGCHLD cuts them short.
SWEEP_MS = 10

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: Dispositions that a worker may have changed, and that exec hands on when they are "ignore".
RESET_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT, signal.SIGPIPE, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

HAS_PROC = os.path.exists("/proc/self/stat")


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state (0) on, or None when there is no such process.

    Parent is field 1, start time in clock ticks since boot field 19.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode("ascii").split()
    except OSError:
        return None


def start_time(pid: int) -> str:
    """Return what tells this process from a later one with the same pid; empty when unknown."""
    fields = stat_fields(pid)
    return fields[19] if fields else ""


def processes() -> list[int]:
    """Return the pids of all processes; none without /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if HAS_PROC else []


def descendants(*roots: int) -> set[int]:
    """Return all processes below `roots`, zombies included, without the roots."""
    children: dict[int, list[int]] = {}
    for pid in processes():
        fields = stat_fields(pid)
        if fields:
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        below = [pid for pid in children.get(todo.pop(), ()) if pid not in found]
        found.update(below)
        todo += below
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may already be gone, or be another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def write_process_file(path: str, content: dict[str, Any]) -> None:
    """Write `content` so that a reader sees either the old or the new file."""
    draft = f"{path}.draft"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)
    os.replace(draft, path)


class Guard:
    """The life of one agent.

    Parameters:
        spec: `worker` (pid), `argv`, `env`, `mark`, `process_file`, `term_grace_s`; written by `agents.process`.
        arguments: appended to `argv`.
    """

    def __init__(self, spec: dict[str, Any], arguments: list[str]) -> None:
        self.worker: int = spec["worker"]
        self.argv: list[str] = [*spec["argv"], *arguments]
        self.env: dict[str, str] = {**spec["env"], MARK_VARIABLE: spec["mark"]}
        self.mark: str = spec["mark"]
        self.process_file: str = spec["process_file"]
        self.term_grace_s: float = spec["term_grace_s"]
        self.agent = 0
        self.status: int | None = None
        self.libc = ctypes.CDLL(None)
        self.poll = select.poll()
        self.wakeup = self._catch_signals()

    def run(self) -> int:
        """Start the agent, wait for its end or for a reason to end it, end its tree; return the exit status."""
        self._leave_the_workers_group()
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._watch_worker()
        self._record()
        if os.getppid() != self.worker:
            return 128 + signal.SIGTERM
        self.agent = os.fork()
        if self.agent == 0:
            self._become_agent()
        self._record()
        self._give_up_streams()
        while self.status is None and not self._must_stop():
            self._reap()
        self._end_tree()
        return 128 + signal.SIGKILL if self.status is None else self.status

    def _catch_signals(self) -> int:
        """Turn signals into bytes of a pipe, and return its end for reading."""
        wakeup, sink = os.pipe()
        for descriptor in (wakeup, sink):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self.poll.register(wakeup, select.POLLIN)
        return wakeup

    def _leave_the_workers_group(self) -> None:
        """Keep a Ctrl-C in the worker's terminal away: the worker decides when its agents stop."""
        with contextlib.suppress(PermissionError):  # raised when it already leads a group of its own
            os.setsid()

    def _prctl(self, option: int, value: int) -> None:
        if sys.platform == "linux":
            self.libc.prctl(option, value, 0, 0, 0)

    def _watch_worker(self) -> None:
        # Without a pidfd the parent is looked at every PARENT_CHECK_MS.
        with contextlib.suppress(AttributeError, OSError):
            self.poll.register(os.pidfd_open(self.worker), select.POLLIN)

    def _record(self) -> None:
        content: dict[str, Any] = {"mark": self.mark, "guard": {"pid": os.getpid(), "start": start_time(os.getpid())}}
        if self.agent:
            content["agent"] = {"pid": self.agent, "start": start_time(self.agent)}
        write_process_file(self.process_file, content)

    def _become_agent(self) -> None:
        """Run in the forked child: become the agent, in a session of its own, dead when the guard dies."""
        try:
            guard = os.getppid()
            self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            for number in RESET_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            if os.getppid() == guard:
                os.execvpe(self.argv[0], self.argv, self.env)  # noqa: S606 - no shell is what is wanted
        except OSError as error:
            os.write(2, f"{self.argv[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)

    def _give_up_streams(self) -> None:
        """Close the agent's pipes here, so that their other ends see its end and nothing later."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)
        os.close(nowhere)

    def _wait(self, timeout_ms: int) -> bytes:
        """Wait for a signal or the end of the worker; return the signals' numbers."""
        self.poll.poll(timeout_ms)
        try:
            return os.read(self.wakeup, 1024)
        except BlockingIOError:
            return b""

    def _must_stop(self) -> bool:
        arrived = self._wait(PARENT_CHECK_MS)
        return any(number in arrived for number in STOP_SIGNALS) or os.getppid() != self.worker

    def _reap(self) -> None:
        """Collect ended children, adopted ones too, and remember how the agent ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.agent:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code

    def _end_tree(self) -> None:
        """Ask all to end, then, after the grace, kill until none is left."""
        self._signal_tree(signal.SIGTERM)
        deadline = time.monotonic() + self.term_grace_s
        self._reap()
        while self._tree_lives():
            if time.monotonic() >= deadline:
                self._signal_tree(signal.SIGKILL)
            self._wait_for_child()
            self._reap()

    def _wait_for_child(self) -> None:
        """Sleep one round. The end of the worker is no news here, and would make the pidfd ready for ever."""
        select.select([self.wakeup], [], [], SWEEP_MS / 1000)
        self._wait(0)

    def _tree_lives(self) -> bool:
        if HAS_PROC:
            return bool(descendants(os.getpid()))
        try:
            os.killpg(self.agent, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _signal_tree(self, number: int) -> None:
        for pid in descendants(os.getpid()):
            send(pid, number)
        if not HAS_PROC and self._tree_lives():
            os.killpg(self.agent, number)


def main() -> int:
    """Read the spec that `sys.argv` names, remove it (it holds the agent's environment) and run the agent."""
    path, *arguments = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    os.unlink(path)
    return Guard(spec, arguments).run()


if __name__ == "__main__":
    sys.exit(main())
