"""A fleet that runs on this machine, found by the other commands and by `celery -A fleet …` in another terminal.

`fleet up` locks its state folder (FLEET_HOME) for as long as it lives, and says in `up.json` there, readable by its
owner alone, where its parts are.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fleet.config import read_environment
from fleet.errors import FleetError

#: Seconds for which a lock is asked for again: a command that only looks holds it for a moment.
LOCK_TIMEOUT_S = 0.5
_POLL_S = 0.02

_UP_FILE = "up.json"


@dataclass(frozen=True, slots=True)
class Up:
    """Where the parts of a running fleet are.

    Parameters:
        source: the configuration that the operator wrote, an absolute path.
        config: the configuration in force; another file where the embedded platform brought a section.
        worker_key_file, person_key_file: the embedded platform's API keys; None when the platform is not embedded.
    """

    pid: int
    source: str
    config: str
    platform_url: str
    redis_url: str = field(repr=False)
    worker_key_file: str | None = None
    person_key_file: str | None = None


@contextmanager
def claimed(home: Path) -> Iterator[None]:
    """Hold the state folder `home`, which is created when it is missing, while the block runs.

    Raises:
        FleetError: `home_in_use` when another fleet holds it.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _lock(folder, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise FleetError("home_in_use", f"FLEET_HOME is {home}, where another fleet is running")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(folder)


@contextmanager
def announced(home: Path, up: Up) -> Iterator[None]:
    """Let other commands find the fleet while the block runs. The caller holds `home`."""
    file = home / _UP_FILE
    write_private(file, json.dumps(asdict(up), indent=2))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def running(home: Path) -> Up | None:
    """Return the fleet that is up in the state folder `home`; None when there is none, or it was killed."""
    try:
        up = Up(**json.loads((home / _UP_FILE).read_text(encoding="utf-8")))
        folder = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError, TypeError):
        return None
    try:
        return None if _lock(folder, fcntl.LOCK_SH) else up
    finally:
        os.close(folder)


def effective_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with what it leaves unsaid filled in from the fleet that is up in its FLEET_HOME.

    With the embedded platform's URL come its keys, also in place of keys that are set: those belong to another
    platform. An `environ` whose FLEET_CONFIG names another configuration means another fleet and stays as it is.

    Raises:
        ConfigError: `config_invalid`, FLEET_HOST can't be the name of a host.
    """
    env = dict(environ)
    up = running(read_environment(env).home)
    configured = env.get("FLEET_CONFIG")
    if up is None or (configured and os.path.realpath(configured) not in _real(up.source, up.config)):
        return env
    env["FLEET_CONFIG"] = up.config
    env["FLEET_REDIS_URL"] = env.get("FLEET_REDIS_URL") or up.redis_url
    if not env.get("BLOBHUB_API_URL"):
        env["BLOBHUB_API_URL"] = up.platform_url
        if up.worker_key_file and up.person_key_file:
            env = without_keys(env)
            env["BLOBHUB_API_KEY_FILE"] = up.worker_key_file
            env["FLEET_PERSON_API_KEY_FILE"] = up.person_key_file
    return env


def without_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without API keys, of workers and of persons."""
    keys = {f"{name}{suffix}" for name in ("BLOBHUB_API_KEY", "FLEET_PERSON_API_KEY") for suffix in ("", "_FILE")}
    return {name: value for name, value in environ.items() if name not in keys}


def write_private(file: Path, text: str) -> None:
    """Replace `file`, whole, by one that its owner alone can read."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        draft.unlink()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as output:
        output.write(text)
    draft.replace(file)


def _lock(folder: int, kind: int) -> bool:
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _real(*files: str) -> set[str]:
    return {os.path.realpath(file) for file in files}
