"""Questions of agents, answered by a person in the thread."""

from __future__ import annotations

from tests.fleet.harness import PATIENCE_S, FleetUnderTest, brief, kind
from tests.support import wait_until


def await_parked(fleet: FleetUnderTest, alias: str) -> None:
    wait_until(
        lambda: (
            any(kind(item) == "pending_prompt" for item in fleet.said(alias)) and fleet.record(alias).step == "idle"
        ),
        PATIENCE_S,
        f"{alias} is not parked",
    )


def test_an_approved_call_runs_and_a_denied_one_does_not(fleet: FleetUnderTest):
    for alias, answer in (("held/yes", "yes"), ("held/no", "not today")):
        fleet.person.hand_over(alias, fleet.folder(alias), "permission", permissions="approval")
        prompt = fleet.await_said(alias, "Allow Bash → make deploy?")
        assert prompt["metadata"]["prompt"]["kind"] == "approval"
        fleet.person.say(alias, answer)
    results = {}
    for alias in ("held/yes", "held/no"):
        said = fleet.await_turns(alias)
        assert [brief(item) for item in said].count("went on") == 1
        assert sum(kind(item) == "pending_prompt" for item in said) == 1
        assert sum(kind(item) == "pending_prompt_resolved" for item in said) == 1
        results[alias] = next(item["metadata"]["tool"] for item in said if kind(item) == "tool_result")
    assert (results["held/yes"]["output"], results["held/yes"]["is_error"]) == ("deployed", False)
    assert results["held/no"]["is_error"]
    assert "not today" in results["held/no"]["output"]


def test_a_parked_thread_holds_no_process_and_its_answer_lets_the_call_through_once(fleet: FleetUnderTest):
    folder = fleet.folder("parked")
    fleet.person.hand_over("parked", folder, "permission", permissions="approval")
    await_parked(fleet, "parked")
    assert not fleet.agents_alive(folder)
    assert fleet.person.state("parked") == "active"
    assert not fleet.turn_ends("parked")
    fleet.person.say("parked", "approve")
    said = fleet.await_turns("parked")
    kinds = [kind(item) for item in said]
    assert kinds.count("pending_prompt") == kinds.count("pending_prompt_resolved") == 1
    assert kinds.count("approval_granted") == 1
    assert kinds.index("pending_prompt_resolved") < kinds.index("approval_granted")
    (granted,) = [item["metadata"] for item in said if kind(item) == "approval_granted"]
    assert (granted["subject"], granted["granted_by"]) == ("Bash make deploy", fleet.platform.person_user_id)
    assert kinds[-1] == "turn_end"
    assert brief(said[-2]) == "went on"


def test_a_parked_question_survives_a_restart_of_its_host(fleet: FleetUnderTest):
    folder = fleet.folder("overnight", fleet.base / "gamma")
    with fleet.also(*fleet.host_children("gamma")):
        fleet.person.hand_over("overnight", folder, "ask me")
        fleet.await_said("overnight", "Which?")
        await_parked(fleet, "overnight")
    fleet.person.say("overnight", "Red")
    with fleet.also(*fleet.host_children("gamma")):
        said = fleet.await_turns("overnight")
    assert "chose Red" in [brief(item) for item in said]
    assert sum(kind(item) == "pending_prompt" for item in said) == 1


def test_completed_cancels_an_open_prompt(fleet: FleetUnderTest):
    fleet.person.hand_over("cancel", fleet.folder("cancel"), "ask me")
    await_parked(fleet, "cancel")
    fleet.person.set_state("cancel", "completed")
    item = fleet.await_said("cancel", "✗ Cancelled")
    assert item["metadata"]["prompt"]["prompt_state"] == "cancelled"


def test_the_message_after_an_answer_is_an_ordinary_one(fleet: FleetUnderTest):
    fleet.person.hand_over("after", fleet.folder("after"), "ask me")
    fleet.await_said("after", "Which?")
    fleet.person.say("after", "Blue")
    fleet.await_turns("after")
    fleet.person.say("after", "hello there")
    said = fleet.await_turns("after", 2)
    assert [brief(item) for item in said if kind(item) == "text"] == ["chose Blue", "You said: hello there"]


def test_structured_answers_win_over_the_text(fleet: FleetUnderTest):
    fleet.person.hand_over("structured", fleet.folder("structured"), "ask me")
    fleet.await_said("structured", "Which?")
    fleet.person.say("structured", "1", answers=[{"question": "Which?", "answer": ["Blue"]}])
    assert "chose Blue" in [brief(item) for item in fleet.await_turns("structured")]
