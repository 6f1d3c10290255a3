"""The Celery application: queues, routes and the beat schedule (`celery -A fleet …`)."""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from celery import Celery
from celery.beat import PersistentScheduler, ScheduleEntry
from celery.schedules import schedule
from celery.signals import before_task_publish
from kombu import serialization
from kombu.utils.json import JSONEncoder
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from fleet import broker
from fleet.config import FleetConfig, load_config, read_environment
from fleet.credentials import signing_key
from fleet.errors import ConfigError, FleetError
from fleet.local import effective_environment
from fleet.signing import Seal
from fleet.store import SENTINEL_TIMEOUT_S, TIMEOUT_S
from fleet.urls import SentinelUrl, sentinel_url

#: Queue of what any worker can do: poll, activate, ingest, post.
FLEET_QUEUE = "fleet"
#: Beat ticks are this many ms apart at most: a section is polled at the first tick after its time.
TICK_MAX_MS = 250
#: Messages in the fleet's queue from which on beat sends no more: nobody takes them, or not fast enough. They do not
#: expire, since beat's clock and a worker's may be hours apart.
QUEUE_MAX = 500
#: Broker polls per lease: an interval in seconds at which reconcile looks for what stands still.
RECONCILES_PER_LEASE = 5
#: Seconds between two looks of a worker whether its connections to Redis are dead.
HEALTH_CHECK_S = 5
#: Content type of sealed messages, and the purpose of their seal.
SEALED_TYPE, MESSAGE = "application/x-fleet-sealed", "message"


class Connection(broker.Connection):
    """A broker connection that may be lost at any moment, and be made again to another Redis."""

    def maybe_switch_next(self) -> None:
        """Stay: there are several URLs only where Sentinels watch over one Redis, and each attempt asks them all."""

    @property
    def connection_errors(self) -> tuple[type[BaseException], ...]:
        """What a lost connection comes to; an AttributeError where a late acknowledgement meets a closed channel.

        Its message is delivered again, as those of a dead worker are.
        """
        known: tuple[type[BaseException], ...] = super().connection_errors
        return (*known, AttributeError)


class Broker(broker.Broker):
    """What Celery calls `amqp`, with connections of this kind."""

    Connection = Connection


def _unset_clock() -> datetime:
    """Return a time by a clock that nobody sets; its beginning means nothing."""
    return datetime.fromtimestamp(time.monotonic(), UTC)


class Ticker(PersistentScheduler):  # type: ignore[misc]  # celery has no types
    """Beat's schedule. It goes on when the machine's clock is set back, and waits while the queue is full."""

    def setup_schedule(self) -> None:
        """Begin anew: what the schedule's file has was told by the clock of an earlier boot."""
        super().setup_schedule()
        for entry in self.schedule.values():
            entry.last_run_at = entry.default_now()

    def apply_async(self, entry: ScheduleEntry, producer: Any = None, advance: bool = True, **options: Any) -> Any:
        """Send the message of `entry`, unless `QUEUE_MAX` wait already: one of the next will do."""
        if self._waiting(producer) >= QUEUE_MAX:
            return None
        return super().apply_async(entry, producer=producer, advance=advance, **options)

    def _waiting(self, producer: Any) -> int:
        """Return the length of the fleet's queue; 0 when Redis can't be asked, for sending connects again."""
        try:
            return int(self.app.amqp.queues[FLEET_QUEUE](producer.channel).queue_declare().message_count)
        except (RedisError, OSError, AttributeError):  # the last one is kombu's, for a closed channel
            return 0


def host_queue(host: str) -> str:
    """Return the queue of a host's short work that needs its disk."""
    return f"host.{host}"


def turns_queue(host: str) -> str:
    """Return the queue of a host's agent turns."""
    return f"host.{host}.turns"


