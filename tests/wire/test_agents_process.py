"""Nothing of an agent outlives its turn, whatever ends it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from agents import guard, process
from tests.support import wait_until

PYTHON = [sys.executable, "-I", "-S", "-c"]

#: An agent that ignores SIGTERM, with a child, and a daemon in a session of its own. It writes their pids in one line.
TREE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
out, into = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    daemon = os.fork()
    if daemon == 0:
        time.sleep(60)
    os.write(into, str(daemon).encode())
    if sys.argv[1] == "daemon":
        os._exit(0)
    time.sleep(60)
daemon = int(os.read(out, 20))
print(os.getpid(), child, daemon, flush=True)
time.sleep(float(sys.argv[2]))
"""

#: A worker that runs TREE and hands its line on.
WORKER = """
import asyncio, sys
from pathlib import Path
from agents import process

async def main():
    argv, folder = [*sys.argv[3:]], Path(sys.argv[1])
    async with process.running(argv, env={}, cwd=folder, process_file=folder / "process.json") as agent:
        print((await agent.stdout.readline()).decode(), end="", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: list[int], deadline_s: float = 5) -> None:
    wait_until(lambda: not any(lives(pid) for pid in pids), deadline_s, "a process is still alive")


def pids_in(line: bytes) -> list[int]:
    return [int(pid) for pid in line.split()]


def tree(mode: str, seconds: float) -> list[str]:
    return [*PYTHON, TREE, mode, str(seconds)]


@pytest.fixture
def process_file(tmp_path: Path) -> Path:
    return tmp_path / "process.json"


def start(argv: list[str], process_file: Path, **options) -> subprocess.Popen[bytes]:
    command = process.guard_command(argv, env=options.pop("agent_env", {}), process_file=process_file)
    return subprocess.Popen(command, stdout=subprocess.PIPE, **options)


@pytest.mark.parametrize("mode", ["child", "daemon"])
def test_the_sudden_end_of_a_worker_ends_its_agents_whole_tree(tmp_path: Path, mode: str):
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path), "--", *tree(mode, 60)], stdout=subprocess.PIPE
    )
    with worker:
        pids = pids_in(worker.stdout.readline())
        guard_pid = json.loads((tmp_path / "process.json").read_text())["guard"]["pid"]
        assert lives(pids[0])
        assert lives(pids[2])
        worker.kill()
    wait_until_gone([*pids, guard_pid])


def test_the_end_of_the_thread_that_started_an_agent_is_not_the_end_of_the_worker(process_file: Path):
    started: list[subprocess.Popen[bytes]] = []
    cat = [*PYTHON, "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"]
    thread = threading.Thread(target=lambda: started.append(start(cat, process_file, stdin=subprocess.PIPE)))
    thread.start()
    thread.join()
    with started[0] as agent:
        agent.stdin.write(b"still here\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == b"still here\n"
        process.end_leftovers(process_file)


def test_a_tree_that_ignores_sigterm_is_stopped_in_less_than_0_7_seconds(tmp_path: Path, process_file: Path):
    async def run() -> tuple[list[int], float]:
        async with process.running(tree("daemon", 60), env={}, cwd=tmp_path, process_file=process_file) as agent:
            pids = pids_in(await agent.stdout.readline())
            began = time.monotonic()
        return pids, time.monotonic() - began

    pids, took_s = asyncio.run(run())
    assert [pid for pid in pids if lives(pid)] == []
    assert took_s < 0.7
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_turn_is_over_only_when_its_tree_is_gone(tmp_path: Path, process_file: Path):
    async def run() -> list[int]:
        started = asyncio.get_running_loop().create_future()

        async def turn() -> None:
            async with process.running(tree("child", 60), env={}, cwd=tmp_path, process_file=process_file) as agent:
                started.set_result(pids_in(await agent.stdout.readline()))
                await asyncio.sleep(60)

        task = asyncio.create_task(turn())
        pids = await started
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [pid for pid in pids if lives(pid)]

    assert asyncio.run(run()) == []


def test_an_agent_that_ends_takes_its_daemons_along_and_hands_on_its_status(process_file: Path):
    with start([*PYTHON, TREE + "\nsys.exit(7)", "daemon", "0"], process_file) as agent:
        pids = pids_in(agent.stdout.readline())
        assert agent.wait(10) == 7
    wait_until_gone(pids, 0.1)


def test_an_agent_that_is_killed_ends_its_guard_with_137(process_file: Path):
    with start(tree("child", 60), process_file) as agent:
        pids = pids_in(agent.stdout.readline())
        os.kill(pids[0], signal.SIGKILL)
        assert agent.wait(10) == 137
    wait_until_gone(pids, 0.1)


def test_what_a_killed_guard_left_behind_is_ended_before_the_next_attempt(process_file: Path):
    with start(tree("daemon", 60), process_file) as agent:
        pids = pids_in(agent.stdout.readline())
        agent.kill()
        agent.wait()
    wait_until_gone(pids[:1])  # it dies with its guard
    assert lives(pids[2])
    assert process.end_leftovers(process_file) == 1
    assert not lives(pids[2])
    assert not process_file.exists()
    assert process.end_leftovers(process_file) == 0


def test_a_pid_that_was_given_to_another_process_is_left_alone(process_file: Path):
    with start([*PYTHON, "import time\ntime.sleep(60)"], process_file) as agent:
        recorded = wait_until(lambda: json.loads(process_file.read_text()).get("guard"))
        innocent = {"pid": agent.pid, "start": recorded["start"]}
        stale = process_file.with_name("stale.json")
        stale.write_text(json.dumps({"mark": "0" * 32, "guard": innocent, "agent": innocent}))
        assert process.end_leftovers(stale) == 0
        assert lives(agent.pid)
        process.end_leftovers(process_file)
        assert agent.wait(5) is not None


def test_neither_agent_nor_guard_has_the_workers_environment(process_file: Path, tmp_path: Path):
    show = [*PYTHON, "import json, os\nprint(json.dumps(dict(os.environ)), flush=True)\nimport time; time.sleep(60)"]
    secret = "s3cr3t-of-the-worker"
    own = {"PATH": "/usr/bin", "MODEL_KEY": "k3y-of-the-agent"}
    with start(show, process_file, env={**os.environ, "BLOBHUB_API_KEY": secret}, agent_env=own) as agent:
        environment = json.loads(agent.stdout.readline())
        assert environment.pop(guard.MARK_VARIABLE) == json.loads(process_file.read_text())["mark"]
        assert {key: environment[key] for key in own} == own
        assert set(environment) - set(own) <= {"LC_CTYPE"}  # set by Python itself in a C locale
        for pid in (agent.pid, *guard.descendants(agent.pid)):
            assert secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
            assert own["MODEL_KEY"].encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert own["MODEL_KEY"].encode() not in b"".join(each.read_bytes() for each in tmp_path.iterdir())
        process.end_leftovers(process_file)


def test_an_agent_gets_the_default_signal_dispositions_back(process_file: Path):
    show = [*PYTHON, "import signal\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a Celery pool process
    try:
        with start(show, process_file) as agent:
            assert agent.stdout.readline() == b"True\n"
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_agent_that_cannot_be_started_ends_with_127_and_says_why(process_file: Path):
    with start(["/no/such/agent"], process_file, stderr=subprocess.PIPE) as agent:
        assert agent.wait(10) == 127
        assert agent.stderr.read() == b"/no/such/agent: No such file or directory\n"


def test_lines_are_split_at_newline_bytes_only():
    async def run() -> list[bytes]:
        stream = asyncio.StreamReader()
        stream.feed_data("a\u2028b\n".encode() + b"c" * 200_000 + b"\n\ntorn")
        stream.feed_eof()
        return [line async for line in process.read_lines(stream)]

    assert asyncio.run(run()) == ["a\u2028b".encode(), b"c" * 200_000, b""]
