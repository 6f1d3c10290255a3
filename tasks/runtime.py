"""The bridge from Celery's threads and processes to the asynchronous domain.

Each worker process has one event loop in a thread of its own, with one set of connections: tasks hand it a coroutine
and wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from celery import chain, current_task
from celery.canvas import Signature
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from agents.base import ADAPTERS, has_bundled_cli
from fleet import traces
from fleet.aliases import is_alias, is_id
from fleet.celery import app, host_queue, is_meant_for, turns_queue
from fleet.config import FleetConfig, load_config, read_environment
from fleet.context import Fleet
from fleet.credentials import api_key, signing_key
from fleet.errors import ConfigError, FleetError
from fleet.formats import FORMAT, check_format
from fleet.local import effective_environment
from fleet.logs import about
from fleet.platform.client import PlatformClient
from fleet.platform.errors import PlatformError
from fleet.record import Record
from fleet.redaction import Redactor, secrets_of
from fleet.refs import ThreadRef
from fleet.signing import Seal
from fleet.store import Store

T = TypeVar("T")
P = ParamSpec("P")

log = logging.getLogger(__name__)

#: Header of a task message: its format, see `fleet.formats`. An operator's `celery call` has none.
FORMAT_HEADER = "fleet_format"


class TaskFailedError(Exception):
    """A task failed as nobody foresaw. The worker's log has the reason; the events that Flower shows must not."""


class CeleryNudges:
    """`fleet.context.Nudges` as Celery messages."""

    async def poll_sessions(self, names: list[str]) -> None:
        """Ask any worker to poll these sections."""
        await self._send(_signature("poll_sessions", names))

    async def activate(self, ref: ThreadRef) -> None:
        """Ask any worker to compare a thread's envelope with its record."""
        await self._send(_signature("activate", ref.session, ref.alias))

    async def ingest(self, ref: ThreadRef) -> None:
        """Ask any worker to take in a thread's new items."""
        await self._send(_signature("ingest", ref.session, ref.alias))

    async def start_thread(self, record: Record) -> None:
        """Ask the thread's host to start the epoch of `record`."""
        ref = record.ref
        await self._send(
            _signature("start_thread", ref.session, ref.alias, record.epoch, queue=host_queue(record.host))
        )

    async def run_turn(self, record: Record) -> None:
        """Ask the thread's host for the turn of `record`, and for what follows it."""
        await self._send(chain(_step("run_turn", record, turns_queue(record.host)), *_finish(record)))

    async def finish_turn(self, record: Record) -> None:
        """Ask the thread's host to go on with the turn of `record` behind its run."""
        await self._send(chain(*_finish(record)))

    async def post_items(self, ref: ThreadRef) -> None:
        """Ask any worker to drain a thread's journal."""
        await self._send(_signature("post_items", ref.session, ref.alias))

    async def _send(self, message: Signature) -> None:
        await asyncio.to_thread(message.apply_async)


def _signature(name: str, *args: object, queue: str | None = None) -> Signature:
    headers = {FORMAT_HEADER: FORMAT, **traces.headers()}
    options = {"headers": headers, **({"queue": queue} if queue else {})}
    return app.signature(f"fleet.{name}", args=args, immutable=True, options=options)


def _step(name: str, record: Record, queue: str) -> Signature:
    return _signature(name, record.ref.session, record.ref.alias, record.epoch, record.turn, queue=queue)


def _finish(record: Record) -> list[Signature]:
    queue = host_queue(record.host)
    return [_step("publish_artifacts", record, queue), _step("close_turn", record, queue)]


