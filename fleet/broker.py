"""Celery's connection to its broker, for a broker that may be away for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.app.amqp import AMQP
from kombu import connection

#: Pauses in seconds between attempts to reach a lost broker: the first, what each further one adds, the longest.
#: Celery's own grow to 30 s, for which a fleet would stand still after Redis is back.
PAUSE_FIRST_S, PAUSE_STEP_S, PAUSE_MAX_S = 0.2, 0.4, 2.0


class Connection(connection.Connection):
    """A broker connection that is soon made again."""

    def ensure_connection(self, *args: Any, **kwargs: Any) -> connection.Connection:
        """Return the connection once it is made, see `kombu.Connection.ensure_connection`."""
        pauses = {"interval_start": PAUSE_FIRST_S, "interval_step": PAUSE_STEP_S, "interval_max": PAUSE_MAX_S}
        connect: Callable[..., connection.Connection] = super().ensure_connection
        return connect(*args, **pauses | kwargs)


class Broker(AMQP):  # type: ignore[misc]  # celery has no types
    """What a Celery application calls `amqp`, with connections of this kind."""

    Connection = Connection