def tick_s(config: FleetConfig) -> float:
    """Return the seconds between two beat ticks: a whole fraction of the poll interval."""
    interval_ms = min(config.polling.interval_idle_ms, config.polling.interval_active_ms)
    return interval_ms / max(1, -(-interval_ms // TICK_MAX_MS)) / 1000


def _every(seconds: float) -> schedule:
    return schedule(seconds, nowfun=_unset_clock)


def make_app(config: FleetConfig, redis_url: str, host: str, key: str | None = None) -> Celery:
    """Return the application for `config`, its broker at `redis_url`.

    With a signing `key`, this process seals all that it sends over the broker, and refuses what is not sealed.
    """
    app = Celery("fleet", amqp=Broker, include=["tasks"])
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # A Redis that refuses writes, for its disk or for want of replicas, must not end the worker.
        broker_channel_error_retry=True,
        task_default_queue=FLEET_QUEUE,
        task_create_missing_queues=True,
        task_queues={FLEET_QUEUE: {}, host_queue(host): {}, turns_queue(host): {}},
        task_acks_late=True,
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_hijack_root_logger=False,
        worker_send_task_events=True,
        event_queue_expires=60,
        timezone="UTC",
        beat_scheduler="fleet.celery:Ticker",
        beat_schedule={
            "poll": {"task": "fleet.poll", "schedule": _every(tick_s(config))},
            "reconcile": {"task": "fleet.reconcile", "schedule": _every(config.turns.lease_s / RECONCILES_PER_LEASE)},
        },
    )
    app.conf.update(_broker(redis_url, f"{config.redis.namespace}:celery:"))
    if key:
        _seal_messages(Seal(key))
    return app


def _broker(redis_url: str, prefix: str) -> dict[str, Any]:
    """Return the settings of the broker at `redis_url`; its keys begin with `prefix`."""
    transport = {
        "global_keyprefix": prefix,
        "socket_keepalive": True,
        # A machine that is gone closes no connection: without these, its clients would wait for minutes.
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
    }
    at = sentinel_url(redis_url)
    if at is not None:
        return _watched_broker(at, transport)
    # Without it kombu asks for no certificate. What the URL says wins; the host's name is checked by default.
    tls = {"ssl_cert_reqs": ssl.CERT_REQUIRED} if redis_url.startswith("rediss:") else False
    return {"broker_url": redis_url, "broker_transport_options": transport, "broker_use_ssl": tls}


def _watched_broker(at: SentinelUrl, transport: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a broker whose address Sentinels know: kombu takes a URL for each of them."""
    credentials = f"{quote(at.username or '', safe='')}:{quote(at.password or '', safe='')}@"
    places = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in at.sentinels]
    tls = at.tls if at.tls is None else {"ssl_cert_reqs": ssl.CERT_REQUIRED, **at.tls}
    return {
        "broker_url": ";".join(f"sentinel://{credentials}{place}/{at.db}" for place in places),
        "broker_use_ssl": tls or False,
        "broker_transport_options": {
            **transport,
            "master_name": at.master,
            "sentinel_kwargs": {
                "password": at.sentinel_password,
                "socket_timeout": SENTINEL_TIMEOUT_S,
                "socket_connect_timeout": SENTINEL_TIMEOUT_S,
                "retry": Retry(NoBackoff(), 0),
                "ssl": bool(tls),
                **(tls or {}),
            },
        },
    }


def _seal_messages(seal: Seal) -> None:
    """Let `json` mean sealed JSON here: `celery call`, remote control and events all name that serializer."""
    register: Any = serialization.register  # without types
    register(
        "json",
        lambda body: seal.seal(MESSAGE, json.dumps(body, cls=JSONEncoder)),
        lambda data: json.loads(seal.open(MESSAGE, data if isinstance(data, str) else bytes(data).decode())),
        content_type=SEALED_TYPE,
    )
    before_task_publish.connect(_name_the_task, weak=False, dispatch_uid="fleet.name_the_task")


def _name_the_task(sender: str, body: tuple[Any, Any, dict[str, Any]], **_: Any) -> None:
    """Put the task's name, which otherwise stands in the headers alone, into what is sealed."""
    body[2]["sealed_for"] = sender


def is_meant_for(task: Any) -> bool:
    """Whether the message of the running `task` was sealed for this task. Where nothing is sealed, every message is."""
    sealed = serialization.registry.name_to_type["json"] == SEALED_TYPE
    return not sealed or bool(task.request.get("sealed_for") == task.name)


def _app_of_environment() -> Celery:
    environ = effective_environment(os.environ)
    config = load_config(None, environ)
    if config.redis.url is None:
        raise ConfigError("config_invalid", "neither FLEET_REDIS_URL nor redis.url says where Redis is")
    return make_app(config, config.redis.url, read_environment(environ).host, signing_key(environ))


try:
    app = _app_of_environment()
except FleetError as error:
    print(f"fleet: {error}", file=sys.stderr)
    raise SystemExit(2) from None
