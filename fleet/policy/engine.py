"""The judgement of one tool call by a policy: the first rule that is about it, else the default."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from fleet.events import ToolCall
from fleet.policy.effects import command_of, effect_of, line_to_judge, paths_of, runs_a_command
from fleet.policy.paths import is_outside, outbox_root, resolve
from fleet.policy.patterns import ANY, shown
from fleet.policy.rules import Action, Effect, Origin, Policy, Rule
from fleet.policy.shell import Line, analyse

#: Seconds for one call. Only a policy or a command made to be slow needs more than a tenth of one.
EVALUATION_MAX_S = 5.0

#: Characters of a command or a path in an explanation.
SHOWN = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens with a call.

    `rule_id` is the rule that decided, None when it was the default or a failed evaluation; `origin` says which of
    these. `detail` is the call's command or path, whichever its effect uses, else the tool's name. `reason` is for
    people.
    """

    action: Action
    rule_id: str | None
    origin: Origin | Literal["default", "error"]
    effect: Effect | None
    detail: str
    reason: str


def evaluate(policy: Policy, agent_type: str, call: ToolCall, work_folder: Path, outbox: Path | None) -> Verdict:
    """Judge `call`. Never raises: an evaluation that fails denies.

    `outbox` is relative to the work folder or absolute; None when the thread publishes nothing. Looks at the file
    system when a rule has `outside`, and may take `EVALUATION_MAX_S`.
    """
    return explain(policy, agent_type, call, work_folder, outbox)[0]


def explain(
    policy: Policy, agent_type: str, call: ToolCall, work_folder: Path, outbox: Path | None
) -> tuple[Verdict, tuple[str, ...]]:
    """Judge `call` as `evaluate` does, and say in one line each what every rule tried made of it."""
    lines: list[str] = []
    subject = _Subject(agent_type, call, work_folder, outbox)
    try:
        verdict = _judge(policy, subject, lines)
    except Exception as error:
        reason = f"the evaluation failed: {type(error).__name__}"
        verdict = Verdict("deny", None, "error", effect_of(agent_type, call.name), call.name, reason)
    lines.append(f"{verdict.action}: {verdict.reason}")
    return verdict, tuple(lines)


def _judge(policy: Policy, subject: _Subject, lines: list[str]) -> Verdict:
    deadline = time.thread_time() + EVALUATION_MAX_S
    for rule in policy.rules:
        if time.thread_time() > deadline:
            raise TimeoutError
        reason = _why(rule, subject)
        named = f"rule {rule.id!r} ({rule.origin}: {rule.action} {rule.effect})"
        lines.append(f"{named}: {reason or 'is not about this call'}")
        if reason:
            return Verdict(rule.action, rule.id, rule.origin, rule.effect, subject.detail(rule), f"{named}: {reason}")
    reason = f"no rule is about this call, the default is {policy.default}"
    return Verdict(policy.default, None, "default", subject.effect, subject.detail(None), reason)


class _Subject:
    """A call, taken apart when a rule first asks for it."""

    def __init__(self, agent_type: str, call: ToolCall, work_folder: Path, outbox: Path | None) -> None:
        self.effect = effect_of(agent_type, call.name)
        self._agent_type = agent_type
        self._call = call
        self._work_folder = work_folder
        self._outbox = outbox

    @cached_property
    def line(self) -> Line | None:
        """The call's command line; one that could be anything when it is missing; None for a tool without one."""
        if not runs_a_command(self._call):
            return None
        command = command_of(self._call)
        if command is None:
            return Line("", (ANY,), ())
        return analyse(line_to_judge(self._agent_type, command))

    @cached_property
    def paths(self) -> tuple[str | None, ...]:
        """The call's paths; None for one that can't be known."""
        return paths_of(self._call)

    def outside(self, place: str) -> list[str | None]:
        """Return the paths that leave the work folder or the outbox."""
        return [path for path in self.paths if is_outside(path, self._work_folder, self._roots[place])]

    def detail(self, rule: Rule | None) -> str:
        """Return what an audit item says the call was about."""
        if self.effect == "exec":
            return command_of(self._call) or self._call.name
        if self.effect in ("write", "read"):
            paths = self.outside(rule.outside) if rule and rule.outside else self.paths
            return next((path for path in (*paths, *self.paths) if path), self._call.name)
        return self._call.name

    @cached_property
    def _roots(self) -> dict[str, str | None]:
        return {
            "work_folder": resolve(str(self._work_folder)),
            "outbox": outbox_root(self._work_folder, self._outbox),
        }


def _why(rule: Rule, subject: _Subject) -> str | None:
    """Return why `rule` is about the call; None when it is not."""
    if rule.effect != subject.effect:
        return None
    if rule.command:
        return _why_by_command(rule, subject)
    if rule.outside:
        return _why_by_path(rule, subject, rule.outside)
    return f"is about every {rule.effect}"


def _why_by_command(rule: Rule, subject: _Subject) -> str | None:
    line = subject.line
    if line is None:
        return None
    for pattern in rule.command:
        if rule.action == "allow":
            if line.allowed_by(pattern):
                return f"{pattern.glob!r} matches the whole line"
        elif (caught := line.restricted_by(pattern)) is not None:
            return f"{pattern.glob!r} matches {_shown(caught)}"
    return None


def _why_by_path(rule: Rule, subject: _Subject, place: str) -> str | None:
    """A restricting rule is about a call with any path outside; an allowing one only when all are known and outside."""
    outside = subject.outside(place)
    if not outside or (rule.action == "allow" and (None in outside or len(outside) < len(subject.paths))):
        return None
    return f"{_shown(outside[0])} is outside of the {place}"


def _shown(text: str | None) -> str:
    if text is None:
        return "a path that can't be known"
    return repr(shown(text if len(text) <= SHOWN else f"{text[:SHOWN]}…"))
