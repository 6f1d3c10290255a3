"""Which effect a tool has, and the command and the paths in its input (protocol §4, Policy).

The input was written by a model. So a path counts wherever it stands, under any key that could be one, and what is
missing or of another type counts as unknown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from fleet.events import ToolCall
from fleet.policy.rules import Effect

_CLAUDE_CODE: dict[str, Effect] = {
    **dict.fromkeys(("Write", "Edit", "MultiEdit", "NotebookEdit"), "write"),
    **dict.fromkeys(("Bash", "BashOutput", "KillShell", "Monitor"), "exec"),
    **dict.fromkeys(("Read", "Glob", "Grep", "NotebookRead"), "read"),
    **dict.fromkeys(("WebFetch", "WebSearch"), "network"),
}

#: Agent type → tool → effect.
_EFFECTS: dict[str, dict[str, Effect]] = {
    "claude_code": _CLAUDE_CODE,
    "scripted": _CLAUDE_CODE,
    "codex": {"shell": "exec", "file_change": "write"},
}

#: Tools that run a command line; the others with the effect exec carry none.
_RUNS_A_COMMAND = frozenset({"Bash", "Monitor", "shell"})
#: Tools that search from a folder, which is the work folder when they don't say.
_SEARCHES = frozenset({"Glob", "Grep"})

#: Levels of an input that are searched for paths.
MAX_DEPTH = 8

_PATH_KEY = re.compile(r".*(path|paths|file|files|filename|folder|dir|directory|root)", re.IGNORECASE)
_MAGIC = re.compile(r"[*?\[{(]")

#: How Codex itself runs the command that its model wrote.
_CODEX_SHELL = re.compile(r"(/(usr/)?(local/)?bin/)?(bash|sh|zsh)")


def effect_of(agent_type: str, tool_name: str) -> Effect | None:
    """Return the effect of a tool, None for a tool or an agent that is not known."""
    return _EFFECTS.get(agent_type, {}).get(tool_name)


def runs_a_command(call: ToolCall) -> bool:
    """Return whether the tool's input should have a command line."""
    return call.name in _RUNS_A_COMMAND


def command_of(call: ToolCall) -> str | None:
    """Return the command line of a call as it is in the input; None without one."""
    command = call.input.get("command") if isinstance(call.input, Mapping) else None
    if isinstance(command, (list, tuple)) and command and all(isinstance(word, str) for word in command):
        return shlex.join(command)
    return command if isinstance(command, str) else None


def line_to_judge(agent_type: str, command: str) -> str:
    """Return the line that the model wrote: without the `bash -lc` that Codex puts around each."""
    if agent_type != "codex":
        return command
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    is_wrapped = len(words) == 3 and _CODEX_SHELL.fullmatch(words[0]) and words[1] in ("-lc", "-c")
    return words[2] if is_wrapped else command


def paths_of(call: ToolCall) -> tuple[str | None, ...]:
    """Return all paths of a call that reads or writes, at least one. None is a path that can't be known."""
    paths = list(_paths_in(call.input, MAX_DEPTH))
    if call.name in _SEARCHES and isinstance(call.input, Mapping):
        paths = [path if path is None or not path.lstrip().startswith("~") else None for path in paths] or ["."]
        if call.name == "Glob":
            base = _glob_base(call.input.get("pattern"))
            paths = [_under(path, base) for path in paths]
    return tuple(paths) or (None,)


def _paths_in(value: Any, depth: int) -> Iterator[str | None]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str) and _PATH_KEY.fullmatch(key):
                yield from _strings(inner)
            elif isinstance(inner, (Mapping, list, tuple)):
                yield from _paths_in(inner, depth - 1) if depth else (None,)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            if isinstance(inner, (Mapping, list, tuple)):
                yield from _paths_in(inner, depth - 1) if depth else (None,)


def _strings(value: Any) -> Iterator[str | None]:
    """Yield the paths that a path's key holds; none for null, which is how an optional key is left out."""
    if isinstance(value, (list, tuple)):
        yield from (entry if isinstance(entry, str) else None for entry in value)
    elif value is not None:
        yield value if isinstance(value, str) else None


def _glob_base(pattern: Any) -> str | None:
    """Return the folder below which all matches of a glob are; None when it can't be told."""
    if not isinstance(pattern, str):
        return None
    plain = pattern.replace("\\", "")
    parts = plain.split("/")
    fixed = next((index for index, part in enumerate(parts) if _MAGIC.search(part)), len(parts))
    leaves = any(".." in part for part in parts[fixed:]) or re.search(r"[{(,|]\s*/", plain)
    if leaves or plain.lstrip().startswith("~"):
        return None
    return "/".join(parts[:fixed]) or ("/" if plain.startswith("/") else ".")


def _under(path: str | None, base: str | None) -> str | None:
    if path is None or base is None:
        return None
    return base if base.startswith("/") else f"{path}/{base}"
