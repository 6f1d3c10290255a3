"""Who can write to Redis can't speak for the fleet: what passes through it is sealed with the fleet's signing key.

A sealed text has its seal before it: HMAC-SHA256 of the text and of the purpose for which it was written. The purpose
names the thread and the field, so that what is sealed for one place opens in no other. All processes of a fleet have
the same key, or none: then everything is written and read as it is.
"""

from __future__ import annotations

import hashlib
import hmac

#: What a sealed text begins with. No JSON does, so that a process without the key sees what it has before it.
SEALED = "sealed:"
#: Bytes that a key must have at least.
KEY_MIN_BYTES = 16


class TamperedError(Exception):
    """A text was not sealed for this purpose with this process's key."""


class Seal:
    """Seals texts and opens them. Without a key both leave a text as it is."""

    def __init__(self, key: str | None = None) -> None:
        self._key = key.encode() if key else b""

    def seal(self, purpose: str, text: str) -> str:
        """Return `text` sealed for `purpose`, which must have no NUL."""
        return f"{SEALED}{self._mac(purpose, text)}:{text}" if self._key else text

    def open(self, purpose: str, sealed: str) -> str:
        """Return the text that was sealed for `purpose`.

        Raises:
            TamperedError: it was not.
        """
        if not self._key and sealed.startswith(SEALED):
            raise TamperedError("it is sealed, and this process has no signing key")
        if not self._key:
            return sealed
        mac, _, text = sealed.removeprefix(SEALED).partition(":")
        if not sealed.startswith(SEALED) or not hmac.compare_digest(mac.encode(), self._mac(purpose, text).encode()):
            raise TamperedError("it was not sealed for its place with the fleet's signing key")
        return text

    def _mac(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}\0{text}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
