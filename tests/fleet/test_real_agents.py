"""Claude Code's real CLI in a whole fleet: asked, killed and refused, with a stand-in for the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet.attempt import CONTINUE
from fleet.envelope import new_thread
from fleet.sandbox.redis_server import start_redis
from tests.fleet.harness import PATIENCE_S, FleetUnderTest, Json, brief, fleet_under_test, kind
from tests.fleet.test_crashes import pool_process
from tests.fleet.test_prompts import await_parked
from tests.support import wait_until
from tests.wire.agents import claude_environment, running_model

pytest.importorskip("claude_agent_sdk", reason="the claude extra is not installed")

#: What a file outside of every work folder says.
PRIVATE = "w0rds-that-no-agent-may-read"
#: How a resumed agent is told of an approval (`fleet.answers.in_words`).
APPROVED = "The user approved this call"
#: Seconds for which the agent's process waits for an answer before the thread is parked.
HOLD_S = 0.5
#: Seconds within which nothing of a killed turn may be left.
GONE_S = 2.0


def bash(command: str) -> Json:
    return {"tool_use": {"name": "Bash", "input": {"command": command, "description": "run it"}}}


def script(private: Path) -> Json:
    """Return what the model says; `private` is the file that it tries to read."""
    deploy = [[bash("echo ran >> runs")], [{"text": "Deployed."}]]
    return {
        "steps": [
            {"match": "DEPLOY", "rounds": deploy},
            {"match": APPROVED, "rounds": deploy},
            {"match": CONTINUE, "rounds": [[{"text": "Where was I?"}]]},
            {"match": "SLOW", "rounds": [[{"text": "begun"}, bash("setsid sleep 61 & sleep 61")], [{"text": "over"}]]},
            {
                "match": "PEEK",
                "rounds": [
                    [{"tool_use": {"name": "Read", "input": {"file_path": str(private)}}}],
                    [{"text": "I may not."}],
                ],
            },
        ]
    }


@pytest.fixture(scope="module")
def claude(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    """A fleet whose Claude Code talks to the stand-in alone and writes nowhere but into its own home."""
    base = tmp_path_factory.mktemp("claude-fleet")
    home = base / "agent"
    home.mkdir()
    private = base / "private.txt"
    private.write_text(PRIVATE)
    with running_model(base, script(private)) as url, start_redis(base / "redis") as redis:
        agents = {"claude_code": {"hold_s": HOLD_S, "env": claude_environment(home, url)}}
        with fleet_under_test(base, redis, agents=agents) as fleet:
            yield fleet


def hand_over(fleet: FleetUnderTest, alias: str, folder: Path, text: str, permissions: str, policy: Any = None) -> None:
    value = new_thread(str(folder), "claude_code", permissions)
    if policy:
        value["thread"]["metadata"]["policy"] = policy
    fleet.person.put(alias, value)
    fleet.person.say(alias, text)
    fleet.person.set_state(alias, "pending")


def sleeping(fleet: FleetUnderTest, folder: Path) -> int:
    """Count the `sleep` commands that run in `folder`."""
    names = []
    for pid in fleet.agents_alive(folder):
        try:
            names.append(psutil.Process(pid).name())
        except psutil.NoSuchProcess:
            continue
    return names.count("sleep")


def test_an_approval_parked_over_a_restart_of_its_host_resumes_the_session_and_runs_the_call_once(
    claude: FleetUnderTest,
):
    folder = claude.folder("deploy", claude.base / "gamma")
    with claude.also(*claude.host_children("gamma")):
        hand_over(claude, "deploy", folder, "DEPLOY it", "approval")
        prompt = claude.await_said("deploy", "Allow Bash")
        assert prompt["metadata"]["prompt"]["kind"] == "approval"
        await_parked(claude, "deploy")
        session = claude.record("deploy").agent_session
        assert not claude.agents_alive(folder)
        assert not (folder / "runs").exists()
    claude.person.say("deploy", "approve")
    with claude.also(*claude.host_children("gamma")):
        said = claude.await_turns("deploy")
    kinds = [kind(item) for item in said]
    assert session
    assert claude.record("deploy").agent_session == session
    assert (folder / "runs").read_text() == "ran\n"
    assert kinds.count("pending_prompt") == kinds.count("approval_granted") == kinds.count("turn_end") == 1
    assert brief(said[-2]) == "Deployed."


def test_a_turn_killed_in_a_running_command_leaves_no_process_and_goes_on_in_its_session(claude: FleetUnderTest):
    folder = claude.folder("slow")
    hand_over(claude, "slow", folder, "SLOW work", "autonomous")
    claude.await_said("slow", "begun")
    wait_until(lambda: sleeping(claude, folder) == 2, PATIENCE_S, "the command does not run")
    session = claude.record("slow").agent_session
    tree = claude.agents_alive(folder)
    pool_process(claude, folder).kill()
    wait_until(lambda: not set(tree) & set(claude.agents_alive(folder)), GONE_S, "something of the agent is left")
    said = claude.await_turns("slow")
    kinds = [kind(item) for item in said]
    assert session
    assert claude.record("slow").agent_session == session
    assert kinds.count("turn_end") == kinds.count("tool_call") == 1
    assert "recovering" in [item["metadata"].get("status") for item in said]
    # In the grace before it is killed, the CLI may see its command end and say one more thing: it is in the
    # transcript, and so in the thread.
    texts = [brief(item) for item in said if kind(item) == "text"]
    assert texts in (["begun", "Where was I?"], ["begun", "over", "Where was I?"])
    assert brief(said[-1]) == "Turn complete"
    assert not claude.agents_alive(folder)


def test_a_denied_read_is_said_before_its_refusal_and_shows_nothing_of_the_file(claude: FleetUnderTest):
    rule = {"id": "stay_inside", "effect": "read", "action": "deny", "outside": "work_folder"}
    hand_over(claude, "peek", claude.folder("peek"), "PEEK outside", "guarded", {"default": "allow", "rules": [rule]})
    said = claude.await_turns("peek")
    kinds = [kind(item) for item in said]
    assert kinds[:4] == ["policy_applied", "tool_call", "policy_denied", "tool_result"]
    denied, result = said[2]["metadata"], said[3]["metadata"]["tool"]
    assert denied["rule"] == "stay_inside"
    assert result["is_error"]
    assert "stay_inside" in result["output"]
    assert kinds[-1] == "turn_end"
    assert PRIVATE not in str(said)
