"""Make an item fit the budget (protocol §4, "The 350 KB budget").

The size of an item is the length of `json.dumps(item)` as Python writes it by default: pure ASCII, so characters and
bytes are the same, and never less than what any other encoding of the item takes on the wire.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fleet.errors import ThreadFailedError
from fleet.items import Item

#: Bytes for a platform that refuses an item as `thread_item_too_large`: below its 64 KiB, with room for its envelope.
LOWER_CAP_BYTES = 60 * 1024

#: Bytes of UTF-8 that an excerpt keeps of a field's beginning and of its end.
HEAD_BYTES = 4096
TAIL_BYTES = 2048

#: Bytes; more than the JSON of any excerpt, even when each of its bytes is written as six.
_ABOVE_ANY_EXCERPT = 64 * 1024

_MARKER = re.compile(r"…\[truncated (\d{1,15}) bytes; see [^\]]*\]…")
_MARKS = ("truncated", "truncated_fields", "local_log")

#: The fields that may be shortened, in this order: name in `truncated_fields`, place in the item.
_FIELDS: tuple[tuple[str, tuple[str | int, ...]], ...] = (
    ("tool.output", ("metadata", "tool", "output")),
    ("tool.input", ("metadata", "tool", "input")),
    ("text", ("metadata", "text")),
    ("content[0].text", ("content", 0, "text")),
)


@dataclass(slots=True)
class _Field:
    """A field that may be shortened.

    `text` is the field as it came, an excerpt when an earlier budget asked for one (`is_excerpt`). `value` is what
    stands in the item now, `size` that one's bytes of JSON.
    """

    name: str
    path: tuple[str | int, ...]
    text: str
    is_excerpt: bool
    value: object
    size: int


def fit(item: Item, budget: int, local_log: str) -> Item:
    """Return `item` when it has at most `budget` bytes, else a copy with its long fields shortened.

    Fields become excerpts one after the other until the item fits; when all are excerpts and it does not, they are cut
    to a marker in the same order. A field that would not get shorter is left. `local_log` is the place of the full
    item that the marker names. An item that was fitted before may be fitted to a lower budget.

    Raises:
        ThreadFailedError: `THREAD_ITEM_TOO_LARGE`, the rest of the item alone is over the budget.
    """
    fields = _fields(item, budget)
    long = sum(field.size for field in fields)
    if _size_of_rest(item, fields) + long <= budget:
        return item
    metadata = item.get("metadata", {})
    names = list(metadata.get("truncated_fields", []))
    item = {**item, "metadata": {key: value for key, value in metadata.items() if key not in _MARKS}}
    rest = _size_of_rest(item, fields)
    for shorten in (_excerpt, _marker):
        for field in fields:
            shorter = shorten(field, local_log)
            size = _size(shorter)
            if size >= field.size:
                continue
            long += size - field.size
            field.value, field.size = shorter, size
            names += [field.name] * (field.name not in names)
            marks = {"truncated": True, "truncated_fields": names, "local_log": local_log}
            # The marks follow other keys of the metadata: ", " in place of their own braces.
            if rest + _size(marks) + long <= budget:
                return _assembled(item, fields, marks)
    raise ThreadFailedError(
        "THREAD_ITEM_TOO_LARGE",
        f"a {metadata.get('type')!r} item is over {budget} bytes even without its long fields; see {local_log}",
    )


def _fields(item: Item, budget: int) -> list[_Field]:
    excerpts = item.get("metadata", {}).get("truncated_fields", [])
    fields = []
    for name, path in _FIELDS:
        holder = item
        for step in path[:-1]:
            holder = _child(holder, step)
        value = _child(holder, path[-1])
        if value is None:
            continue
        is_text = isinstance(value, str) and (name != "tool.input" or name in excerpts)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        # JSON is never shorter than the text. What is longer than the budget needs no exact size: it can't stay, and
        # this much is above whatever takes its place.
        size = len(text) if len(text) > max(budget, _ABOVE_ANY_EXCERPT) else _size(value)
        fields.append(_Field(name, path, text, name in excerpts, value, size))
    return fields


def _child(holder: Any, step: str | int) -> Any:
    try:
        return holder[step]
    except (KeyError, IndexError, TypeError):
        return None


def _size(value: object) -> int:
    return len(json.dumps(value))


def _size_of_rest(item: Item, fields: Iterable[_Field]) -> int:
    """Return the bytes of an item's JSON without those of the fields."""
    rest = item
    hole = 0
    for field in fields:
        rest = _with(rest, field.path, 0)
        hole += _size(0)
    return _size(rest) - hole


def _assembled(item: Item, fields: Iterable[_Field], marks: dict[str, Any]) -> Item:
    for field in fields:
        item = _with(item, field.path, field.value)
    return {**item, "metadata": {**item["metadata"], **marks}}


def _with(holder: Any, path: tuple[str | int, ...], value: object) -> Any:
    """Return a copy of `holder` with `value` at `path`; what is not on the path is shared."""
    copy: Any = list(holder) if isinstance(holder, list) else dict(holder)
    step, *rest = path
    copy[step] = _with(holder[step], tuple(rest), value) if rest else value
    return copy


def _excerpt(field: _Field, local_log: str) -> str:
    """Return the beginning and the end of a field's text around a marker that counts the bytes between them."""
    if field.is_excerpt:
        return field.text
    data = _utf8(field.text)
    # What is ignored is a character that the cut would go through.
    head = data[:HEAD_BYTES].decode("utf-8", "ignore")
    tail = data[max(HEAD_BYTES, len(data) - TAIL_BYTES) :].decode("utf-8", "ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}{_truncated(left_out, local_log)}{tail}"


def _marker(field: _Field, local_log: str) -> str:
    """Return what stands for a field when nothing of its text fits."""
    known = _left_out(field.text) if field.is_excerpt else 0
    return _truncated(len(_utf8(field.text)) + known, local_log)


def _left_out(excerpt: str) -> int:
    """Return how many bytes longer than an excerpt the text is that it was made from.

    The text itself may hold what looks like a marker, so only the place where an excerpt's head ends is looked at. Its
    `…` of three bytes is the last character of the first `HEAD_BYTES` when the head is three bytes short.
    """
    end = len(_utf8(excerpt)[:HEAD_BYTES].decode("utf-8", "ignore"))
    match = _MARKER.match(excerpt, end - 1) or _MARKER.match(excerpt, end)
    return int(match[1]) - len(_utf8(match[0])) if match else 0


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _truncated(left_out: int, local_log: str) -> str:
    return f"…[truncated {left_out} bytes; see {local_log}]…"
