"""What the embedded platform's store hands out and takes: frozen values, and the refusal it raises.

Times are whole microseconds since 1970 (UTC).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

#: Later than any time and any `seq` that is stored.
END_OF_TIME = 2**62

Json = dict[str, Any]
Row = TypeVar("Row")


class PlatformRefusal(Exception):
    """The platform understood the request and refuses it.

    Attributes:
        code: the `error` of the answer (protocol §1).
        http_status: 200 for a refusal by a rule of the domain, 400 for a malformed request, 401 and 403 for access.
    """

    def __init__(self, code: str, message: str, http_status: int = 200) -> None:
        self.code = code
        self.message = message
        self.http_status = http_status
        super().__init__(f"{code}: {message}")


@dataclass(frozen=True, slots=True)
class User:
    """Whose key a request carries. An admin may use the sandbox's own endpoints."""

    id: str
    name: str
    email: str
    is_admin: bool


@dataclass(frozen=True, slots=True)
class Revision:
    """A version of a blob; `phase` and `status` say whether it takes writes."""

    id: str
    org_id: str
    blob_id: str
    phase: str
    status: str


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a revision; `status` is open, closing, closed, deleting or deleted."""

    id: str
    revision_id: str
    alias: str | None
    status: str


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A session object. `user_id` stored the value, `created_at` is when the alias first had one."""

    alias: str
    value: Json
    created_at: int
    user_id: str


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A row of a list of objects: an object, or (`is_prefix`) all that begin with `alias` in a list by delimiter."""

    alias: str
    type: str | None
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """A thread item. `body` is {content, metadata}."""

    id: str
    user_id: str
    parent_id: str | None
    created_at: int
    body: Json


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a session. `alias` and `object_type` name the object that it happened to."""

    id: str
    type: str
    created_at: int
    alias: str | None
    object_type: str | None
    item_id: str | None


@dataclass(frozen=True, slots=True)
class Position:
    """A row's place in a timeline."""

    created_at: int
    seq: int


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Rows in order; `last` is the place of the last one, and None when no row follows it."""

    rows: tuple[Row, ...]
    last: Position | None


@dataclass(frozen=True, slots=True)
class Window:
    """Which part of a timeline to list: `low` <= created_at <= `high`, `limit` rows behind `after`."""

    limit: int
    ascending: bool = False
    low: int = 0
    high: int = END_OF_TIME
    after: Position | None = None

    def parameters(self) -> dict[str, int]:
        """Return the parameters of the timeline queries. The bounds take in `after`, so that the index skips to it."""
        if self.after is not None:
            start = self.after
        else:
            start = Position(-1, -1) if self.ascending else Position(END_OF_TIME, END_OF_TIME)
        return {
            "low": max(self.low, start.created_at) if self.ascending else self.low,
            "high": self.high if self.ascending else min(self.high, start.created_at),
            "at": start.created_at,
            "seq": start.seq,
            "limit": self.limit + 1,
        }


def microseconds_now() -> int:
    """Return the time in microseconds since 1970."""
    return time.time_ns() // 1000


def to_json(value: object, *, ensure_ascii: bool = True) -> str:
    """Return `value` as JSON.

    Raises:
        PlatformRefusal: `invalid_arguments` for a number that JSON can't carry.
    """
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False)
    except ValueError:
        raise PlatformRefusal("invalid_arguments", "a number is out of range", 400) from None
