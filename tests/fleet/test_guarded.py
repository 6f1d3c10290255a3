"""A guarded turn: the policy is said, each denial is said, and nothing that is denied runs."""

from __future__ import annotations

from typing import Any

from fleet.envelope import new_thread
from tests.fleet.harness import FleetUnderTest, brief, kind

POLICY = {
    "default": "allow",
    "rules": [
        {"id": "no_push", "effect": "exec", "action": "deny", "command": ["git push*"]},
        {"id": "stay", "effect": "write", "action": "deny", "outside": "work_folder"},
    ],
}


def guarded(fleet: FleetUnderTest, alias: str, policy: Any) -> None:
    value = new_thread(str(fleet.folder(alias)), "scripted", "guarded")
    value["thread"]["metadata"]["policy"] = policy
    fleet.person.put(alias, value)
    fleet.person.say(alias, "push it")
    fleet.person.set_state(alias, "pending")


def refused(said: list[Any]) -> list[bool]:
    """Of each result in order, whether the call was refused."""
    return [item["metadata"]["tool"]["is_error"] for item in said if kind(item) == "tool_result"]


def test_a_policy_is_said_first_and_each_denial_before_the_refusal(fleet: FleetUnderTest):
    guarded(fleet, "guarded", POLICY)
    said = fleet.await_turns("guarded")
    assert [kind(item) for item in said] == [
        "policy_applied",
        "tool_call",
        "tool_result",
        "tool_call",
        "policy_denied",
        "tool_result",
        "tool_call",
        "policy_denied",
        "tool_result",
        "text",
        "turn_end",
    ]
    assert brief(said[0]) == "Policy in force: 2 rule(s), default allow"
    assert [item["metadata"]["rule"] for item in said if kind(item) == "policy_denied"] == ["no_push", "stay"]
    assert refused(said) == [False, True, True]


def test_what_the_policy_asks_about_is_asked_of_a_person(fleet: FleetUnderTest):
    guarded(fleet, "asking", {"default": "allow", "rules": [{"id": "ask", "effect": "exec", "action": "ask"}]})
    fleet.await_said("asking", "Allow Bash → cd sub && git push?")
    fleet.person.say("asking", "no")
    said = fleet.await_turns("asking")
    assert [item["metadata"]["tool"]["is_error"] for item in said if kind(item) == "tool_result"] == [
        False,
        True,
        False,
    ]


def test_a_policy_with_an_unknown_word_fails_its_thread(fleet: FleetUnderTest):
    guarded(fleet, "wrong-policy", {"default": "maybe", "rules": []})
    fleet.await_state("wrong-policy", "failed")
    (item,) = [item for item in fleet.said("wrong-policy") if kind(item) == "status"]
    assert item["metadata"]["code"] == "POLICY_INVALID"
    assert "maybe" in item["metadata"]["detail"]
