"""What a request to the platform can come to, told apart by what may be done next (protocol §1)."""

from __future__ import annotations


class PlatformError(Exception):
    """A request did not succeed. The message never holds the key or a body."""


class TransientError(PlatformError):
    """The platform may answer later. Reads may be repeated at once."""


class NotExecutedError(TransientError):
    """The request was refused before any handler ran (429) or never left (no connection): a write may be repeated."""


class OutcomeUnknownError(TransientError):
    """5xx, a timeout or a broken connection: a write may have been stored, so read back before repeating it."""


class RefusedError(PlatformError):
    """The platform understood the request and refused it; repeating it changes nothing.

    `code` is the platform's `error`, such as `not_found` or `thread_item_too_large`.
    """

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(f"{code}: {message}" if message else code)


class AccessDeniedError(RefusedError):
    """401 or 403: no key, a key that is not accepted here, or a session that was deleted."""
