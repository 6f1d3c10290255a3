"""The vocabulary of policies: a block that others wrote becomes validated rules (protocol §4, Policy)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from fleet.errors import ThreadFailedError
from fleet.policy.patterns import Pattern

Effect = Literal["write", "exec", "read", "network"]
Action = Literal["allow", "deny", "ask"]
Origin = Literal["worker", "thread"]
Place = Literal["work_folder", "outbox"]

#: Characters of a wrong value or of a rule's id that an error shows.
SHOWN = 80

_RULE_KEYS = ("id", "effect", "action", "command", "outside")
_POLICY_KEYS = ("alias", "default", "rules")

_Word = TypeVar("_Word", bound=str)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. Without `command` and `outside` it is about every call with its effect.

    `command` belongs to exec, `outside` to write and read. `origin` is `worker` for the machine owner's rules.
    """

    id: str
    effect: Effect
    action: Action
    origin: Origin
    command: tuple[Pattern, ...] = ()
    outside: Place | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules in the order in which they are tried, the owner's first; `default` is for a call that none is about."""

    rules: tuple[Rule, ...]
    default: Action


class _InvalidError(Exception):
    """A key has a wrong value; the message begins with the key."""


def parse_policy(block: object, config_rules: Sequence[Mapping[str, Any]]) -> Policy:
    """Read a thread's policy block; the owner's rules come before its own. Any JSON value may be given.

    Raises:
        ThreadFailedError: `POLICY_INVALID`, with the rule and the key that are wrong.
    """
    owners = parse_rules(config_rules, "worker")
    if isinstance(block, Mapping) and not isinstance(block.get("alias"), (str, type(None))):
        raise ThreadFailedError("POLICY_INVALID", "policy: alias is no string")
    try:
        fields = _mapping(block, "policy", _POLICY_KEYS)
        default = _word(fields, "default", get_args(Action))
    except _InvalidError as error:
        raise ThreadFailedError("POLICY_INVALID", f"policy: {error}") from None
    return Policy((*owners, *parse_rules(fields.get("rules"), "thread")), default)


def parse_rules(rules: object, origin: Origin) -> tuple[Rule, ...]:
    """Read a list of rules; None is none.

    Raises:
        ThreadFailedError: `POLICY_INVALID`, with the rule and the key that are wrong.
    """
    if rules is None:
        return ()
    whose = "the machine's policy" if origin == "worker" else "policy"
    if not isinstance(rules, (list, tuple)):
        raise ThreadFailedError("POLICY_INVALID", f"{whose}: rules is no list")
    parsed = []
    for number, rule in enumerate(rules):
        try:
            parsed.append(_rule(rule, origin))
        except _InvalidError as error:
            raise ThreadFailedError("POLICY_INVALID", f"{whose}: {_named(rule, number)}: {error}") from None
    return tuple(parsed)


def _rule(value: object, origin: Origin) -> Rule:
    fields = _mapping(value, "the rule", _RULE_KEYS)
    if not isinstance(fields.get("id"), str) or not fields["id"]:
        raise _InvalidError("id is missing, empty or no string")
    effect: Effect = _word(fields, "effect", get_args(Effect))
    action: Action = _word(fields, "action", get_args(Action))
    command = _patterns(fields["command"]) if "command" in fields else ()
    outside: Place | None = _word(fields, "outside", get_args(Place)) if "outside" in fields else None
    if command and effect != "exec":
        raise _InvalidError(f"command belongs to exec, not to {effect}")
    if outside and effect not in ("write", "read"):
        raise _InvalidError(f"outside belongs to write and read, not to {effect}")
    if outside == "outbox" and action == "allow":
        raise _InvalidError("outside: outbox can't be allowed, only denied or asked for")
    return Rule(fields["id"], effect, action, origin, command, outside)


def _patterns(value: object) -> tuple[Pattern, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise _InvalidError("command is no list of patterns, or has none")
    if not all(isinstance(glob, str) and glob.strip() for glob in value):
        raise _InvalidError("command has a pattern that is empty or no string")
    return tuple(Pattern(glob) for glob in value)


def _mapping(value: object, name: str, keys: Iterable[str]) -> Mapping[str, Any]:
    """Return `value` with known keys only: a rule whose `comand` went unnoticed would be about everything."""
    if not isinstance(value, Mapping):
        raise _InvalidError(f"{name} is no mapping")
    for key in value:
        if key not in keys:
            raise _InvalidError(f"{_shown(key)} is no key; allowed: {', '.join(keys)}")
    return value


def _word(fields: Mapping[str, Any], key: str, words: tuple[_Word, ...]) -> _Word:
    value = fields.get(key)
    for word in words:
        if word == value:
            return word
    problem = f"is {_shown(value)}" if key in fields else "is missing"
    raise _InvalidError(f"{key} {problem}; allowed: {', '.join(words)}")


def _named(rule: object, number: int) -> str:
    name = rule.get("id") if isinstance(rule, Mapping) else None
    return f"rule {_shown(name)}" if isinstance(name, str) and name else f"rules[{number}]"


def _shown(value: object) -> str:
    if value is None or isinstance(value, (str, bool, int, float)):
        text = repr(value) if not isinstance(value, int) or value.bit_length() < SHOWN else "a number"
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    return f"a {'mapping' if isinstance(value, Mapping) else 'list'}"
