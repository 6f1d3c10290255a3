from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fleet import supervisor
from fleet.supervisor import Child, ChildNotReadyError, Supervisor, restart_pause
from tests.support import wait_until

#: Notes in the journal "up NAME PID", runs a grandchild, and notes "down NAME" at SIGTERM, which `deaf` ignores.
CHILD = """
import os, pathlib, signal, subprocess, sys, time
name, deaf = sys.argv[1], "deaf" in sys.argv[2:]
journal = open(os.environ["JOURNAL"], "a", buffering=1)
def down(*_):
    if not deaf:
        print("down", name, file=journal)
        os._exit(0)
signal.signal(signal.SIGTERM, down)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("hello from", name, flush=True)
print("up", name, os.getpid(), grandchild.pid, file=journal)
while True: time.sleep(300)
"""

#: A supervisor as a program: children, log folder and whether it is verbose come as JSON.
PROGRAM = """
import json, os, pathlib, sys
from fleet.supervisor import Child, Supervisor
setup = json.loads(sys.argv[1])
def is_up(name):
    return lambda: f"up {name} " in pathlib.Path(os.environ["JOURNAL"]).read_text()
children = [
    Child(name, tuple(c["argv"]), dict(os.environ), is_up(name), c["ready_timeout_s"], c["grace_s"])
    for name, c in setup["children"].items()
]
sup = Supervisor(children, pathlib.Path(setup["logs"]), verbose=setup["verbose"])
sys.exit(sup.run(on_ready=lambda: print("ready", flush=True)))
"""


