"""What is wrong with a configuration, in words: one line for each wrong key, with what is allowed there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from pydantic import BaseModel, ValidationError

#: Characters of a wrong value that an error shows.
SHOWN_VALUE = 80


def problems(error: ValidationError, root: type[BaseModel], file: str, sources: Mapping[str, str]) -> Iterator[str]:
    """Say each error in one line: where, which key, what is wrong with which value, what is allowed.

    `root` is the model of the whole file; `sources` has the environment variable that a dotted key came from.
    """
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":  # follows from another error of the same section
            continue
        loc = detail["loc"]
        variable = sources.get(_dotted(loc))
        where = f"environment: {variable}" if variable else f"{file}: {_dotted(loc)}"
        yield f"{where}: {_what_is_wrong(detail['type'], detail['msg'], root, loc, detail['input'])}"


def _what_is_wrong(kind: str, message: str, root: type[BaseModel], loc: tuple[int | str, ...], value: object) -> str:
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return f"unknown key; {allowed(str(loc[-1]), keys(_group_at(root, loc[:-1])))}"
    if kind == "invalid_key":
        return "is no string; quote the key"
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    message = re.sub(r"a valid (tuple|list)", "a list", re.sub(r"a valid dictionary.*", "a mapping", message))
    # A key is already named by its place; an agent's variables and Redis's URL hold secrets.
    hidden = "[key]" in loc or "env" in loc or loc == ("redis", "url")
    return message if hidden else f"is {shown(value)}, {message}"


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part != "[key]")
    return text.removeprefix(".").replace("\n", "\\n")


def _group_at(root: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the group that a place in the file belongs to, such as `("hosts", "alpha")`."""
    group = root
    for part in loc:
        if part in group.model_fields:
            annotation = group.model_fields[str(part)].annotation
            candidates = (annotation, *get_args(annotation))
            group = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), group)
    return group


def keys(group: type[BaseModel]) -> list[str]:
    """Return the keys of a mapping of the file."""
    return list(group.model_fields)


def allowed(word: str, words: Iterable[str]) -> str:
    """Return the allowed words, led by the one that was probably meant."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"allowed: {joined(words)}"


def joined(words: Iterable[str]) -> str:
    """Return words as one text, in alphabetical order."""
    return ", ".join(sorted(words))


def shown(value: object) -> str:
    """Return a wrong value for an error: short, on one line, without a URL's credentials and query."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)[:SHOWN_VALUE]
    text = re.sub(r"^([a-z+]+://)?.*@", r"\1***@", value, flags=re.DOTALL)
    text = re.sub(r"\?.*", "?***", text, flags=re.DOTALL) if "://" in text else text
    return repr(text if len(text) <= SHOWN_VALUE else f"{text[:SHOWN_VALUE]}…")
