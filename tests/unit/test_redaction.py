from __future__ import annotations

import json
import logging
import sys

from fleet.config import FleetConfig
from fleet.redaction import REDACTED, RedactingFormatter, Redactor, secrets_of

CONFIG = FleetConfig.model_validate(
    {
        "redis": {"url": "redis://:pass%2Fword-1@localhost/0"},
        "agents": {"claude_code": {"env": {"A_KEY": "provider-key-1", "LANG": "de_DE.UTF-8", "X_KEY": "k"}}},
    }
)


def test_keys_and_passwords_are_secrets_and_ordinary_values_are_not():
    secrets = secrets_of(CONFIG, "blobhub-key-1", None)
    assert set(secrets) == {"blobhub-key-1", "provider-key-1", "pass%2Fword-1", "pass/word-1"}


def test_the_passwords_of_redis_and_of_its_sentinels_are_secrets():
    url = "sentinel://:redis-pass-1@one:1,two:2/0?master=main&sentinel_password=watch-pass-1"
    secrets = secrets_of(FleetConfig.model_validate({"redis": {"url": url}}))
    assert set(secrets) == {"redis-pass-1", "watch-pass-1"}


def test_a_secret_is_blackened_wherever_it_stands_in_an_item():
    secret = 'quo"te\\and-ümlaut'
    text = json.dumps({"a": [f"x{secret}y"], secret: {"b": secret}})
    redacted = json.loads(Redactor([secret]).json(text))
    assert redacted == {"a": [f"x{REDACTED}y"], REDACTED: {"b": REDACTED}}


def test_the_longer_of_two_secrets_goes_first():
    secrets = secrets_of(CONFIG, "provider-key-1-longer")
    assert Redactor(secrets).text("provider-key-1-longer") == REDACTED


def test_a_log_line_and_its_traceback_have_no_secret():
    formatter = RedactingFormatter(Redactor(["provider-key-1"]), fmt="%(message)s")
    try:
        int("provider-key-1")
    except ValueError:
        record = logging.LogRecord("x", logging.INFO, __file__, 1, "key %s", ("provider-key-1",), sys.exc_info())
    assert "provider-key-1" not in formatter.format(record)