class Program:
    """A supervisor that runs as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder / "logs"
        self.stderr = folder / "stderr"
        self.journal = folder / "journal"
        self.journal.touch()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *children: str, verbose: bool = False, prefix: tuple[str, ...] = (), **settings) -> None:
        """Start it with children by name; a name that ends in `-deaf` ignores SIGTERM."""
        settings = {"ready_timeout_s": 10, "grace_s": 10} | settings
        specs = {
            name: {"argv": [sys.executable, "-c", CHILD, name, *name.split("-")[1:]]} | settings for name in children
        }
        setup = json.dumps({"children": specs, "logs": str(self.logs), "verbose": verbose})
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-c", PROGRAM, setup],
                env=os.environ | {"JOURNAL": str(self.journal)},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def said(self) -> list[str]:
        """The lines of the journal, without process ids."""
        return [" ".join(line.split()[:2]) for line in self.journal.read_text().splitlines()]

    def pids(self, name: str = "") -> list[int]:
        """Every process that the children named `name` (or all) ever told of."""
        lines = [line.split() for line in self.journal.read_text().splitlines()]
        return [int(pid) for line in lines if line[0] == "up" and name in ("", line[1]) for pid in line[2:]]

    def wait_up(self, *names: str) -> None:
        wait_until(lambda: {f"up {name}" for name in names} <= set(self.said()), message=f"{names} did not start")

    def ask(self, signum: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def status(self) -> int:
        assert self.process is not None
        return self.process.wait(20)


@pytest.fixture
def program(tmp_path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    if program.process is not None and program.process.poll() is None:
        program.process.kill()
        program.process.wait()


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    before = set(psutil.Process().children())
    yield
    assert set(psutil.Process().children()) <= before


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _status(pid) not in (None, psutil.STATUS_ZOMBIE)]


def _status(pid: int) -> str | None:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


def sleeper(name: str, *, code: str = "import time; time.sleep(300)", **settings) -> Child:
    return Child(name, (sys.executable, "-c", code), dict(os.environ), **settings)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_children_start_in_order_and_stop_in_reverse(program, signum):
    program.start("one", "two", "three")
    program.wait_up("one", "two", "three")
    program.ask(signum)
    assert program.status() == 0
    assert program.said() == ["up one", "up two", "up three", "down three", "down two", "down one"]
    assert alive(program.pids()) == []


def test_a_child_that_dies_is_started_again_and_its_group_is_gone(program):
    program.start("one", "two")
    program.wait_up("one", "two")
    first = program.pids("one")
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: len(program.pids("one")) == 4, message="no restart")
    assert alive(first) == []
    assert program.said().count("up two") == 1
    assert "one ended with status 137; it starts again in 1 s" in program.stderr.read_text()
    program.ask(signal.SIGTERM)
    assert program.status() == 0
    assert alive(program.pids()) == []


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(program):
    program.start("one", "two-deaf", grace_s=0.3)
    program.wait_up("one", "two-deaf")
    program.ask(signal.SIGTERM)
    assert program.status() == 0
    assert program.said()[-1] == "down one"
    assert alive(program.pids()) == []


def test_a_second_ctrl_c_kills_at_once(program):
    program.start("one-deaf", "two-deaf", grace_s=300)
    program.wait_up("one-deaf", "two-deaf")
    program.ask(signal.SIGINT)
    wait_until(lambda: "Ctrl-C kills at once" in program.stderr.read_text())
    program.ask(signal.SIGINT)
    assert program.status() == 0
    assert alive(program.pids()) == []


def test_a_second_sigterm_shortens_no_grace(program):
    program.start("one-deaf", grace_s=1.5)
    program.wait_up("one-deaf")
    for _ in range(3):
        program.ask(signal.SIGTERM)
        program.ask(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        program.process.wait(1)
    assert program.status() == 0


def test_a_killed_supervisor_leaves_no_child(program):
    program.start("one", "two")
    program.wait_up("one", "two")
    program.ask(signal.SIGKILL)
    program.status()
    children = [program.pids("one")[0], program.pids("two")[0]]
    wait_until(lambda: not alive(children), message="children outlive their supervisor")
    assert sorted(program.said()[2:]) == ["down one", "down two"]
    for grandchild in alive(program.pids()):  # a real child ends its own
        os.kill(grandchild, signal.SIGKILL)


def test_a_supervisor_under_nohup_outlives_its_terminal(program):
    program.start("one", prefix=("nohup",))
    program.wait_up("one")
    program.ask(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        program.process.wait(0.5)
    program.ask(signal.SIGTERM)
    assert program.status() == 0


def test_a_stop_is_heeded_while_children_start(program):
    program.start("one", "two", ready_timeout_s=300)
    program.wait_up("one")
    program.ask(signal.SIGTERM)
    assert program.status() == 0
    assert alive(program.pids()) == []


def test_a_child_that_ends_before_it_is_ready_ends_all_with_its_last_words(tmp_path, capfd):
    failing = sleeper("two", code="print('no such broker'); raise SystemExit(3)", ready=lambda: False)
    assert Supervisor([sleeper("one"), failing], tmp_path).run(on_ready=pytest.fail) == 1
    log = tmp_path / "two.log"
    assert f"two ended with status 3 before it was ready; its log {log} ends with:\nno such broker" in said(capfd)


def test_a_child_that_is_not_ready_in_time_ends_all(tmp_path):
    slow = sleeper("two", ready=lambda: False, ready_timeout_s=0.3)
    with (
        pytest.raises(ChildNotReadyError, match="two was not ready within"),
        Supervisor([sleeper("one"), slow], tmp_path),
    ):
        pytest.fail("a child is not ready")


def test_the_last_words_are_those_of_this_run(tmp_path, capfd):
    for word in ("earlier", "now"):
        child = sleeper("one", code=f"print('{word}'); raise SystemExit(1)", ready=lambda: False)
        assert Supervisor([child], tmp_path).run() == 1
    assert said(capfd).endswith("ends with:\nnow\n")
    assert (tmp_path / "one.log").read_text() == "earlier\nnow\n"


def test_a_missing_executable_is_named(tmp_path):
    child = Child("one", ("no-such-program",), {}, ready=lambda: False)
    with pytest.raises(ChildNotReadyError, match="no-such-program: No such file"), Supervisor([child], tmp_path):
        pytest.fail("there is no such program")


def test_the_end_of_a_child_without_restart_ends_all_with_its_status(tmp_path):
    last = sleeper("last", code="raise SystemExit(7)", restart=False)
    assert Supervisor([sleeper("one"), last], tmp_path).run() == 7


def test_all_children_are_up_when_the_program_is_told_so(tmp_path):
    asked = iter([False, False, True])
    order = []
    child = sleeper("one", ready=lambda: order.append("asked") or next(asked))
    end = sleeper("end", code="pass", restart=False)
    assert Supervisor([child, end], tmp_path).run(on_ready=lambda: order.append("told")) == 0
    assert order == ["asked", "asked", "asked", "told"]


def test_the_children_of_a_group_come_up_at_once_and_the_next_group_after_all_of_them(tmp_path):
    up = set()

    def needs(*others: str, name: str) -> Callable[[], bool]:
        return lambda: up.add(name) or up.issuperset(others)

    group = [sleeper("a", ready=needs("b", name="a")), sleeper("b", ready=needs("a", name="b"))]
    last = sleeper("last", ready=needs("a", "b", name="last"), ready_timeout_s=0)
    with Supervisor([group, last], tmp_path):
        assert up == {"a", "b", "last"}


def test_a_group_has_one_grace_for_all(tmp_path):
    deaf = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
    names = ["a", "b", "c", "d"]
    group = [
        sleeper(name, code=deaf + "time.sleep(300)", grace_s=0.5, ready=(tmp_path / f"{name}.log").read_text)
        for name in names
    ]
    with Supervisor([group], tmp_path):
        began = time.monotonic()
    assert time.monotonic() - began < 0.5 * len(names)


def test_children_of_a_group_start_and_stop_at_once(tmp_path, capfd):
    meet = """
