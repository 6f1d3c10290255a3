"""The embedded platform as a process: `python -m fleet.sandbox.platform_server --data DIR [--port P]`.

It listens on 127.0.0.1 unless `--host` names another address, prints `listening on URL` when it does, and ends on
SIGTERM or SIGINT. The API keys come from `FLEET_PLATFORM_WORKER_KEY` and `FLEET_PLATFORM_PERSON_KEY`, else from
DIR/keys.json, which the first start writes.

For tests and demos, `running_platform` runs it in a child process.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import uvicorn
from starlette.types import Scope

from fleet.sandbox.platform_api import PlatformApi
from fleet.sandbox.platform_conditions import ITEM_CAP_BYTES, PAGE_MAX_ROWS, Conditions, Rehearsal
from fleet.sandbox.platform_store import PlatformStore
from fleet.sandbox.platform_values import PlatformRefusal, Revision, User

ORG_ID = "local"
BLOB_ID = "demo"
REVISION_ID = "demo-draft"
SESSION_ID = "demo-session"
SESSION_ALIAS = "demo"
WORKER = User("user-worker", "Fleet Worker", "worker@fleet.test", is_admin=False)
PERSON = User("user-person", "Demo Person", "person@fleet.test", is_admin=True)

WORKER_KEY_VARIABLE = "FLEET_PLATFORM_WORKER_KEY"
PERSON_KEY_VARIABLE = "FLEET_PLATFORM_PERSON_KEY"

#: Seconds; longer than a client keeps an idle connection, so that none is closed under a request.
KEEP_ALIVE_S = 75
#: Seconds until a child process must listen; a loaded machine needs several for the imports alone.
START_DEADLINE_S = 30.0
#: Seconds until a child process that was asked to end is killed.
STOP_DEADLINE_S = 5.0
#: Seconds that answers under way get when the server stops.
STOP_GRACE_S = 1
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Keys:
    """The API keys of the two users."""

    worker: str = field(repr=False)
    person: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RunningPlatform:
    """A platform in a child process, and what is needed to talk to it."""

    url: str
    pid: int
    worker_key: str = field(repr=False)
    person_key: str = field(repr=False)
    org_id: str = ORG_ID
    blob_id: str = BLOB_ID
    revision_id: str = REVISION_ID
    session_id: str = SESSION_ID
    session_alias: str = SESSION_ALIAS
    worker_user_id: str = WORKER.id
    person_user_id: str = PERSON.id


def load_keys(data_dir: Path) -> Keys:
    """Return the API keys of the platform in `data_dir`; what neither environment nor file names is made and kept.

    Raises:
        ValueError: both users have the same key.
    """
    path = data_dir / "keys.json"
    if not path.exists():
        made = {"worker": secrets.token_urlsafe(32), "person": secrets.token_urlsafe(32)}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(made, file)
    kept = json.loads(path.read_text())
    keys = Keys(
        os.environ.get(WORKER_KEY_VARIABLE) or kept["worker"], os.environ.get(PERSON_KEY_VARIABLE) or kept["person"]
    )
    if keys.worker == keys.person:
        raise ValueError(f"{WORKER_KEY_VARIABLE} and {PERSON_KEY_VARIABLE} must differ: a key tells who is calling")
    return keys


def open_store(data_dir: Path) -> PlatformStore:
    """Open the store in `data_dir` with both users, a writable revision and a session; what is there already stays."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    keys = load_keys(data_dir)
    store = PlatformStore(data_dir / "platform.db")
    store.put_user(WORKER, keys.worker)
    store.put_user(PERSON, keys.person)
    store.add_revision(Revision(REVISION_ID, ORG_ID, BLOB_ID, "draft", "ready"))
    try:
        store.add_session(REVISION_ID, session_id=SESSION_ID, alias=SESSION_ALIAS)
    except PlatformRefusal as refusal:
        if refusal.code != "session_exists":
            raise
    return store


