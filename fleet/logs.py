"""Forms of a log line: for people, or one JSON object per line that says which thread it is about.

Secrets are blackened in both (`fleet.redaction`).
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal

from fleet.redaction import RedactingFormatter, Redactor

TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_about: ContextVar[Mapping[str, str | int]] = ContextVar("about", default=MappingProxyType({}))


@contextmanager
def about(**fields: str | int) -> Iterator[None]:
    """Let the lines that are logged inside, and in the asyncio tasks begun inside, have these fields.

    Fields: `task`, `session`, `thread` (its alias), `epoch`, `turn`.
    """
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


class JsonFormatter(logging.Formatter):
    """A line is an object: `time`, `level`, `logger`, `message`, `host`, what it is `about`, perhaps a `traceback`."""

    def __init__(self, redactor: Redactor, host: str) -> None:
        super().__init__()
        self._redactor = redactor
        self._host = host

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        fields: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "host": self._host,
            **_about.get(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        # Before they are escaped: a secret is looked for as it is.
        clean = {
            name: self._redactor.text(value) if isinstance(value, str) else value for name, value in fields.items()
        }
        return json.dumps(clean, ensure_ascii=False)


def formatter(wanted: Literal["auto", "json", "text"], fd: int, redactor: Redactor, host: str) -> logging.Formatter:
    """Return the formatter for lines that go to the file descriptor `fd`, see `fleet.config.LogsConfig`.

    A program reads what goes into a pipe or a socket; a terminal, and the files of our own supervisor, people do.
    """
    mode = os.fstat(fd).st_mode
    if wanted == "json" or (wanted == "auto" and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))):
        return JsonFormatter(redactor, host)
    return RedactingFormatter(redactor, fmt=TEXT_FORMAT)