class Loop:
    """The event loop of a process, in a thread of its own, and the fleet that lives on it."""

    def __init__(self) -> None:
        self.events = asyncio.new_event_loop()
        self._fleet: Fleet | None = None
        threading.Thread(target=self.events.run_forever, name="fleet-loop", daemon=True).start()

    def start(self, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start `work` on the loop, in a copy of the caller's context: it says what logs and traces are about."""
        context = contextvars.copy_context()

        async def run() -> T:
            if self._fleet is None:
                self._fleet = open_fleet()
            return await self.events.create_task(work(self._fleet), context=context)

        return asyncio.run_coroutine_threadsafe(run(), self.events)


_loop: Loop | None = None
_loop_made = threading.Lock()


def loop() -> Loop:
    """Return this process's loop. A forked pool process makes its own, see `forget_loop`."""
    global _loop
    with _loop_made:
        if _loop is None:
            _loop = Loop()
        return _loop


def forget_loop() -> None:
    """Forget the parent's loop in a forked process, where its thread does not exist."""
    global _loop
    _loop = None


def run(work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
    """Run `work` on this process's loop and wait for it."""
    return loop().start(work).result()


def task(name: str, **options: Any) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate the function of a Celery task.

    What may pass is logged in a line and left to whoever looks again: what the task was about stays due
    (`fleet.reconcile`), so nothing is lost by giving up here.
    """

    def decorate(function: Callable[P, None]) -> Callable[P, None]:
        parameters = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def patient(*args: P.args, **kwargs: P.kwargs) -> None:
            where = _where(dict(zip(parameters, args, strict=False)) | kwargs)
            with about(task=name, **where):
                if not is_meant_for(current_task):
                    log.warning("%s: refused, the message was sealed for another task", name)
                    return
                try:
                    check_format(current_task.request.get(FORMAT_HEADER), "a task message")
                    with traces.span(name, current_task.request.get(traces.PARENT_HEADER), where):
                        function(*args, **kwargs)
                except (PlatformError, RedisError, OperationalError, FleetError) as error:
                    log.warning("%s%s will be tried again: %s", name, args, error)
                except Exception:
                    log.exception("%s%s", name, args)
                    raise TaskFailedError from None

        registered: Callable[P, None] = app.task(name=name, **options)(patient)
        return registered

    return decorate


def _where(arguments: Mapping[str, object]) -> dict[str, str | int]:
    """Return which thread a task is about, and where in its life, as far as the message says so in the right form."""
    found: dict[str, str | int] = {}
    with suppress(FleetError):
        ref = thread_ref(arguments.get("session"), arguments.get("alias"))
        found |= {"session": ref.session, "thread": ref.alias}
        for field, parameter in (("epoch", "epoch"), ("turn", "number")):
            if parameter in arguments:
                found[field] = checked_number(arguments[parameter])
    return found


def open_fleet() -> Fleet:
    """Return the services that configuration and environment describe.

    Raises:
        FleetError: the configuration or the key is not usable.
    """
    environ = effective_environment(os.environ)
    config = load_config(None, environ)
    environment = read_environment(environ)
    if config.redis.url is None:
        raise ConfigError("config_invalid", "neither FLEET_REDIS_URL nor redis.url says where Redis is")
    key, signing = api_key(environ, Path.home()), signing_key(environ)
    agents = frozenset(config.agents) & frozenset(ADAPTERS)
    return Fleet(
        config,
        environment,
        Store(config.redis.url, config.redis.namespace),
        PlatformClient(config.platform.url, key),
        CeleryNudges(),
        agents,
        frozenset(filter(has_bundled_cli, agents)),
        Redactor(secrets_of(config, key, signing)),
        Seal(signing),
    )


def configuration() -> tuple[FleetConfig, str, Redactor]:
    """Return this process's configuration, the name of its host, and a redactor of the configuration's secrets."""
    environ = effective_environment(os.environ)
    config = load_config(None, environ)
    secrets = secrets_of(config, api_key(environ, Path.home()), signing_key(environ))
    return config, read_environment(environ).host, Redactor(secrets)


def thread_ref(session: object, alias: object) -> ThreadRef:
    """Return the thread that a task message names.

    Raises:
        FleetError: `argument_invalid`, the message does not name one.
    """
    if not isinstance(session, str) or not is_id(session) or not isinstance(alias, str) or not is_alias(alias):
        raise FleetError("argument_invalid", "a task message names no thread")
    return ThreadRef(session, alias)


def checked_number(value: object) -> int:
    """Return a number out of a task message.

    Raises:
        FleetError: `argument_invalid`, it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise FleetError("argument_invalid", "a task message has no whole number where one is needed")
    return value