class _Server(uvicorn.Server):
    """Announces that it listens, and lets go of waiting requests when it stops."""

    def __init__(self, config: uvicorn.Config, api: PlatformApi, ready_file: Path | None) -> None:
        super().__init__(config)
        self._api = api
        self._ready_file = ready_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        url = f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"
        if self._ready_file is not None:
            _write_atomically(self._ready_file, json.dumps({"url": url, "pid": os.getpid()}))
        print(f"listening on {url}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._api.stop()
        await super().shutdown(sockets)


def serve(
    data_dir: Path, port: int, conditions: Conditions, ready_file: Path | None = None, host: str = "127.0.0.1"
) -> None:
    """Serve until SIGTERM or SIGINT, then exit with status 0. Port 0 is any free one."""
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    for signum in (signal.SIGTERM, signal.SIGINT):
        # uvicorn handles the signal itself, and raises it once more when it has shut down.
        signal.signal(signum, lambda *_: sys.exit(0))
    store = open_store(data_dir)

    def cut_connection(scope: Scope) -> None:
        for connection in server.server_state.connections:
            if getattr(connection, "client", None) == scope["client"]:
                connection.transport.abort()

    api = PlatformApi(store, Rehearsal(conditions), cut_connection)
    config = uvicorn.Config(
        api.app(),
        host=host,
        port=port,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_GRACE_S,
        proxy_headers=False,
    )
    server = _Server(config, api, ready_file)
    try:
        server.run()
    finally:
        store.close()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


@contextmanager
def running_platform(data_dir: Path, **conditions: Any) -> Iterator[RunningPlatform]:
    """Run the platform in a child process; `conditions` are those of `Conditions`.

    Its output goes to DIR/platform.log. The child ends with the block, and also when the thread that entered the block
    ends, however that happens.

    Raises:
        RuntimeError: it did not come to listen.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    ready_file, log_file = data_dir / "ready.json", data_dir / "platform.log"
    ready_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "fleet.sandbox.platform_server", "--data", str(data_dir)]
    command += ["--port", "0", "--ready-file", str(ready_file), "--parent", str(os.getpid())]
    with log_file.open("ab") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = _await_ready(child, ready_file, log_file)
        keys = load_keys(data_dir)
        if conditions:
            headers = {"X-API-Key": keys.person}
            httpx.post(
                f"{url}/sandbox/conditions", headers=headers, json=conditions, trust_env=False
            ).raise_for_status()
        yield RunningPlatform(url, child.pid, keys.worker, keys.person)
    finally:
        child.terminate()
        try:
            child.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _await_ready(child: subprocess.Popen[bytes], ready_file: Path, log_file: Path) -> str:
    deadline = time.monotonic() + START_DEADLINE_S
    while not ready_file.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            tail = log_file.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the embedded platform did not come to listen (status {child.poll()}): {tail}")
        time.sleep(_POLL_S)
    url: str = json.loads(ready_file.read_text())["url"]
    return url


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _end_with(parent_pid: int) -> None:
    """Have the kernel, where it is Linux, end this process when its parent ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("the parent process has ended")


@click.command()
@click.option("--data", "data_dir", type=click.Path(path_type=Path), required=True, help="Folder for data and keys.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; 0 is any free one.")
@click.option("--ready-file", type=click.Path(path_type=Path), help='Gets {"url", "pid"} when the platform listens.')
@click.option("--parent", type=int, help="Id of the parent process, with which this one ends (Linux).")
@click.option("--latency-ms", type=click.FloatRange(0), default=0.0, help="How long each request waits.")
@click.option("--list-lag-ms", type=click.FloatRange(0), default=0.0, help="How long lists lag behind.")
@click.option("--max-page", type=click.IntRange(1, PAGE_MAX_ROWS), default=PAGE_MAX_ROWS, help="Rows in a page.")
@click.option(
    "--item-cap-bytes", type=click.IntRange(1), default=ITEM_CAP_BYTES, help="Size of an item that is refused."
)
@click.option("--created-at", type=click.Choice(["iso", "ms"]), default="iso", help="How times are shown.")
@click.option("--object-types/--no-object-types", default=True, help="Whether lists of objects name types.")
def main(data_dir: Path, host: str, port: int, ready_file: Path | None, parent: int | None, **conditions: Any) -> None:
    """Run the embedded platform: BlobHub's API on this machine."""
    if parent is not None:
        _end_with(parent)
    serve(data_dir, port, Conditions(**conditions), ready_file, host)


if __name__ == "__main__":
    main()
