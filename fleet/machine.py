"""The processes of one machine, as children of a supervisor: what to run, with which arguments and environment."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet.config import FleetConfig
from fleet.hosts import Hosts
from fleet.local import without_keys
from fleet.store import Store
from fleet.supervisor import Child

#: Threads of a worker for short work: tasks wait for Redis and the platform most of the time.
SHORT_WORK_THREADS = 64
#: Seconds that a worker for turns may take to end behind the grace that running turns have.
TURNS_STOP_MARGIN_S = 15.0
#: Seconds a worker may take to come up: most of it is imports, for which many processes share a small machine.
WORKER_READY_TIMEOUT_S = 90.0
#: Queue names, as `fleet.celery` has them; importing Celery here would slow down every command.
_FLEET, _HOST, _TURNS = "fleet", "host.{}", "host.{}.turns"


def celery_command(*arguments: str) -> tuple[str, ...]:
    """Return the command `celery -A fleet ARGUMENTS`, with this very Python."""
    return (sys.executable, "-m", "celery", "-A", "fleet", *arguments)


def beat_command(home: Path) -> tuple[str, ...]:
    """Return the command of the scheduler. It keeps no state: its schedule is an interval."""
    return celery_command("beat", "-l", "info", "-s", str(home / "beat-schedule"), "--pidfile", "")


def beat_child(environ: Mapping[str, str], home: Path) -> Child:
    """Return the scheduler."""
    return Child("beat", beat_command(home), environ, grace_s=5)


def host_children(config: FleetConfig, environ: Mapping[str, str], host: str) -> list[Child]:
    """Return the two workers of a host: `io@HOST` (threads) and `turns@HOST` (prefork).

    The host's state folder is FLEET_HOME of `environ`.
    """
    configured = config.hosts[host]
    places = configured.max_agents or config.concurrency.max_agents
    queue, turns = _HOST.format(host), _TURNS.format(host)
    short = ("-n", f"io@{host}", "-P", "threads", "-c", str(SHORT_WORK_THREADS), "-Q", f"{_FLEET},{queue}")
    long = ("-n", f"turns@{host}", "-P", "prefork", "-c", str(places), "-Q", turns)
    common = ("-l", "info", "--without-mingle", "--without-gossip")
    env = {**environ, "FLEET_HOST": host}
    consuming = Path(environ["FLEET_HOME"]) / f"turns-{host}.ready"
    consuming.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    consuming.unlink(missing_ok=True)
    return [
        Child(
            f"io-{host}",
            celery_command("worker", *short, *common),
            env,
            ready=registered(config, host),
            ready_timeout_s=WORKER_READY_TIMEOUT_S,
        ),
        Child(
            f"turns-{host}",
            celery_command("worker", *long, *common),
            {**env, "FLEET_READY_FILE": str(consuming)},
            ready=consuming.exists,
            ready_timeout_s=WORKER_READY_TIMEOUT_S,
            grace_s=config.turns.shutdown_grace_s + TURNS_STOP_MARGIN_S,
        ),
    ]


def module_child(name: str, module: str, arguments: tuple[str, ...], environ: Mapping[str, str], folder: Path) -> Child:
    """Return a server of `fleet.sandbox`, which tells of its readiness by a file in `folder`."""
    ready = folder / f"{name}.ready"
    ready.unlink(missing_ok=True)
    argv = (sys.executable, "-m", module, *arguments, "--ready-file", str(ready))
    return Child(name, argv, environ, ready=ready.exists)


def registered(config: FleetConfig, host: str) -> Callable[[], bool]:
    """Return a check of whether a host's heartbeat is there."""

    async def alive() -> bool:
        store = Store(str(config.redis.url), config.redis.namespace)
        try:
            return any(h.alive for h in await Hosts(store).all() if h.name == host)
        finally:
            await store.close()

    return lambda: asyncio.run(alive())


def child_environment(
    config: FleetConfig,
    config_file: Path,
    home: Path,
    environ: Mapping[str, str] = os.environ,
    *,
    worker_key_file: Path | None = None,
) -> dict[str, str]:
    """Return the environment that all children share: `environ`, and where everything is.

    `worker_key_file` has the worker's key where the platform is embedded; no other key reaches the children then.
    """
    if worker_key_file:
        environ = {**without_keys(environ), "BLOBHUB_API_KEY_FILE": str(worker_key_file)}
    return {
        **environ,
        "FLEET_CONFIG": str(config_file),
        "FLEET_HOME": str(home),
        "FLEET_REDIS_URL": str(config.redis.url),
        "BLOBHUB_API_URL": config.platform.url,
    }


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
