"""The compose files as `docker compose` reads them: anchors, merges and variables, without Docker."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
FIRST, FURTHER = ROOT / "docker-compose.yml", ROOT / "docker-compose.host.yml"

Json = dict[str, Any]

#: `$$`, or `${NAME}` with an optional `:-default`, `-default` or `:?what is missing`.
_VARIABLE = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?:(?P<operator>:?[-?])(?P<word>[^}]*))?\})")
_DURATION = re.compile(r"(\d+)(h|m|s)")
_SECONDS = {"h": 3600, "m": 60, "s": 1}


def read(file: Path) -> Json:
    """Return a compose file with its variables still in it."""
    content: Json = yaml.safe_load(file.read_text())
    return content


def filled(file: Path, variables: Mapping[str, str]) -> Json:
    """Return a compose file with its variables filled in.

    Raises:
        KeyError: a variable that must be set is not; with what the file says of it.
    """
    content: Json = each_string(read(file), lambda text: fill(text, variables))
    return content


def each_string(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with every string in it changed."""
    if isinstance(value, dict):
        return {key: each_string(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [each_string(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def fill(text: str, variables: Mapping[str, str]) -> str:
    """Return `text` with its variables filled in."""

    def value(found: re.Match[str]) -> str:
        if found["dollar"]:
            return "$"
        known, operator = variables.get(found["name"]), found["operator"] or ""
        if known or (known is not None and not operator.startswith(":")):
            return known
        if operator.endswith("?"):
            raise KeyError(found["word"])
        return found["word"] or ""

    return _VARIABLE.sub(value, text)


def variables_of(file: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each variable in a compose file, and its default."""
    for found in _VARIABLE.finditer(file.read_text()):
        if found["name"]:
            yield found["name"], found["word"] if (found["operator"] or "?").endswith("-") else None


def seconds(duration: str) -> int:
    """Return a duration such as `1m30s` in seconds."""
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION.findall(duration))


def image_environment() -> dict[str, str]:
    """Return what the image itself puts into the environment."""
    text = (ROOT / "ops/Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.removeprefix("ENV ") for line in text.splitlines() if line.startswith("ENV ")]
    return dict(pair.split("=", 1) for line in lines for pair in line.split())
