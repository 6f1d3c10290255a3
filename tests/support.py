"""Helpers that every room of the tests shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds between two looks at a condition: short beside any process start, long beside one look.
POLL_S = 0.02


def wait_until(
    predicate: Callable[[], T],
    timeout: float = 10,
    message: str | Callable[[], str] = "the condition did not come true",
) -> T:
    """Return `predicate()` as soon as it is true. A callable `message` is asked for when time is over.

    Raises:
        AssertionError: it was not true within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        if value := predicate():
            return value
        if time.monotonic() > deadline:
            said = message() if callable(message) else message
            raise AssertionError(f"{said}, within {timeout} s")
        time.sleep(POLL_S)
