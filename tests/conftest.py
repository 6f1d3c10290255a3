"""What every room shares: a real Redis per test process, and the promise that no process is left behind."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator

import psutil
import pytest
import redis

from fleet.sandbox.redis_server import RunningRedis, start_redis

#: Inherited by what the tests start, so that a process is known as theirs after its parent died.
MARK = "FLEET_TESTS"

#: Seconds that processes which are just ending get to do so.
LEAVE_S = 5.0


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail at the end when anything that the tests started is still running, and end it."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    yield
    left = {*psutil.Process().children(recursive=True), *_marked(mark)}
    _, alive = psutil.wait_procs([process for process in left if not _is_python_helper(process)], timeout=LEAVE_S)
    lines = [f"{process.pid}: {_command(process)}" for process in alive]
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert not alive, "the tests left processes behind:\n" + "\n".join(lines)


@pytest.fixture(scope="session")
def redis_server(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRedis]:
    """A real Redis, one for each test process."""
    with start_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RunningRedis) -> str:
    """The URL, with its password, of a Redis that is empty."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                yield process
        except psutil.Error:
            continue


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "(gone)"


def _is_python_helper(process: psutil.Process) -> bool:
    """Tell whether it is Python's own resource tracker, which ends with this process and not before."""
    return "multiprocessing.resource_tracker" in _command(process)
