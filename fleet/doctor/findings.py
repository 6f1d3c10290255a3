"""What `fleet doctor` finds, and how it looks at several things at once without waiting for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Literal, TypeVar

from fleet.errors import FleetError

T = TypeVar("T")

State = Literal["ok", "warning", "problem"]
#: Told again and again which looks have not come to an end yet.
Progress = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look at `subject` came to. `remedy` says what to do, where something is to be done."""

    subject: str
    state: State
    detail: str
    remedy: str = ""


def of_error(subject: str, error: FleetError, state: State = "problem") -> Finding:
    """Return an error of the catalogue as a finding."""
    return Finding(subject, state, error.detail, error.remedy)


def side_by_side(looks: Mapping[str, Callable[[], T]], within_s: float, progress: Progress) -> dict[str, Future[T]]:
    """Run `looks`, each in a thread of its own, until all have ended or `within_s` seconds are over.

    Returns a future for each; one that is not done by then hangs, and its thread is left to itself.
    """
    futures = {name: _started(look) for name, look in looks.items()}
    deadline = time.monotonic() + within_s
    while waiting := {name: future for name, future in futures.items() if not future.done()}:
        progress(list(waiting))
        left = deadline - time.monotonic()
        if left <= 0:
            break
        wait(waiting.values(), left, FIRST_COMPLETED)
    return futures


def _started(look: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(look())
        except Exception as error:
            future.set_exception(error)

    # A daemon: Python would wait for another thread when it ends.
    threading.Thread(target=run, daemon=True).start()
    return future
