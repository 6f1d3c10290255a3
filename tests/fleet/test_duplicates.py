"""Task messages that come twice, ten times, late, in another order, or never: what persons see is the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from fleet.envelope import new_thread
from tests.fleet.faulty import Faults, faulty_fleet
from tests.fleet.faulty.sitecustomize import LATE_S
from tests.fleet.faulty.visit import SAID, briefs, kinds, outcome, visit
from tests.fleet.harness import PATIENCE_S, FleetUnderTest
from tests.support import wait_until
from tests.wire.stage import Sandbox

Json = dict[str, Any]


@pytest.fixture(scope="module")
def faulty(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FleetUnderTest, Faults]]:
    """A running fleet whose broker can be spoilt."""
    with faulty_fleet(tmp_path_factory.mktemp("faulty"), seed=1) as running:
        yield running


@pytest.fixture(scope="module")
def quiet(faulty: tuple[FleetUnderTest, Faults]) -> dict[str, Json]:
    """What the threads of a visit have, by host, when every message comes once and in time."""
    fleet, _ = faulty
    return {alias.rpartition("/")[2]: outcome(fleet, alias) for alias in visit(fleet, "quiet")}


def await_no_message(fleet: FleetUnderTest) -> None:
    """Wait until no message is held up, waits or is worked on."""
    until = time.monotonic() + LATE_S
    prefix = f"{fleet.config.redis.namespace}:celery:"
    queues = ["fleet", *(f"host.{host}{part}" for host in ("alpha", "beta") for part in ("", ".turns"))]
    with redis.Redis.from_url(str(fleet.config.redis.url)) as client:

        def is_quiet() -> bool:
            waiting = client.exists(*(prefix + queue for queue in queues))
            return time.monotonic() > until and not waiting and not client.exists(prefix + "unacked")

        wait_until(is_quiet, PATIENCE_S, "messages are left")


def test_a_quiet_visit_is_what_it_should_be(quiet: dict[str, Json]):
    for found in quiet.values():
        assert kinds(found["items"]) == SAID
        assert found["audits"] == ["thread_registered", "thread_active", "thread_completed"]
        assert found["artifacts"] == ["published/THREAD/plan.md"]
        assert found["record"] == ["end", "completed", 1]


@pytest.mark.parametrize("mode", ["twice", "ten", "late", "reordered", "dropped"])
def test_threads_are_the_same_however_their_messages_come(
    faulty: tuple[FleetUnderTest, Faults], quiet: dict[str, Json], mode: str
):
    fleet, faults = faulty
    faults.set(mode=mode)
    try:
        aliases = visit(fleet, mode)
    finally:
        faults.set(mode=None)
    await_no_message(fleet)
    for alias in aliases:
        assert outcome(fleet, alias) == quiet[alias.rpartition("/")[2]]
    assert faults.done(mode) > 20


def test_what_takes_longer_than_the_brokers_patience_is_done_once(faulty: tuple[FleetUnderTest, Faults]):
    fleet, faults = faulty
    folder = fleet.folder("patience")
    (folder / "out").mkdir()
    for number in range(80):
        (folder / "out" / f"{number}.txt").write_text("an artifact")
    value = new_thread(str(folder), "scripted", "autonomous")
    value["thread"]["metadata"]["artifacts"] = {"prefix": "published/patience/", "source": "out"}
    fleet.person.put("patience", value)
    fleet.person.say("patience", "step by step")
    sandbox = Sandbox(fleet.platform)
    faults.set(visibility_s=1.0)
    try:
        fleet.person.set_state("patience", "pending")
        fleet.await_said("patience", "step 30")
        sandbox.conditions(latency_ms=400)
        said = fleet.await_turns("patience")
    finally:
        sandbox.conditions(latency_ms=0)
        sandbox.close()
        faults.set(visibility_s=None)
    await_no_message(fleet)
    assert said == fleet.said("patience")
    assert briefs(said) == [f"step {n}" for n in range(40)] + ["Published 80 artifact(s), skipped 0", "Turn complete"]
    assert [fleet.record("patience").turn, fleet.record("patience").attempt] == [1, 1]
    assert faults.done("fleet.publish_artifacts again")
    assert not faults.done("fleet.run_turn again")
