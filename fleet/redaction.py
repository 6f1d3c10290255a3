"""Secrets of the fleet never leave it in an item or a log line, even when an agent prints them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote, urlsplit

from fleet.config import FleetConfig
from fleet.urls import sentinel_url

#: What stands where a secret stood.
REDACTED = "[redacted]"
#: Characters from which on a value is looked for; a shorter one would blacken ordinary words.
SECRET_MIN_LENGTH = 8
#: Names of variables in `agents.TYPE.env` whose values are secrets.
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def secrets_of(config: FleetConfig, *keys: str | None) -> tuple[str, ...]:
    """Return what must be redacted: API keys, Redis's passwords, and the provider keys that the configuration names."""
    url = config.redis.url or ""
    password = urlsplit(url).password
    watched = sentinel_url(url)
    provider = (
        value for agent in config.agents.values() for name, value in agent.env.items() if SECRET_NAME.search(name)
    )
    passwords = (password, password and unquote(password), watched and watched.sentinel_password)
    found = {secret for secret in (*keys, *passwords, *provider) if secret}
    return tuple(sorted((s for s in found if len(s) >= SECRET_MIN_LENGTH), key=len, reverse=True))


class Redactor:
    """Blackens secrets in text and in JSON."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._secrets = tuple(secrets)
        self._escaped = tuple(json.dumps(secret)[1:-1] for secret in self._secrets)

    def text(self, text: str) -> str:
        """Return `text` without secrets."""
        return _without(text, self._secrets)

    def json(self, text: str) -> str:
        """Return a JSON text without secrets in its strings."""
        return _without(text, self._escaped)


def _without(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, REDACTED)
    return text


class RedactingFormatter(logging.Formatter):
    """A formatter whose lines, tracebacks included, have no secrets."""

    def __init__(self, redactor: Redactor, **options: Any) -> None:
        super().__init__(**options)
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as usual, then blacken."""
        return self._redactor.text(super().format(record))
