"""The conditions of a rehearsal: how slow, how lagging and how faulty the embedded platform is just now.

One mechanism for all of it: a validated `Conditions` value that can be changed while the platform runs, and a
`Rehearsal` that holds the current one, counts requests and draws faults from a seeded generator.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: Bytes; the current platform refuses a thread item of this size or more (protocol §1).
ITEM_CAP_BYTES = 64 * 1024
#: Rows; the platform gives no more in one page (protocol §1).
PAGE_MAX_ROWS = 1000

FaultKind = Literal["429", "500_before", "500_after", "cut_before", "cut_after", "delay"]


class _Value(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Fault(_Value):
    """What goes wrong with some requests.

    Attributes:
        match: the name of a command, or a part of the request's path; empty matches every request.
        kind: `429` and `*_before` handle nothing, `*_after` store and then lie about it, `cut_*` close the connection
            without an answer, `delay` is answered well, but late.
        rate: how likely it is that a matching request is hit, 0 to 1.
        delay_ms: how long a request that is hit waits, before anything else.
        times: how many requests are hit at most; None is no limit.
    """

    match: str = ""
    kind: FaultKind
    rate: float = Field(1.0, ge=0, le=1)
    delay_ms: float = Field(0.0, ge=0)
    times: int | None = Field(None, ge=1)

    def matches(self, name: str, path: str) -> bool:
        """Tell whether a request with that name and path may be hit."""
        return self.match == name or self.match in path


class Conditions(_Value):
    """How the platform behaves. The defaults are those of the real platform on a good day, without its delays.

    Attributes:
        latency_ms: how long each request waits before it is handled.
        list_lag_ms: for how long something that was stored is missing from lists.
        max_page: rows in a page at most, whatever limit was asked for.
        item_cap_bytes: a thread item of this size or more is refused.
        created_at: ISO-8601 strings or numbers of milliseconds; both exist (protocol §1).
        object_types: whether a list of objects names their types.
        faults: the first one that hits a request is the one that counts.
        seed: of the generator that decides which requests are hit.
    """

    latency_ms: float = Field(0.0, ge=0)
    list_lag_ms: float = Field(0.0, ge=0)
    max_page: int = Field(PAGE_MAX_ROWS, ge=1, le=PAGE_MAX_ROWS)
    item_cap_bytes: int = Field(ITEM_CAP_BYTES, ge=1)
    created_at: Literal["iso", "ms"] = "iso"
    object_types: bool = True
    faults: Annotated[tuple[Fault, ...], Field(strict=False)] = ()
    seed: int = 0


class Rehearsal:
    """The current conditions, what they have done so far, and how many requests there were."""

    def __init__(self, conditions: Conditions) -> None:
        self.conditions = conditions
        self.requests: Counter[str] = Counter()
        self._rewind()

    def change(self, changes: dict[str, Any]) -> Conditions:
        """Change the named conditions and return all. Naming `faults` or `seed` starts their draws afresh.

        Raises:
            ValidationError: an unknown name or a bad value; nothing was changed.
        """
        self.conditions = Conditions.model_validate({**self.conditions.model_dump(), **changes})
        if changes.keys() & {"faults", "seed"}:
            self._rewind()
        return self.conditions

    def draw(self, name: str, path: str) -> Fault | None:
        """Count a request and return the fault that hits it."""
        self.requests[name] += 1
        for index, fault in enumerate(self.conditions.faults):
            spent = fault.times is not None and self._hits[index] >= fault.times
            if not spent and fault.matches(name, path) and self._random.random() < fault.rate:
                self._hits[index] += 1
                return fault
        return None

    def _rewind(self) -> None:
        self._random = random.Random(self.conditions.seed)  # noqa: S311 - a rehearsal must be repeatable
        self._hits: Counter[int] = Counter()
