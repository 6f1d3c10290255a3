"""The commands and queries of protocol §1: their arguments, as strict as the real platform's, and what they do.

Each is one class: its fields are the arguments, `run` carries it out and returns what the answer holds besides
`status`. Arguments that are unknown, missing, null or of a wrong type are refused before anything runs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from abc import abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from fleet.aliases import is_alias
from fleet.sandbox.platform_conditions import PAGE_MAX_ROWS, Conditions
from fleet.sandbox.platform_store import PlatformStore
from fleet.sandbox.platform_values import (
    END_OF_TIME,
    Event,
    Item,
    Json,
    PlatformRefusal,
    Position,
    Session,
    StoredObject,
    User,
    Window,
    microseconds_now,
    to_json,
)

#: Bytes of an object's JSON (protocol §1).
OBJECT_MAX_BYTES = 5 * 1024 * 1024
#: Bytes of a file (protocol §1).
FILE_MAX_BYTES = 4 * 1024 * 1024
#: Rows of a page when no limit is asked for (protocol §1).
PAGE_DEFAULT_ROWS = 10
#: The protocol names no list; programs are what a platform would rather not store.
UNSUPPORTED_FILE_TYPES = frozenset(
    {
        "application/java-archive",
        "application/vnd.microsoft.portable-executable",
        "application/x-dosexec",
        "application/x-executable",
        "application/x-mach-binary",
        "application/x-msdos-program",
        "application/x-msdownload",
        "application/x-sharedlib",
    }
)
#: What each type of content part must hold under its own name (protocol §4).
_PART_TYPES: dict[str, type] = {"text": str, "json": object, "file": dict}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Call:
    """In what surroundings an operation runs. `content` are the bytes of a binary write."""

    store: PlatformStore
    user: User
    revision_id: str
    conditions: Conditions
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class Binary:
    """An answer in bytes; `envelope` is what a JSON answer would hold."""

    content: bytes
    envelope: Json


def _checked_alias(text: str) -> str:
    if not is_alias(text):
        raise PydanticCustomError("invalid_alias", "no alias of 1 to 256 characters in segments of [A-Za-z0-9._@-]+")
    return text


def _checked_content(parts: list[Json]) -> list[Json]:
    for part in parts:
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _PART_TYPES:
            raise PydanticCustomError("content_type", "a part's type is text, json or file")
        if kind not in part or not isinstance(part[kind], _PART_TYPES[kind]):
            raise PydanticCustomError("content_part", "a part holds its content under the name of its type")
    return parts


Id = Annotated[str, Field(min_length=1, max_length=256)]
Alias = Annotated[str, AfterValidator(_checked_alias)]
Content = Annotated[list[Json], Field(min_length=1), AfterValidator(_checked_content)]
Limit = Annotated[int, Field(ge=1, le=PAGE_MAX_ROWS)]
Timestamp = str | int


class Operation(BaseModel):
    """A command or a query. `binary` tells in which direction bytes go instead of JSON: `in`, `out` or neither."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    binary: ClassVar[str] = ""

    session_id: Id

    @abstractmethod
    def run(self, call: Call) -> Json | Binary:
        """Carry it out.

        Raises:
            PlatformRefusal: a rule of the platform forbids it.
        """


class _Query(Operation):
    def session(self, call: Call) -> Session:
        return call.store.readable_session(call.revision_id, self.session_id)


class _Command(Operation):
    def session(self, call: Call) -> Session:
        return call.store.writable_session(call.revision_id, self.session_id)


class _Listing(_Query):
    cursor: str = ""
    limit: Limit = PAGE_DEFAULT_ROWS

    def rows(self, call: Call) -> int:
        return min(self.limit, call.conditions.max_page)

    def make_cursor(self, place: Json) -> str:
        return base64.urlsafe_b64encode(json.dumps({"of": self._fingerprint(), **place}).encode()).decode()

    def place(self, *keys: str) -> list[Any] | None:
        """Return what the cursor holds under `keys`; None without a cursor.

        Raises:
            PlatformRefusal: `invalid_cursor`: not one that this very query was given.
        """
        if "cursor" not in self.model_fields_set:
            return None
        try:
            place = json.loads(base64.b64decode(self.cursor, altchars=b"-_", validate=True))
            if place["of"] == self._fingerprint():
                return [place[key] for key in keys]
        except (binascii.Error, ValueError, TypeError, KeyError):
            pass
        raise PlatformRefusal("invalid_cursor", "the cursor does not belong to this query", 400)

    def _fingerprint(self) -> str:
        query = f"{type(self).__name__} {self.model_dump_json(exclude={'cursor', 'limit'})}"
        return hashlib.sha256(query.encode()).hexdigest()[:16]


