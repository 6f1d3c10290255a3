"""The way of a message, end to end: a pending thread becomes a finished turn on the machine that owns its folder."""

from __future__ import annotations

import threading

import pytest

from fleet import machine
from tests.fleet.harness import PATIENCE_S, FleetUnderTest, brief, kind
from tests.support import wait_until


def test_a_pending_thread_becomes_a_finished_turn_on_its_host(fleet: FleetUnderTest):
    fleet.person.hand_over("way", fleet.folder("way"), "hello there")
    said = fleet.await_turns("way")
    assert [kind(item) for item in said] == ["thinking", "text", "tool_call", "tool_result", "turn_end"]
    assert brief(said[1]) == "You said: hello there"
    assert (
        said[-1]["metadata"]["stats"].items()
        >= {
            "input_tokens": 100,
            "input_tokens_cached": 60,
            "output_tokens": 7,
        }.items()
    )
    assert brief(said[-1]) == "Turn complete"
    assert fleet.person.state("way") == "active"
    assert fleet.record("way").host == "alpha"
    wait_until(lambda: "thread_active" in fleet.audits("way"), PATIENCE_S, "no audit item")


def test_the_longest_root_wins(fleet: FleetUnderTest):
    fleet.person.hand_over("inner", fleet.folder("inner/repo"), "hello")
    fleet.await_turns("inner")
    assert fleet.record("inner").host == "beta"


def test_threads_on_both_hosts_run_side_by_side(fleet: FleetUnderTest):
    aliases = [f"both/{index}" for index in range(6)]
    for index, alias in enumerate(aliases):
        root = fleet.beta if index % 2 else fleet.alpha
        fleet.person.hand_over(alias, fleet.folder(f"both{index}", root), "hello")
    for alias in aliases:
        assert [kind(item) for item in fleet.await_turns(alias)][-1] == "turn_end"
        assert len(fleet.turn_ends(alias)) == 1
    assert {fleet.record(alias).host for alias in aliases} == {"alpha", "beta"}


def test_a_long_turn_is_posted_whole_in_order_and_once(fleet: FleetUnderTest):
    fleet.person.hand_over("many", fleet.folder("many"), "many")
    said = fleet.await_turns("many")
    assert [brief(item) for item in said] == [f"line {i}" for i in range(200)] + ["Turn complete"]
    post_ids = [item["metadata"]["post_id"] for item in said]
    assert len(set(post_ids)) == len(post_ids)


def test_a_second_message_resumes_the_same_agent_session(fleet: FleetUnderTest):
    fleet.person.hand_over("resume", fleet.folder("resume"), "session one")
    fleet.await_turns("resume")
    fleet.person.say("resume", "session two")
    first, _, second, _ = fleet.await_turns("resume", 2)
    assert brief(first).split()[1] == brief(second).split()[1]
    assert [brief(item).split()[-1] for item in (first, second)] == ["1", "2"]


def test_messages_during_a_turn_start_the_next_one_together(fleet: FleetUnderTest):
    fleet.person.hand_over("meanwhile", fleet.folder("meanwhile"), "brief pause")
    fleet.await_said("meanwhile", "pausing")
    for text in ("hello one", "two", "three"):
        fleet.person.say("meanwhile", text)
    said = fleet.await_turns("meanwhile", 2)
    assert "You said: hello one\n\ntwo\n\nthree" in [brief(item) for item in said]


def test_an_item_of_the_workers_own_user_starts_nothing(fleet: FleetUnderTest):
    fleet.person.hand_over("echo", fleet.folder("echo"))
    fleet.await_state("echo", "active")
    fleet.worker.say("echo", "hello from ourselves")
    fleet.person.say("echo", "hello from a person")
    said = fleet.await_turns("echo")
    assert "You said: hello from a person" in [brief(item) for item in said]
    assert len(fleet.turn_ends("echo")) == 1


def test_artifacts_are_published_before_the_turn_ends(fleet: FleetUnderTest):
    fleet.person.hand_over("art", fleet.folder("art"))
    value = fleet.person.value("art")
    value["thread"]["metadata"]["artifacts"] = {"prefix": "published/art/", "source": "out"}
    fleet.person.put("art", value)
    fleet.person.set_state("art", "pending")
    fleet.person.say("art", "publish")
    said = fleet.await_turns("art")
    assert [kind(item) for item in said][-2:] == ["artifacts_published", "turn_end"]
    assert said[-2]["metadata"]["aliases"] == ["published/art/plan.md"]
    assert said[-2]["metadata"]["skipped"] == [{"path": "raw.bin", "reason": "binary"}]
    assert fleet.person.aliases("published/art/") == ["published/art/plan.md"]