import pathlib, signal, sys, time
own, other = map(pathlib.Path, sys.argv[1:])
def meet(event):
    own.with_suffix(event).touch()
    while not other.with_suffix(event).exists(): time.sleep(0.01)
signal.signal(signal.SIGTERM, lambda *_: meet(".down") or sys.exit())
meet(".up")
while True: time.sleep(300)
"""
    a, b = tmp_path / "a", tmp_path / "b"
    pair = [
        Child("a", (sys.executable, "-c", meet, str(a), str(b)), {}, ready=b.with_suffix(".up").exists),
        Child("b", (sys.executable, "-c", meet, str(b), str(a)), {}, ready=a.with_suffix(".up").exists),
    ]
    end = sleeper("end", code="pass", restart=False)
    assert Supervisor([pair, end], tmp_path).run() == 0
    assert "killed" not in said(capfd)


def test_pauses_between_restarts_grow_to_half_a_minute():
    assert [restart_pause(deaths) for deaths in (1, 2, 3, 4, 5, 6, 1000)] == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(("healthy_after", "deaths"), [(60, [1, 2, 3]), (0, [1, 1, 1])])
def test_a_time_of_health_makes_the_pauses_short_again(tmp_path, monkeypatch, healthy_after, deaths):
    counted = []
    monkeypatch.setattr(supervisor, "HEALTHY_S", healthy_after)
    monkeypatch.setattr(supervisor, "restart_pause", lambda deaths: counted.append(deaths) or 0.0)
    with Supervisor([sleeper("one", code="pass")], tmp_path) as running:
        checked_until(running, lambda: len(counted) >= 3)
    assert counted[:3] == deaths


def test_a_child_that_cannot_be_started_again_is_tried_later(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.05)
    with Supervisor([sleeper("one", code="pass")], tmp_path / "logs") as running:
        wait_until(lambda: (tmp_path / "logs").exists())
        with monkeypatch.context() as full:
            full.setattr(supervisor, "open_log", no_space)
            checked_until(running, lambda: "can't be started (no space)" in said(capfd))
        checked_until(running, lambda: "ended with status 0" in said(capfd))


def test_a_log_is_for_its_owner_alone_and_is_shown_only_when_asked_for(tmp_path, capfd):
    for verbose in (False, True):
        child = sleeper("one", code="print('hello'); print('no line end', end='')", restart=False)
        assert Supervisor([child], tmp_path / "logs", verbose=verbose).run() == 0
        assert ("one | hello\none | no line end\n" in said(capfd)) == verbose
    log = tmp_path / "logs" / "one.log"
    assert log.read_text() == "hello\nno line end" * 2
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.parent.stat().st_mode & 0o777 == 0o700


def test_a_log_that_grows_too_long_starts_anew_and_the_one_before_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LOG_LIMIT_BYTES", 1000)
    code = "import time\nwhile True: print('x' * 100, flush=True); time.sleep(0.001)"
    log = tmp_path / "one.log"
    with Supervisor([sleeper("one", code=code)], tmp_path) as running:
        checked_until(running, (tmp_path / "one.log.1").exists)
        wait_until(lambda: log.stat().st_size > 0)
    assert log.read_bytes()[:1] == b"x"
    assert (tmp_path / "one.log.1").stat().st_mode & 0o777 == 0o600


def test_a_child_has_a_session_an_environment_and_no_input_of_its_own(tmp_path):
    read, write = os.pipe()
    code = f"""
import os, sys
told = [os.getsid(0) == os.getpid(), os.environ.get("MINE"), "HOME" in os.environ, sys.stdin.read()]
os.write({write}, repr(told).encode())
"""
    child = Child("one", (sys.executable, "-c", code), {"MINE": "1"}, restart=False, pass_fds=(write,))
    try:
        assert Supervisor([child], tmp_path).run() == 0
        assert os.read(read, 1000).decode() == "[True, '1', False, '']"
    finally:
        os.close(read)
        os.close(write)


def said(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


def checked_until(running: Supervisor, condition: Callable[[], bool]) -> None:
    def checked() -> bool:
        running.check()
        return condition()

    wait_until(checked)


def no_space(path: Path) -> None:
    raise OSError("no space")