class _Timeline(_Listing):
    ascending: bool = False
    created_since: Timestamp | None = None
    created_before: Timestamp | None = None

    def window(self, call: Call) -> Window:
        style = call.conditions.created_at
        low, high = 0, _visible_until(call.conditions)
        if self.created_since is not None:
            low = _span(self.created_since, style)[1]
        if self.created_before is not None:
            high = min(high, _span(self.created_before, style)[0] - 1)
        place = self.place("created_at", "seq")
        return Window(self.rows(call), self.ascending, low, high, Position(*place) if place else None)

    def next_cursor(self, last: Position | None) -> str | None:
        return self.make_cursor({"created_at": last.created_at, "seq": last.seq}) if last else None


class GetSession(_Query):
    """The only operation that takes a session's alias for its id."""

    def run(self, call: Call) -> Json:
        """Return the session."""
        session = call.store.find_session(call.revision_id, self.session_id)
        return {"session": {"id": session.id, "alias": session.alias, "status": session.status}}


class UploadSessionObject(_Command):
    """Store an object, whole."""

    alias: Alias
    value: Json

    def run(self, call: Call) -> Json:
        """Store it; a value of type `thread` makes a thread."""
        session = self.session(call)
        if len(to_json(self.value, ensure_ascii=False).encode()) > OBJECT_MAX_BYTES:
            raise PlatformRefusal("session_object_too_large", f"an object has at most {OBJECT_MAX_BYTES} bytes")
        call.store.put_object(session.id, self.alias, self.value, call.user.id)
        return {}


class DownloadSessionObject(_Query):
    """Read an object."""

    alias: Alias

    def run(self, call: Call) -> Json:
        """Return the object."""
        return {"object": _object_row(call.store.stored_object(self.session(call).id, self.alias), call.conditions)}


class DeleteSessionObject(_Command):
    """Delete an object, and a thread's items with it."""

    alias: Alias

    def run(self, call: Call) -> Json:
        """Delete it."""
        call.store.delete_object(self.session(call).id, self.alias)
        return {}


class ListSessionObjects(_Listing):
    """List objects by alias. With a delimiter, what lies deeper is named once, in `prefixes`."""

    prefix: Annotated[str, Field(max_length=256)] = ""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None

    def run(self, call: Call) -> Json:
        """Return a page."""
        session = self.session(call)
        place = self.place("entry")
        entries, more = call.store.list_objects(
            session.id,
            limit=self.rows(call),
            visible_until=_visible_until(call.conditions),
            prefix=self.prefix,
            delimiter=self.delimiter or "",
            after=place[0] if place else "",
        )
        types = call.conditions.object_types
        answer: Json = {
            "objects": [
                {"alias": entry.alias, "type": entry.type} if types else {"alias": entry.alias}
                for entry in entries
                if not entry.is_prefix
            ],
            "cursor": self.make_cursor({"entry": entries[-1].alias}) if more else None,
        }
        if self.delimiter:
            answer["prefixes"] = [entry.alias for entry in entries if entry.is_prefix]
        return answer


class PostSessionThreadItem(_Command):
    """Append an item to a thread."""

    alias: Alias
    content: Content
    metadata: Json = {}
    parent_id: Id | None = None

    def run(self, call: Call) -> Json:
        """Store it and return it as stored."""
        session = self.session(call)
        body = {"content": self.content, "metadata": self.metadata}
        text = to_json(body)
        if len(text) >= call.conditions.item_cap_bytes:
            raise PlatformRefusal(
                "thread_item_too_large", f"an item has less than {call.conditions.item_cap_bytes} bytes"
            )
        item_id, created_at = call.store.post_item(session.id, self.alias, text, call.user.id, self.parent_id)
        return {"item": _item_row(Item(item_id, call.user.id, self.parent_id, created_at, body), call.conditions)}


class ListSessionThreadItems(_Timeline):
    """List a thread's items, newest first unless `ascending`."""

    alias: Alias

    def run(self, call: Call) -> Json:
        """Return a page."""
        page = call.store.list_items(self.session(call).id, self.alias, self.window(call))
        return {
            "items": [_item_row(item, call.conditions) for item in page.rows],
            "cursor": self.next_cursor(page.last),
        }


class GetSessionThreadItem(_Query):
    """Read one item, also one that lists don't show yet."""

    alias: Alias
    item_id: Id

    def run(self, call: Call) -> Json:
        """Return the item."""
        return {"item": _item_row(call.store.item(self.session(call).id, self.alias, self.item_id), call.conditions)}


class ListSessionEvents(_Timeline):
    """List what happened in a session, newest first unless `ascending`."""

    def run(self, call: Call) -> Json:
        """Return a page."""
        page = call.store.list_events(self.session(call).id, self.window(call))
        return {
            "session_events": [_event_row(event, call.conditions) for event in page.rows],
            "cursor": self.next_cursor(page.last),
        }


