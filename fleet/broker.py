"""Celery's way to its broker: connections for a Redis that may be away or move, and beat's schedule."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from celery.app.amqp import AMQP
from celery.beat import PersistentScheduler, ScheduleEntry
from celery.schedules import schedule
from kombu import connection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from fleet.store import SENTINEL_TIMEOUT_S, TIMEOUT_S
from fleet.urls import SentinelUrl, sentinel_url

#: Queue of what any worker can do: poll, activate, ingest, post.
FLEET_QUEUE = "fleet"
#: Messages in that queue from which on beat sends no more: nobody takes them, or not fast enough. They do not expire,
#: since beat's clock and a worker's may be hours apart.
QUEUE_MAX = 500
#: Pauses in seconds between attempts to reach a lost broker: the first, what each further one adds, the longest.
#: Celery's own grow to 30 s, for which a fleet would stand still after Redis is back.
PAUSE_FIRST_S, PAUSE_STEP_S, PAUSE_MAX_S = 0.2, 0.4, 2.0
#: Seconds between two looks of a worker whether its connections to Redis are dead.
HEALTH_CHECK_S = 5


class Connection(connection.Connection):
    """A broker connection that may be lost at any moment, and is soon made again, perhaps to another Redis."""

    def ensure_connection(self, *args: Any, **kwargs: Any) -> connection.Connection:
        """Return the connection once it is made, see `kombu.Connection.ensure_connection`."""
        pauses = {"interval_start": PAUSE_FIRST_S, "interval_step": PAUSE_STEP_S, "interval_max": PAUSE_MAX_S}
        connect: Callable[..., connection.Connection] = super().ensure_connection
        return connect(*args, **pauses | kwargs)

    def info(self) -> dict[str, Any]:
        """Return what `inspect stats` and Flower tell of the connection: no options, which may hold a password."""
        known: Callable[[], dict[str, Any]] = super().info
        return known() | {"transport_options": {}}

    def maybe_switch_next(self) -> None:
        """Stay: there are several URLs only where Sentinels watch over one Redis, and each attempt asks them all."""

    @property
    def connection_errors(self) -> tuple[type[BaseException], ...]:
        """What a lost connection comes to; an AttributeError where a late acknowledgement meets a closed channel.

        Its message is delivered again, as those of a dead worker are.
        """
        known: tuple[type[BaseException], ...] = super().connection_errors
        return (*known, AttributeError)


class Broker(AMQP):  # type: ignore[misc]  # celery has no types
    """What a Celery application calls `amqp`, with connections of this kind."""

    Connection = Connection


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


def every(seconds: float) -> schedule:
    """Return a schedule by a clock that nobody sets."""
    return schedule(seconds, nowfun=_unset_clock)


def _unset_clock() -> datetime:
    """Return a time by a clock that nobody sets; its beginning means nothing."""
    return datetime.fromtimestamp(time.monotonic(), UTC)


def broker_settings(redis_url: str, prefix: str) -> dict[str, Any]:
    """Return Celery's settings of the broker at `redis_url`; its keys begin with `prefix`."""
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
