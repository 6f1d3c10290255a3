from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.logs import JsonFormatter, about, formatter
from fleet.redaction import REDACTED, Redactor

SECRET = 'quo"te-and-ümlaut'
JSON = JsonFormatter(Redactor([SECRET]), "alpha")


def record(message: str = "done %d", *args: object, error: Any = None) -> logging.LogRecord:
    return logging.LogRecord("fleet.turn", logging.INFO, __file__, 1, message, args or (3,), error)


def test_a_line_is_one_object_with_time_level_logger_message_and_host():
    line = JSON.format(record())
    assert "\n" not in line
    fields = json.loads(line)
    assert fields.pop("time").endswith("+00:00")
    assert fields == {"level": "INFO", "logger": "fleet.turn", "message": "done 3", "host": "alpha"}


def test_a_line_says_what_it_is_about_as_long_as_it_is():
    with about(task="fleet.run_turn", thread="a/b"), about(epoch=7, turn=2):
        inside = json.loads(JSON.format(record()))
    outside = json.loads(JSON.format(record()))
    assert inside.items() >= {"task": "fleet.run_turn", "thread": "a/b", "epoch": 7, "turn": 2}.items()
    assert "thread" not in outside


def test_what_two_coroutines_are_about_is_not_mixed_up_and_their_subtasks_inherit_it():
    async def line() -> str:
        await asyncio.sleep(0)
        return str(json.loads(JSON.format(record()))["thread"])

    async def work(alias: str) -> str:
        with about(thread=alias):
            return await asyncio.create_task(line())

    async def both() -> list[str]:
        return await asyncio.gather(work("a"), work("b"))

    assert asyncio.run(both()) == ["a", "b"]


def test_a_secret_is_blackened_in_message_field_and_traceback():
    try:
        int(SECRET)
    except ValueError:
        with about(thread=SECRET):
            fields = json.loads(JSON.format(record("key %s", SECRET, error=sys.exc_info())))
    assert fields["message"] == f"key {REDACTED}"
    assert fields["thread"] == REDACTED
    assert "Traceback" in fields["traceback"]
    assert SECRET not in str(fields)


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[int]:
    """A file descriptor to write a log to."""
    if kind == "file":
        fds = [os.open(folder / "log", os.O_WRONLY | os.O_CREAT)]
    else:
        fds = list(reversed(os.pipe() if kind == "pipe" else pty.openpty()))
    try:
        yield fds[0]
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(
    ("wanted", "kind", "is_json"),
    [
        ("auto", "pipe", True),
        ("auto", "terminal", False),
        ("auto", "file", False),
        ("text", "pipe", False),
        ("json", "terminal", True),
        ("json", "file", True),
    ],
)
def test_programs_get_objects_and_people_get_text(wanted: Any, kind: str, is_json: bool, tmp_path: Path):
    with opened(kind, tmp_path) as fd:
        line = formatter(wanted, fd, Redactor([]), "alpha").format(record())
    assert line.startswith("{") is is_json
    assert "done 3" in line