class UploadSessionFile(_Command):
    """Store a file as an object of type `file`. `size` is the number of bytes that follow."""

    binary: ClassVar[str] = "in"

    alias: Alias
    name: Annotated[str, Field(min_length=1, max_length=256)]
    content_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9.+-]+/[A-Za-z0-9.+-]+( *;.*)?$")]
    size: Annotated[int, Field(ge=0)]

    def run(self, call: Call) -> Json:
        """Store it and return the object."""
        session = self.session(call)
        content = call.content or b""
        if self.size != len(content):
            raise PlatformRefusal("invalid_arguments", f"size is {self.size}, the body has {len(content)} bytes", 400)
        if self.size > FILE_MAX_BYTES:
            raise PlatformRefusal("file_too_large", f"a file has at most {FILE_MAX_BYTES} bytes")
        if self.content_type.partition(";")[0].strip().lower() in UNSUPPORTED_FILE_TYPES:
            raise PlatformRefusal("unsupported_file_type", f"files of type {self.content_type} are not stored")
        described = {"name": self.name, "content_type": self.content_type, "size": self.size}
        value = {"type": "file", "file": described}
        stored = call.store.put_object(session.id, self.alias, value, call.user.id, content=content)
        return {"object": _object_row(stored, call.conditions)}


class DownloadSessionFile(_Query):
    """Read a file."""

    binary: ClassVar[str] = "out"

    alias: Alias

    def run(self, call: Call) -> Binary:
        """Return its bytes, and the object as the envelope."""
        stored, content = call.store.stored_file(self.session(call).id, self.alias)
        return Binary(content, {"object": _object_row(stored, call.conditions)})


COMMANDS: dict[str, type[Operation]] = {
    "upload_session_object": UploadSessionObject,
    "delete_session_object": DeleteSessionObject,
    "post_session_thread_item": PostSessionThreadItem,
    "upload_session_file": UploadSessionFile,
}
QUERIES: dict[str, type[Operation]] = {
    "get_session": GetSession,
    "download_session_object": DownloadSessionObject,
    "list_session_objects": ListSessionObjects,
    "list_session_thread_items": ListSessionThreadItems,
    "get_session_thread_item": GetSessionThreadItem,
    "list_session_events": ListSessionEvents,
    "download_session_file": DownloadSessionFile,
}
OPERATIONS = {"command": COMMANDS, "query": QUERIES}


def parse_operation(kind: str, payload: Json) -> Operation:
    """Return the operation of that kind (`command` or `query`) that a request's JSON asks for.

    Raises:
        PlatformRefusal: `unknown_command`, `invalid_alias`, `invalid_arguments`.
    """
    name = payload.get("command")
    operation = OPERATIONS[kind].get(name) if isinstance(name, str) else None
    if operation is None:
        raise PlatformRefusal("unknown_command", f"there is no {kind} of that name", 400)
    arguments = {key: value for key, value in payload.items() if key != "command"}
    null = next((key for key, value in arguments.items() if value is None), None)
    if null is not None:
        raise PlatformRefusal("invalid_arguments", f"{null[:100]}: null is no value, leave the key out", 400)
    try:
        return operation.model_validate(arguments)
    except ValidationError as error:
        raise refused(error) from None


def refused(error: ValidationError) -> PlatformRefusal:
    """Return the refusal that tells the first mistake. It repeats no value: values may be long or secret."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    code = "invalid_alias" if first["type"] == "invalid_alias" else "invalid_arguments"
    place = ".".join(map(str, first["loc"]))[:100]
    return PlatformRefusal(code, f"{place}: {first['msg']}", 400)


def _object_row(stored: StoredObject, conditions: Conditions) -> Json:
    return {
        "alias": stored.alias,
        "value": stored.value,
        "created_at": _created_at(stored.created_at, conditions),
        "user_id": stored.user_id,
    }


def _item_row(item: Item, conditions: Conditions) -> Json:
    return {
        "id": item.id,
        "created_at": _created_at(item.created_at, conditions),
        "user_id": item.user_id,
        "parent_id": item.parent_id,
        **item.body,
    }


def _event_row(event: Event, conditions: Conditions) -> Json:
    row: Json = {"id": event.id, "created_at": _created_at(event.created_at, conditions), "type": event.type}
    if event.alias is not None:
        row["session_object"] = {"alias": event.alias, "type": event.object_type}
    if event.item_id is not None:
        row["item_id"] = event.item_id
    return row


def _visible_until(conditions: Conditions) -> int:
    if not conditions.list_lag_ms:
        return END_OF_TIME
    return microseconds_now() - round(conditions.list_lag_ms * 1000)


def _created_at(microseconds: int, conditions: Conditions) -> str | int:
    if conditions.created_at == "ms":
        return microseconds // 1000
    moment = _EPOCH + timedelta(microseconds=microseconds)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _span(timestamp: Timestamp, style: str) -> tuple[int, int]:
    """Return from which and before which microsecond a time is shown as `timestamp`.

    Raises:
        PlatformRefusal: `invalid_arguments`: not a time as this platform shows it.
    """
    if style == "ms" and isinstance(timestamp, int) and abs(timestamp) < END_OF_TIME // 1000:
        return timestamp * 1000, (timestamp + 1) * 1000
    try:
        moment = datetime.fromisoformat(timestamp) if style == "iso" and isinstance(timestamp, str) else None
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise PlatformRefusal("invalid_arguments", "a time is given as created_at shows it", 400)
    microseconds = (moment - _EPOCH) // timedelta(microseconds=1)
    return microseconds, microseconds + 1
