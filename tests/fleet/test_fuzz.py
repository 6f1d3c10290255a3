"""Envelopes and items of any shape, against a live fleet: nothing crashes, nothing stands still, others go on."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fleet.platform.errors import PlatformError
from tests.fleet.harness import PATIENCE_S, FleetUnderTest, brief
from tests.support import wait_until

#: Threads and items that are thrown at the fleet.
EXAMPLES = 120

words = st.text(st.characters(codec="utf-8"), max_size=20)
leaves = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | words
)
anything = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4))


def block(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A mapping with some of the known keys, each as it should be or anything at all, or no mapping."""
    return st.fixed_dictionaries({}, optional={key: value | anything for key, value in known.items()}) | anything


def threads(folder: str) -> st.SearchStrategy[Any]:
    rule = block(
        id=words,
        effect=st.sampled_from(["exec", "write", "read", "network"]),
        action=st.sampled_from(["allow", "deny", "ask"]),
        command=st.lists(words, max_size=2),
        outside=st.sampled_from(["work_folder", "outbox"]),
    )
    metadata = block(
        workspace=block(work_folder=st.just(folder) | st.sampled_from(["", "/", "relative", "/etc/passwd", "/\0"])),
        agent=block(
            type=st.sampled_from(["scripted", "codex", "claude_code", ""]),
            permissions=st.sampled_from(["autonomous", "approval", "guarded"]),
            executable=st.sampled_from(["", "/bin/true", "no such program"]),
            model=words,
        ),
        instance=block(state=st.sampled_from(["pending", "active", "failed", "completed"])),
        artifacts=block(prefix=st.sampled_from(["a/", "a", "../"]), source=st.sampled_from(["out", "..", "/etc"])),
        policy=block(default=st.sampled_from(["allow", "deny"]), rules=st.lists(rule, max_size=2)),
        attachments=block(inbox=st.sampled_from([".in", "../..", "/etc"])),
    )
    return block(type=st.just("thread"), thread=block(metadata=metadata))


parts = block(
    type=st.sampled_from(["text", "json", "file"]),
    text=words,
    json=anything,
    file=block(alias=words, name=words, size=st.integers(0, 10)),
)
posts = st.fixed_dictionaries({"content": st.lists(parts, max_size=3) | anything, "metadata": block(answers=anything)})


def test_no_envelope_and_no_item_crashes_the_fleet_or_leaves_a_thread_standing(fleet: FleetUnderTest):
    folder = str(fleet.folder("fuzz"))
    logs = {log: log.stat().st_size for log in (fleet.base / "home" / "logs").glob("*.log")}
    numbers = itertools.count()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(threads(folder), st.lists(posts, max_size=2))
    def throw(value: Any, said: list[Any]) -> None:
        alias = f"fuzz/{next(numbers)}"
        try:
            fleet.person.put(alias, value)
            for item in said:
                fleet.person.post(alias, item)
        except (PlatformError, ValueError):
            return

    throw()
    aliases = [f"fuzz/{n}" for n in range(next(numbers))]

    def standing() -> list[str]:
        return [alias for alias in aliases if fleet.record(alias).step not in ("", "idle", "end", "wait_host")]

    wait_until(lambda: not standing(), PATIENCE_S * 2, lambda: f"these stand still: {standing()}")
    fleet.person.hand_over("fuzz-sane", fleet.folder("fuzz-sane"), "hello")
    assert brief(fleet.await_turns("fuzz-sane")[-1]) == "Turn complete"
    for log, before in logs.items():
        assert b"Traceback" not in log.read_bytes()[before:], log
