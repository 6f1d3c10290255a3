"""The Celery application: queues, routes and the beat schedule (`celery -A fleet …`)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from celery import Celery
from celery.signals import before_task_publish
from kombu import serialization
from kombu.utils.json import JSONEncoder

from fleet.broker import FLEET_QUEUE, Broker, broker_settings, every
from fleet.config import FleetConfig, load_config, read_environment
from fleet.credentials import signing_key
from fleet.errors import ConfigError, FleetError
from fleet.local import effective_environment
from fleet.signing import Seal

#: Beat ticks are this many ms apart at most: a section is polled at the first tick after its time.
TICK_MAX_MS = 250
#: Broker polls per lease: an interval in seconds at which reconcile looks for what stands still.
RECONCILES_PER_LEASE = 5
#: Content type of sealed messages, and the purpose of their seal.
SEALED_TYPE, MESSAGE = "application/x-fleet-sealed", "message"


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
        beat_scheduler="fleet.broker:Ticker",
        beat_schedule={
            "poll": {"task": "fleet.poll", "schedule": every(tick_s(config))},
            "reconcile": {"task": "fleet.reconcile", "schedule": every(config.turns.lease_s / RECONCILES_PER_LEASE)},
        },
    )
    app.conf.update(broker_settings(redis_url, f"{config.redis.namespace}:celery:"))
    if key:
        _seal_messages(Seal(key))
    return app


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
