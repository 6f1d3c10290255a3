"""What a worker process does besides its tasks: the heartbeat of its host, its metrics, and a clean end."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from celery.signals import (
    heartbeat_sent,
    worker_process_init,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)
from redis.exceptions import RedisError

from fleet import __version__, reconcile
from fleet.celery import host_queue, turns_queue
from fleet.context import Fleet
from fleet.hosts import HEARTBEAT_S, Host, resolved_roots
from tasks.metrics import serve_metrics
from tasks.runtime import forget_loop, loop, run
from tasks.turns import INTERRUPT_SIGNAL

log = logging.getLogger(__name__)

#: prctl(2): the signal that a process gets when its parent ends.
PR_SET_PDEATHSIG = 1

#: Pid of the worker, as its forked pool processes see it.
WORKER_PID = os.getpid()


def _begin_pool_process(**_: Any) -> None:
    """Give a pool process a loop of its own, and let it end with its worker."""
    forget_loop()
    signal.signal(INTERRUPT_SIGNAL, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != WORKER_PID:  # it ended before the signal was asked for
            os._exit(1)


def _begin_heartbeat(sender: Any, **_: Any) -> None:
    """Register the host, if this is the worker of its short work. FLEET_READY_FILE appears once it takes tasks."""
    host = run(_this_host)
    if host_queue(host.name) in _queues(sender):
        loop().start(lambda fleet: _beat(fleet, host))
        serve_metrics()
        worker_shutdown.connect(lambda **_: run(_leave), weak=False)
    if turns_queue(host.name) in _queues(sender):
        grace_s = run(_grace_s)
        worker_shutting_down.connect(lambda **_: _interrupt_after(grace_s, sender.controller), weak=False)
    if ready_file := os.environ.get("FLEET_READY_FILE"):
        Path(ready_file).touch()


def _keep_ready_file_young(**_: Any) -> None:
    """Touch FLEET_READY_FILE with every heartbeat that Celery sends: a health check looks at its age alone."""
    if ready_file := os.environ.get("FLEET_READY_FILE"):
        with suppress(FileNotFoundError):
            os.utime(ready_file)


def _queues(consumer: Any) -> set[str]:
    return {queue.name for queue in consumer.task_consumer.queues}


async def _grace_s(fleet: Fleet) -> float:
    return fleet.config.turns.shutdown_grace_s


def _interrupt_after(grace_s: float, worker: Any) -> None:
    """Let running turns end for a while, then interrupt them: they go on when the host is back."""

    def interrupt() -> None:
        for process in list(worker.pool._pool._pool):
            with suppress(ProcessLookupError):
                os.kill(process.pid, INTERRUPT_SIGNAL)

    timer = threading.Timer(grace_s, interrupt)
    timer.daemon = True
    timer.start()


async def _this_host(fleet: Fleet) -> Host:
    name = fleet.host
    configured = fleet.config.hosts.get(name)
    return Host(
        name=name,
        work_folders=configured.work_folders if configured else (),
        roots=resolved_roots(configured.work_folders if configured else ()),
        max_agents=(configured and configured.max_agents) or fleet.config.concurrency.max_agents,
        agents=tuple(sorted(fleet.agents)),
        version=__version__,
    )


async def _leave(fleet: Fleet) -> None:
    """Say that the host is down; without Redis, its heartbeat that stops will say so."""
    with suppress(RedisError):
        await fleet.hosts.leave(fleet.host)


async def _beat(fleet: Fleet, host: Host) -> None:
    while True:
        try:
            if await fleet.hosts.beat(host):
                log.info("host %s is up, roots %s", host.name, ", ".join(host.work_folders))
                await reconcile.host_came(fleet)
        except (RedisError, OSError) as error:
            log.warning("no heartbeat: %s", error)
        await asyncio.sleep(HEARTBEAT_S)


worker_process_init.connect(_begin_pool_process)
worker_ready.connect(_begin_heartbeat)
heartbeat_sent.connect(_keep_ready_file_young)
