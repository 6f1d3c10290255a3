"""What a person does in some threads at once, and what is in them in the end, ids and times aside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fleet.envelope import new_thread, with_state
from tests.fleet.harness import PATIENCE_S, FleetUnderTest, brief, kind
from tests.support import wait_until

Json = dict[str, Any]

#: Fields of items that differ from run to run: ids and times.
DIFFERENT = frozenset(
    {"id", "created_at", "post_id", "prompt_id", "invocation_id", "agent_session_id", "duration_ms", "user_id"}
)
#: Kinds of what is said in a thread of the visit.
SAID = [
    *("thinking", "text", "tool_call", "tool_result", "artifacts_published", "turn_end"),
    *("artifacts_published", "turn_end"),
    *("pending_prompt", "pending_prompt_resolved", "text", "artifacts_published", "turn_end"),
]


def visit(fleet: FleetUnderTest, name: str) -> list[str]:
    """Lead a thread on each host: two messages, an answered question, artifacts in each turn, `completed`.

    Returns the aliases of the threads; the fleet has done all that it was asked for.
    """
    roots: dict[str, Path] = {f"{name}/alpha": fleet.alpha, f"{name}/beta": fleet.beta}
    for alias, root in roots.items():
        value = new_thread(str(fleet.folder(alias, root)), "scripted", "autonomous")
        value["thread"]["metadata"]["artifacts"] = {"prefix": f"published/{alias}/", "source": "out"}
        fleet.person.put(alias, value)
        fleet.person.say(alias, "hello there")
        fleet.person.put(alias, with_state(value, "pending"))
    _say_when_ended(fleet, roots, 1, "publish it")
    _say_when_ended(fleet, roots, 2, "ask me")
    for alias in roots:
        fleet.await_said(alias, "Which?")
        fleet.person.say(alias, "2")
    for alias in roots:
        fleet.await_turns(alias, 3)
        fleet.person.set_state(alias, "completed")
    for alias in roots:
        await_ended(fleet, alias)
    return list(roots)


def _say_when_ended(fleet: FleetUnderTest, aliases: Iterable[str], turns: int, text: str) -> None:
    for alias in aliases:
        fleet.await_turns(alias, turns)
        fleet.person.say(alias, text)


def await_ended(fleet: FleetUnderTest, alias: str) -> None:
    wait_until(lambda: "thread_completed" in fleet.audits(alias), PATIENCE_S, f"{alias}: no audit item of its end")


def outcome(fleet: FleetUnderTest, alias: str) -> Json:
    """Return what there is of a thread: its items, the audit items about it, its artifacts, and how it ended.

    The number of its turns depends on whether the answer found the agent waiting or parked, what is said does not.
    """
    record = fleet.record(alias)
    found = {
        "items": fleet.person.items(alias),
        "audits": fleet.audits(alias),
        "artifacts": fleet.person.aliases(f"published/{alias}/"),
        "state": fleet.person.state(alias),
        "record": [record.step, record.outcome, record.attempt],
    }
    same: Json = _without_differences(found, alias)
    return same


def kinds(items: Sequence[Json]) -> list[str]:
    """The kinds of what the fleet has said among the items of a thread."""
    return [kind(item) for item in items if kind(item) != "person"]


def briefs(items: Sequence[Json]) -> list[str]:
    """All that was said in a thread, as people read it."""
    return [brief(item) for item in items]


def _without_differences(value: Any, alias: str) -> Any:
    match value:
        case dict():
            return {key: _without_differences(part, alias) for key, part in value.items() if key not in DIFFERENT}
        case list():
            return [_without_differences(part, alias) for part in value]
        case str():
            return value.replace(alias, "THREAD")
        case _:
            return value