def test_without_an_owner_the_thread_waits_and_starts_by_itself(fleet: FleetUnderTest):
    folder = fleet.folder("waiting", fleet.base / "gamma")
    fleet.person.hand_over("waiting", folder, "hello")
    item = fleet.await_said("waiting", "No host")
    assert (kind(item), item["metadata"]["status"]) == ("status", "no_host")
    assert fleet.person.state("waiting") == "pending"
    with fleet.also(*fleet.host_children("gamma")):
        fleet.await_turns("waiting")
        assert fleet.record("waiting").host == "gamma"
        assert [kind(item) for item in fleet.said("waiting")].count("status") == 1


def test_completed_stops_a_running_turn_and_its_agent_within_two_seconds(fleet: FleetUnderTest):
    folder = fleet.folder("stop")
    fleet.person.hand_over("stop", folder, "long work")
    fleet.await_said("stop", "begun")
    assert fleet.agents_alive(folder)
    fleet.person.set_state("stop", "completed")
    wait_until(lambda: not fleet.agents_alive(folder), 2, "the agent runs on")
    said = fleet.await_turns("stop")
    assert brief(said[-1]) == "Turn ended (stopped)"
    assert fleet.person.state("stop") == "completed"
    wait_until(lambda: "thread_completed" in fleet.audits("stop"), PATIENCE_S, "no audit item")


def test_pending_restarts_a_running_thread(fleet: FleetUnderTest):
    folder = fleet.folder("restart")
    fleet.person.hand_over("restart", folder, "long work")
    fleet.await_said("restart", "begun")
    epoch = fleet.record("restart").epoch
    fleet.person.set_state("restart", "pending")
    fleet.await_said("restart", "started again")
    fleet.await_state("restart", "active")
    wait_until(lambda: fleet.record("restart").step == "run", PATIENCE_S, "the turn does not run again")
    assert fleet.record("restart").epoch > epoch
    fleet.person.set_state("restart", "completed")
    fleet.await_turns("restart")
    assert "another scripted agent" not in str(fleet.said("restart"))
    assert not fleet.agents_alive(folder)


def test_celery_call_with_force_restarts_and_without_leaves_alone(fleet: FleetUnderTest):
    folder = fleet.folder("force")
    fleet.person.hand_over("force", folder, "long work")
    fleet.await_said("force", "begun")
    before = fleet.record("force")
    fleet.call("fleet.activate", fleet.platform.session_id, "force")
    fleet.call("fleet.activate", fleet.platform.session_id, "force", force=True)
    fleet.await_said("force", "started again")
    wait_until(lambda: fleet.record("force").step == "run", PATIENCE_S, "the turn does not run again")
    assert fleet.record("force").epoch > before.epoch
    fleet.person.set_state("force", "completed")
    fleet.await_turns("force")
    starts = [brief(item) for item in fleet.said("force") if "started again" in brief(item)]
    assert len(starts) == 1


