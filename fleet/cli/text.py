"""Text of others, made harmless for a terminal."""

from __future__ import annotations

import re

#: Control characters but for line break and tab, and those that turn the direction of writing.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain(value: object) -> str:
    """Return a value as text that can't control a terminal."""
    return _CONTROL.sub("�", str(value))
