"""A worker whose broker is away looks for it often enough."""

from __future__ import annotations

import pytest
from celery import Celery

from fleet.broker import PAUSE_MAX_S, Broker

#: TCP's discard service, which nobody runs.
NOBODY = "redis://127.0.0.1:9/0"


class EnoughError(Exception):
    pass


def test_the_pauses_before_a_lost_broker_is_sought_again_stay_short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kombu.utils.functional.sleep", lambda _seconds: None)
    pauses: list[float] = []

    def note(_error: Exception, pause: float) -> None:
        pauses.append(pause)
        if len(pauses) == 20:
            raise EnoughError

    app = Celery(broker=NOBODY, amqp=Broker, set_as_current=False)
    with app.connection_for_read() as connection, pytest.raises(EnoughError):
        # Celery's workers and beat pass what to do on an error, not how long to wait.
        connection.ensure_connection(note, None)
    assert pauses == sorted(pauses)
    assert pauses[-1] == PAUSE_MAX_S
