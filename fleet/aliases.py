"""What may stand in an alias, an alias prefix and a platform id (protocol §1).

Aliases and ids become parts of URLs, Redis keys and folder names, so each is checked where it enters the fleet.
"""

from __future__ import annotations

import re

from fleet.errors import FleetError

#: Characters; the platform refuses longer aliases.
ALIAS_MAX_LENGTH = 256

_SEGMENT = re.compile(r"[A-Za-z0-9._@-]+")
#: Ids are opaque to the fleet; this is what keeps one a single harmless segment of a path, a URL and a Redis key.
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def is_alias(text: str) -> bool:
    """Tell whether `text` is an alias: 1 to 256 characters, segments of `[A-Za-z0-9._@-]+`, none `.` or `..`."""
    return len(text) <= ALIAS_MAX_LENGTH and all(_is_segment(segment) for segment in text.split("/"))


def is_alias_prefix(text: str) -> bool:
    """Tell whether some alias can begin with `text`, which may be empty and may end within a segment."""
    if len(text) >= ALIAS_MAX_LENGTH:
        return False
    *whole, last = text.split("/")
    return all(_is_segment(segment) for segment in whole) and (not last or _SEGMENT.fullmatch(last) is not None)


def is_id(text: str) -> bool:
    """Tell whether `text` can be a platform id: 1 to 128 of `[A-Za-z0-9._-]`, neither `.` nor `..`."""
    return _ID.fullmatch(text) is not None and text not in {".", ".."}


def check_alias(text: str) -> str:
    """Return `text` when it is an alias.

    Raises:
        FleetError: `alias_invalid`.
    """
    if not is_alias(text):
        raise FleetError("alias_invalid", f"{text[:ALIAS_MAX_LENGTH]!r} is no alias")
    return text


def _is_segment(text: str) -> bool:
    return _SEGMENT.fullmatch(text) is not None and text not in {".", ".."}
