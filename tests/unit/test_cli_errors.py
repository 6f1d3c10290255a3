from __future__ import annotations

import subprocess
import sys

import pytest

from fleet.cli.app import is_callers
from fleet.errors import ConfigError, FleetError


@pytest.mark.parametrize("code", ["key_missing", "key_refused", "host_unknown", "alias_invalid", "argument_invalid"])
def test_what_the_caller_has_to_correct_is_told_apart(code):
    assert is_callers(FleetError(code, "x"))


@pytest.mark.parametrize("code", ["redis_unreachable", "platform_unreachable", "redis_missing", "thread_unknown"])
def test_what_is_down_or_not_there_is_no_mistake_in_the_call(code):
    assert not is_callers(FleetError(code, "x"))


def test_any_error_of_the_configuration_is_the_callers():
    assert is_callers(ConfigError("config_invalid", "x"))


@pytest.mark.parametrize("module", ["fleet.cli", "fleet.status", "fleet.person"])
def test_the_command_line_does_not_load_celery(module):
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('celery', 'kombu')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_loads_neither_redis_nor_the_http_client():
    code = (
        "import sys, fleet.cli; sys.exit(any(name in sys.modules for name in ('redis', 'httpx', 'rich', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