def test_the_same_activation_twenty_times_at_once_runs_one_turn(fleet: FleetUnderTest):
    fleet.person.hand_over("twenty", fleet.folder("twenty"), "hello")
    command = ["fleet.activate", fleet.platform.session_id, "twenty"]
    threads = [threading.Thread(target=fleet.send, args=command) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = fleet.await_turns("twenty")
    assert [kind(item) for item in said].count("turn_end") == 1
    assert fleet.record("twenty").turn == 1
    assert fleet.audits("twenty").count("thread_active") == 1


def test_two_beats_at_once_do_no_harm(fleet: FleetUnderTest):
    spare = machine.beat_child(fleet.environ, fleet.base / "home" / "hosts" / "beta")
    with fleet.also(spare):
        fleet.person.hand_over("beats", fleet.folder("beats"), "hello")
        said = fleet.await_turns("beats")
    assert [kind(item) for item in said].count("turn_end") == 1


@pytest.mark.parametrize(
    ("folder", "agent", "code"),
    [
        ("relative", {}, "WORK_FOLDER_NOT_ABSOLUTE"),
        ("{alpha}/missing", {}, "WORK_FOLDER_NOT_FOUND"),
        ("{alpha}/file", {}, "WORK_FOLDER_NOT_A_DIR"),
        ("{alpha}/escape", {}, "WORK_FOLDER_OUTSIDE_ROOTS"),
        ("{alpha}", {"type": "no_such_agent"}, "AGENT_TYPE_UNSUPPORTED"),
        ("{alpha}", {"permissions": "everything"}, "PERMISSIONS_UNSUPPORTED"),
        ("{alpha}", {"permissions": "guarded"}, "POLICY_MISSING"),
        ("{alpha}", {"executable": "no-such-program"}, "AGENT_EXECUTABLE_NOT_FOUND"),
        ("{alpha}", {"executable": "/bin/true"}, "AGENT_EXECUTABLE_NOT_FOUND"),
    ],
)
def test_a_thread_that_fails_a_check_says_its_code(
    fleet: FleetUnderTest, folder: str, agent: dict[str, str], code: str
):
    alias = f"check/{code}/{len(str(agent))}"
    (fleet.alpha / "file").touch()
    if not (fleet.alpha / "escape").is_symlink():
        (fleet.alpha / "escape").symlink_to("/tmp")
    fleet.person.hand_over(alias, folder.format(alpha=fleet.alpha), "hello", **agent)
    fleet.await_state(alias, "failed")
    item = next(item for item in fleet.said(alias) if kind(item) == "status")
    assert (item["metadata"]["status"], item["metadata"]["code"]) == ("error", code)
    wait_until(lambda: "thread_failed" in fleet.audits(alias), PATIENCE_S, "no audit item")
    assert not fleet.turn_ends(alias)


def test_a_failed_thread_is_retried_when_its_user_says_so(fleet: FleetUnderTest):
    folder = fleet.alpha / "later"
    fleet.person.hand_over("later", folder, "hello")
    fleet.await_state("later", "failed")
    folder.mkdir()
    fleet.person.set_state("later", "pending")
    said = fleet.await_turns("later")
    assert brief(said[-1]) == "Turn complete"
    assert fleet.person.state("later") == "active"


def test_strange_threads_stop_no_other(fleet: FleetUnderTest):
    for index, metadata in enumerate(
        [
            None,
            5,
            [],
            {"agent": 7},
            {"instance": {"state": "pending"}},
            {"agent": {}, "instance": {"state": ["pending"]}},
        ]
    ):
        fleet.person.put(f"strange/{index}", {"type": "thread", "thread": {"metadata": metadata}})
    fleet.person.put("strange/none", {"type": "thread"})
    fleet.person.hand_over("strange/@.-_sane", fleet.folder("sane"), "hello")
    fleet.await_turns("strange/@.-_sane")
    fleet.await_state("strange/4", "failed")


def test_a_question_is_answered_in_the_thread(fleet: FleetUnderTest):
    fleet.person.hand_over("ask", fleet.folder("ask"), "ask me")
    prompt = fleet.await_said("ask", "Which?")
    assert kind(prompt) == "pending_prompt"
    fleet.person.say("ask", "2")
    said = fleet.await_turns("ask")
    assert [kind(item) for item in said] == ["pending_prompt", "pending_prompt_resolved", "text", "turn_end"]
    assert brief(said[2]) == "chose Blue"
    assert len(fleet.turn_ends("ask")) == 1


def test_an_agent_that_dies_is_gone_on_with_and_nothing_is_said_twice(fleet: FleetUnderTest):
    fleet.person.hand_over("die", fleet.folder("die"), "die")
    said = fleet.await_turns("die")
    assert [brief(item) for item in said if kind(item) == "text"] == ["before", "after"]
    assert [item["metadata"]["status"] for item in said if kind(item) == "status"] == ["recovering"]
    assert brief(said[-1]) == "Turn complete"


def test_an_agent_that_keeps_dying_fails_its_thread(fleet: FleetUnderTest):
    fleet.person.hand_over("dying", fleet.folder("dying"), "keep dying")
    fleet.await_state("dying", "failed")
    said = fleet.said("dying")
    assert [item["metadata"].get("code") for item in said if kind(item) == "status"][-1] == "AGENT_CRASHED"
    assert len(fleet.turn_ends("dying")) == 1


def test_a_turn_that_the_agent_gives_up_ends_as_failed(fleet: FleetUnderTest):
    fleet.person.hand_over("giveup", fleet.folder("giveup"), "give up")
    said = fleet.await_turns("giveup")
    assert brief(said[-1]) == "Turn ended (failed)"
    assert said[-1]["metadata"]["error"] == "no way"
    fleet.person.say("giveup", "hello again")
    assert brief(fleet.await_turns("giveup", 2)[-1]) == "Turn complete"


def test_a_transient_model_failure_is_resumed_within_the_turn(fleet: FleetUnderTest):
    fleet.person.hand_over("flaky", fleet.folder("flaky"), "flaky model")
    said = fleet.await_turns("flaky")
    assert [brief(item) for item in said if kind(item) == "text"] == ["one", "two"]
    assert [item["metadata"]["status"] for item in said if kind(item) == "status"] == ["retrying"]
    assert len(fleet.turn_ends("flaky")) == 1


def test_a_removed_thread_is_let_go(fleet: FleetUnderTest):
    folder = fleet.folder("removed")
    fleet.person.hand_over("removed", folder, "long work")
    fleet.await_said("removed", "begun")
    fleet.person.remove("removed")
    wait_until(lambda: not fleet.agents_alive(folder), PATIENCE_S, "the agent runs on")
    wait_until(lambda: fleet.record("removed").step == "end", PATIENCE_S, "the record goes on")
