"""Read a YAML file that an operator wrote, with errors that name the place and quote no value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fleet.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, except that a key which stands twice is an error and not silently the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} stands twice", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_yaml(file: Path) -> object:
    """Return the file's content, an empty mapping for an empty file.

    Raises:
        ConfigError: `config_not_found`, or `config_invalid` with line and column.
    """
    text = _read(file)
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError("config_invalid", f"{file}: line {line}: a character that YAML does not allow") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError("config_invalid", f"{file}: {_problem(error)}") from None
    except (ValueError, RecursionError):  # such as the date 2026-99-99, or 1,000 brackets
        raise ConfigError("config_invalid", f"{file}: has a value that YAML can't represent") from None
    return {} if content is None else content


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("config_not_found", f"{file} does not exist") from None
    except OSError as error:
        raise ConfigError("config_invalid", f"{file}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError("config_invalid", f"{file}: byte {error.start} is not UTF-8") from None


def _problem(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    # A quoted word may be a piece of a value, and so of a secret.
    problem = re.sub(r"'[!\w][^']*'", "…", error.problem or error.context or "not YAML")
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem
