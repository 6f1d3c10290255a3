"""`fleet config …`: what is in force, and nothing that is secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from fleet.cli.app import cli
from fleet.config import load_config


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEET_HOME", str(tmp_path / "home"))
    for variable in ("FLEET_CONFIG", "FLEET_REDIS_URL", "BLOBHUB_API_URL"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "hosts: {alpha: {work_folders: [/srv]}}\nagents: {codex: {env: {OPENAI_API_KEY: provider-secret}}}\n"
    )
    return file


def shown(file: Path, *options: str) -> str:
    done = CliRunner().invoke(cli, ["config", "show", "--config", str(file), *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://user:redis-secret@db:6379/1", "redis://[redacted]@db:6379/1"),
        ("rediss://db:6379/0?password=redis-secret", "rediss://db:6379/0?[redacted]"),
        ("redis://db:6379/0", "redis://db:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("sentinel://:redis-secret@a:1,b:2/0?master=m&sentinel_password=sentinel-secret", None),
    ],
)
def test_what_is_shown_has_no_secret(file: Path, monkeypatch: pytest.MonkeyPatch, url: str, expected: str | None):
    monkeypatch.setenv("FLEET_REDIS_URL", url)
    text = shown(file)
    assert "secret" not in text
    values = yaml.safe_load(text)
    assert expected is None or values["redis"]["url"] == expected
    assert values["agents"]["codex"]["env"] == {"OPENAI_API_KEY": "[redacted]"}


def test_the_environment_wins_in_what_is_shown(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BLOBHUB_API_URL", "https://platform.example.com/v1")
    assert json.loads(shown(file, "--json"))["platform"]["url"] == "https://platform.example.com/v1"


def test_what_is_shown_is_a_configuration_again(file: Path):
    again = file.with_name("again.yaml")
    again.write_text(shown(file))
    assert load_config(again, {}).hosts == load_config(file, {}).hosts
