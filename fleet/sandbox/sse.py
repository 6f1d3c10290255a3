"""Server-sent events, as both model APIs stream them."""

from __future__ import annotations

import json
from typing import Any


class SeveredStreamError(Exception):
    """The script wants this connection to break."""


def event(kind: str, **fields: Any) -> bytes:
    """Return one event, whose data repeat its kind as `type`."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
