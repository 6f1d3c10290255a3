"""The scripted agent's script: a YAML file, validated into plain values.

    turns:
      - match: "parser"        # a substring of the prompt; left out: every prompt
        events: [{text: "…"}, …]

Each event is a mapping with one key, its kind. `EVENTS` has the kinds and what each may hold.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

PROMPT_KINDS = ("text", "approval", "ask_user_question")

#: The number of questions that one prompt may ask (protocol §4).
MAX_QUESTIONS = 4


class ScriptError(ValueError):
    """The script can't be played. The message names the file, the place in it, and what is allowed."""


def load(path: Path) -> list[dict[str, Any]]:
    """Read the script's turns: each `match` (a string, or None for every prompt) and `events`, with all defaults set.

    Raises:
        ScriptError: the file can't be read, or something in it is not allowed.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ScriptError(f"{path}: {error}") from error
    try:
        return _turns(content)
    except ScriptError as error:
        raise ScriptError(f"{path}: {error}") from None


def _turns(content: Any) -> list[dict[str, Any]]:
    script = _mapping(content, "the script", required=("turns",))
    if not isinstance(script["turns"], list):
        raise ScriptError("turns: must be a list of turns")
    return [_turn(turn, f"turn {number}") for number, turn in enumerate(script["turns"], 1)]


def _turn(turn: Any, place: str) -> dict[str, Any]:
    fields = _mapping(turn, place, required=("events",), optional=("match",))
    match = fields.get("match")
    return {
        "match": None if match is None else _string(match, f"{place}, match"),
        "events": _events(fields["events"], place),
    }


def _events(events: Any, place: str, above: str = "") -> list[dict[str, Any]]:
    if not isinstance(events, list):
        raise ScriptError(f"{place}, events: must be a list of events")
    return [_event(event, place, f"{above}{number}") for number, event in enumerate(events, 1)]


def _event(event: Any, turn: str, number: str) -> dict[str, Any]:
    place = f"{turn}, event {number}"
    if not isinstance(event, dict) or len(event) != 1:
        raise ScriptError(f"{place}: must be one kind and its value, such as {{text: hello}}; kinds: {_listed(KINDS)}")
    ((kind, value),) = event.items()
    if kind == "repeat":
        return {kind: _repeat(value, turn, number)}
    if kind not in EVENTS:
        raise ScriptError(f"{place}: unknown kind {kind!r}; kinds: {_listed(KINDS)}")
    return {kind: EVENTS[kind](value, f"{place}, {kind}")}


def _repeat(value: Any, turn: str, number: str) -> dict[str, Any]:
    place = f"{turn}, event {number}, repeat"
    fields = _mapping(value, place, required=("times", "events"))
    return {
        "times": _count(fields["times"], f"{place}.times"),
        "events": _events(fields["events"], turn, f"{number}."),
    }


def _tool(value: Any, place: str) -> dict[str, Any]:
    fields = _mapping(value, place, required=("name",), optional=("input", "output", "is_error"))
    return {
        "name": _string(fields["name"], f"{place}.name"),
        "input": fields.get("input", {}),
        "output": _string(fields.get("output", ""), f"{place}.output"),
        "is_error": _flag(fields.get("is_error", False), f"{place}.is_error"),
    }


def _write(value: Any, place: str) -> dict[str, Any]:
    contents = ("text", "base64", "symlink")
    fields = _mapping(value, place, required=("path",), optional=(*contents, "replace"))
    given = [name for name in contents if name in fields]
    if len(given) != 1:
        raise ScriptError(f"{place}: needs exactly one of {_listed(contents)}")
    path = _string(fields["path"], f"{place}.path")
    if Path(path).is_absolute() or ".." in Path(path).parts or not Path(path).parts:
        raise ScriptError(f"{place}.path: must be relative to the work folder and stay in it, not {path!r}")
    content = _string(fields[given[0]], f"{place}.{given[0]}")
    if given[0] == "base64":
        try:
            base64.b64decode(content, validate=True)
        except binascii.Error as error:
            raise ScriptError(f"{place}.base64: {error}") from error
    return {"path": path, given[0]: content, "replace": _flag(fields.get("replace", False), f"{place}.replace")}


def _status(value: Any, place: str) -> dict[str, Any]:
    fields = _mapping(value, place, required=("status",), optional=("detail",))
    return {
        "status": _string(fields["status"], f"{place}.status"),
        "detail": _string(fields.get("detail", ""), f"{place}.detail"),
    }


def _ask(value: Any, place: str) -> dict[str, Any]:
    fields = _mapping(value, place, required=("questions",), optional=("kind",))
    kind = fields.get("kind", "ask_user_question")
    if kind not in PROMPT_KINDS:
        raise ScriptError(f"{place}.kind: must be one of {_listed(PROMPT_KINDS)}, not {kind!r}")
    questions = fields["questions"]
    if not isinstance(questions, list) or not 1 <= len(questions) <= MAX_QUESTIONS:
        raise ScriptError(f"{place}.questions: must be a list of 1 to {MAX_QUESTIONS} questions")
    return {
        "kind": kind,
        "questions": [_question(each, f"{place}.questions {number}") for number, each in enumerate(questions, 1)],
    }


def _question(value: Any, place: str) -> dict[str, Any]:
    fields = _mapping(value, place, required=("question",), optional=("header", "options", "multiSelect"))
    options = fields.get("options", [])
    if not isinstance(options, list):
        raise ScriptError(f"{place}.options: must be a list of {{label, description}}")
    return {
        "question": _string(fields["question"], f"{place}.question"),
        "header": _string(fields.get("header", ""), f"{place}.header"),
        "options": [_option(option, f"{place}.options {number}") for number, option in enumerate(options, 1)],
        "multiSelect": _flag(fields.get("multiSelect", False), f"{place}.multiSelect"),
    }


def _option(value: Any, place: str) -> dict[str, str]:
    fields = _mapping(value, place, required=("label",), optional=("description",))
    return {
        "label": _string(fields["label"], f"{place}.label"),
        "description": _string(fields.get("description", ""), f"{place}.description"),
    }


def _usage(value: Any, place: str) -> dict[str, int]:
    names = ("input_tokens", "input_tokens_cached", "output_tokens")
    fields = _mapping(value, place, optional=names)
    return {name: _count(fields.get(name, 0), f"{place}.{name}") for name in names}


def _sleep(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ScriptError(f"{place}: must be a number of seconds, not {value!r}")
    return float(value)


def _exit(value: Any, place: str) -> int:
    status = _count(value, place)
    if status > 255:
        raise ScriptError(f"{place}: must be an exit status from 0 to 255, not {status}")
    return status


def _mapping(
    value: Any, place: str, *, required: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ScriptError(f"{place}: must be a mapping with {_listed((*required, *optional))}")
    for name in value:
        if name not in required and name not in optional:
            raise ScriptError(f"{place}: unknown key {name!r}; allowed: {_listed((*required, *optional))}")
    for name in required:
        if name not in value:
            raise ScriptError(f"{place}: {name} is missing")
    return value


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ScriptError(f"{place}: must be a string, not {value!r}; quote it")
    return value


def _flag(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise ScriptError(f"{place}: must be true or false, not {value!r}")
    return value


def _count(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ScriptError(f"{place}: must be a whole number from 0 on, not {value!r}")
    return value


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


#: Kind → the function that checks its value. `repeat`, which nests events, is the only other kind.
EVENTS: dict[str, Callable[[Any, str], Any]] = {
    "text": _string,
    "thinking": _string,
    "tool": _tool,
    "write": _write,
    "status": _status,
    "ask": _ask,
    "sleep": _sleep,
    "usage": _usage,
    "api_error": _string,
    "fail": _string,
    "exit": _exit,
}
KINDS = (*EVENTS, "repeat")
