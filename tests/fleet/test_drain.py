"""`fleet hosts drain` and `undrain`: a machine is taken out for a reboot and comes back."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.fleet.harness import PATIENCE_S, FleetUnderTest, brief
from tests.support import wait_until


def command(fleet: FleetUnderTest, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "fleet", *words]
    return subprocess.Popen(argv, env=fleet.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def done(fleet: FleetUnderTest, *words: str) -> str:
    process = command(fleet, *words)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    return output


def test_a_drained_host_ends_its_turns_begins_none_and_goes_on_when_undrained(fleet: FleetUnderTest):
    known, fresh = fleet.folder("drain-known", fleet.beta), fleet.folder("drain-fresh", fleet.beta)
    fleet.person.hand_over("drain/known", known, "step by step")
    fleet.await_said("drain/known", "step 3")
    draining = command(fleet, "hosts", "drain", "beta")
    try:
        output, _ = draining.communicate(timeout=PATIENCE_S)
        assert draining.returncode == 0
        assert "safe to reboot" in output
        assert fleet.record("drain/known").step == "idle"
        assert "draining" in done(fleet, "hosts", "ls")
        assert brief(fleet.await_turns("drain/known")[-1]) == "Turn complete"

        fleet.person.hand_over("drain/fresh", fresh, "hello")
        fleet.person.say("drain/known", "hello again")
        fleet.await_said("drain/fresh", "No host that takes turns owns")
        wait_until(lambda: fleet.record("drain/known").turn == 2, PATIENCE_S, "the message is not taken in")
        assert not fleet.agents_alive(known)
    finally:
        done(fleet, "hosts", "undrain", "beta")
    fleet.await_turns("drain/fresh")
    fleet.await_turns("drain/known", 2)


def test_who_was_never_up_can_not_be_drained(fleet: FleetUnderTest):
    process = command(fleet, "hosts", "drain", "nobody")
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert "host_unknown" in output
    assert "alpha" in output


def test_the_hosts_are_listed_with_what_runs_there(fleet: FleetUnderTest):
    found = {host["name"]: host for host in json.loads(done(fleet, "hosts", "ls", "--json"))}
    assert found["alpha"]["alive"]
    assert not found["alpha"]["draining"]
    assert found["alpha"]["max_agents"] > 0
