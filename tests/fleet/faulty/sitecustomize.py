"""Faults inside a Celery process under test, put in place when its interpreter starts.

The variable FLEET_TEST_FAULTS names a JSON file, which is looked at for every message and every look at a clock:

    mode           what happens to task messages: `twice`, `ten`, `late`, `reordered`, `dropped`; none: nothing
    seed           of what is left to chance
    visibility_s   seconds after which the broker delivers again what was not acknowledged
    clocks         host, or `beat` → seconds by which its clock is ahead
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import random
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

FAULTS = "FLEET_TEST_FAULTS"
#: Longest delay of a late message, and time for which messages are held to be put in another order; in seconds.
LATE_S, HELD_S = 1.0, 0.3
#: Part of the messages that are dropped.
DROP_RATE = 0.1
#: Copies of a message, and seconds for which a further one that says the same is left alone: the tasks of a chain that
#: come ten times would send ten messages each, ten times each.
COPIES, LEFT_ALONE_S = {"twice": 2, "ten": 10}, 1.0
#: Seconds for which the file is believed when a clock is looked at.
BELIEVED_S = 0.1


def read_faults() -> dict[str, Any]:
    """Return what the file says."""
    found: dict[str, Any] = json.loads(Path(os.environ[FAULTS]).read_text())
    return found


def note(what: str) -> None:
    """Count a fault that was done."""
    with Path(os.environ[FAULTS]).with_suffix(".log").open("a") as log:
        log.write(f"{what}\n")


class Messages:
    """What happens to the messages of tasks on their way into a queue. `put` is what a sound channel does."""

    def __init__(self, put: Any) -> None:
        self._put = put
        self._rng = random.Random(read_faults().get("seed", 0))
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[Any, str, Any]] = []
        self._last: dict[tuple[str, str], float] = {}

    def put(self, channel: Any, queue: str, message: Any, **options: Any) -> None:
        """Put a message into a queue, once or not."""
        mode = read_faults().get("mode") if queue == "fleet" or queue.startswith("host.") else None
        if mode is None:
            self._put(channel, queue, message, **options)
            return
        match mode:
            case "twice" | "ten":
                if not self._is_fresh(message):
                    self._put(channel, queue, message, **options)
                    return
                for _ in range(COPIES[mode]):
                    self._put(channel, queue, another(message))
            case "late":
                self._later(self._rng.uniform(0, LATE_S), self._put, channel, queue, message)
            case "reordered":
                self._hold(channel, queue, message)
            case "dropped" if self._rng.random() >= DROP_RATE:
                self._put(channel, queue, message)
                return
        note(mode)

    def _is_fresh(self, message: Any) -> bool:
        says, now = (message["headers"]["task"], message["headers"]["argsrepr"]), time.monotonic()
        with self._lock:
            fresh = now - self._last.get(says, -LEFT_ALONE_S) >= LEFT_ALONE_S
            self._last[says] = now if fresh else self._last[says]
        return fresh

    def _hold(self, *put: Any) -> None:
        with self._lock:
            self._held.append(put)
            if len(self._held) == 1:
                self._later(HELD_S, self._let_go)

    def _let_go(self) -> None:
        with self._lock:
            held, self._held = self._held, []
        for put in reversed(held):
            self._put(*put)

    def _later(self, seconds: float, action: Any, *arguments: Any) -> None:
        timer = threading.Timer(seconds, action, arguments)
        timer.daemon = True
        timer.start()


def another(message: Any) -> Any:
    """Return a message once more: the same task, as another delivery."""
    copied = copy.deepcopy(message)
    copied["properties"]["delivery_tag"] = str(uuid.uuid4())
    return copied


def spoil_broker() -> None:
    """Let messages go astray, and let the broker's patience be what the file says."""
    from kombu.transport import redis

    messages = Messages(redis.Channel._put)
    redis.Channel._put = lambda channel, queue, message, **options: messages.put(channel, queue, message, **options)
    redis.Channel.unacked_restore_interval, redis.Channel.unacked_restore_throttle = 0.5, 1
    usual_s = redis.Channel.visibility_timeout
    redis.QoS.visibility_timeout = property(lambda qos: read_faults().get("visibility_s") or usual_s)
    restore = redis.Channel._do_restore_message

    def restore_and_note(channel: Any, message: Any, *arguments: Any, **options: Any) -> None:
        note(f"{message['headers']['task']} again")
        restore(channel, message, *arguments, **options)

    redis.Channel._do_restore_message = restore_and_note


def spoil_clock(whose: str) -> None:
    """Shift what Python tells of the time of day. Clocks that measure how long something takes stay as they are."""
    sound_time, sound_ns, sound_datetime = time.time, time.time_ns, datetime.datetime
    believed = {"until": 0.0, "ahead_s": 0.0}

    def ahead_s() -> float:
        if time.monotonic() > believed["until"]:
            believed["ahead_s"] = read_faults().get("clocks", {}).get(whose, 0.0)
            believed["until"] = time.monotonic() + BELIEVED_S
        return believed["ahead_s"]

    class AnyDatetime(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, sound_datetime)

    class Datetime(sound_datetime, metaclass=AnyDatetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz) + datetime.timedelta(seconds=ahead_s())

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    Datetime.__name__ = Datetime.__qualname__ = "datetime"
    Datetime.__module__ = "datetime"
    datetime.datetime = Datetime
    time.time = lambda: sound_time() + ahead_s()
    time.time_ns = lambda: sound_ns() + int(ahead_s() * 1e9)


if FAULTS in os.environ and "celery" in sys.orig_argv:
    spoil_clock("beat" if "beat" in sys.orig_argv else os.environ["FLEET_HOST"])
    spoil_broker()
