"""A host whose network is cut while it works: no agent runs on unwatched, and nothing is lost or doubled.

The host gamma lives in a network namespace. Its packets are dropped without a word, which is harder on clients than a
refusal: connections hang, and what the kernel holds back is delivered when the cut is over, however late that is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from fleet.envelope import new_thread
from fleet.refs import ThreadKeys, ThreadRef
from fleet.supervisor import Supervisor
from tests.fleet import netns
from tests.fleet.harness import LEASE_S, PATIENCE_S, FleetUnderTest, brief, kind
from tests.fleet.netns import Island
from tests.fleet.test_crashes import assert_whole
from tests.support import wait_until

#: Asked first, so that no fleet is started in vain.
pytestmark = pytest.mark.usefixtures("namespaces")

#: Seconds for which the platform can't be reached: longer than the rest of a turn takes, its publication begins in it.
OUTAGE_S = 10.0
#: Seconds in which an agent is gone whose host can't renew its lease: the lease, and a margin for a busy machine.
AGENT_GONE_S = LEASE_S + 2.0
#: Entries that pile up in a journal only when nobody posts them: an agent here says ten a second.
PILED_UP = 5


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where the machine has no network namespaces."""
    if why := netns.refusal():
        pytest.skip(why)


@pytest.fixture(scope="module")
def gamma(fleet: FleetUnderTest) -> Iterator[Island]:
    """The network of the host gamma, whose workers are up in it; its links are `redis` and `platform`."""
    urls = {"FLEET_REDIS_URL": fleet.environ["FLEET_REDIS_URL"], "BLOBHUB_API_URL": fleet.platform.url}
    services = {"redis": urls["FLEET_REDIS_URL"], "platform": urls["BLOBHUB_API_URL"]}
    with netns.island({name: _port(url) for name, url in services.items()}) as island:
        there = {
            variable: url.replace(f"127.0.0.1:{_port(url)}", link.authority)
            for (variable, url), link in zip(urls.items(), island.links.values(), strict=True)
        }
        children = fleet.host_children("gamma")
        inside = [replace(one, argv=island.inside(one.argv), env={**one.env, **there}) for one in children]
        with Supervisor([inside], fleet.base / "home" / "logs"):
            yield island


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port
    return port


def work_folder(fleet: FleetUnderTest, name: str) -> Path:
    return fleet.folder(name, fleet.base / "gamma")


def keys(fleet: FleetUnderTest, alias: str) -> ThreadKeys:
    return ThreadKeys.of(fleet.config.redis.namespace, ThreadRef(fleet.platform.session_id, alias))


def all_has_arrived(gamma: Island) -> None:
    """Wait until the host's kernel holds nothing back that it would still deliver."""
    wait_until(lambda: not gamma.unacknowledged(), PATIENCE_S, "bytes are still under way")


def test_a_host_cut_off_from_redis_stops_its_agent_and_goes_on_when_it_is_back(fleet: FleetUnderTest, gamma: Island):
    folder = work_folder(fleet, "no-redis")
    fleet.person.hand_over("no-redis", folder, "step by step")
    fleet.await_said("no-redis", "step 5")
    with redis.Redis.from_url(fleet.environ["FLEET_REDIS_URL"]) as client, gamma.dropping("redis"):
        wait_until(lambda: not fleet.agents_alive(folder), AGENT_GONE_S, "the agent outlives its lease")
        lease = keys(fleet, "no-redis").lease
        wait_until(lambda: not client.exists(lease), PATIENCE_S, "the lease does not end")
        assert not fleet.turn_ends("no-redis")
    fleet.await_turns("no-redis")
    all_has_arrived(gamma)
    assert_whole(fleet, "no-redis")


def test_a_host_cut_off_from_the_platform_loses_and_doubles_nothing(fleet: FleetUnderTest, gamma: Island):
    folder = work_folder(fleet, "no-platform")
    (folder / "out").mkdir()
    (folder / "out" / "plan.md").write_text("the plan")
    value = new_thread(str(folder), "scripted", "autonomous")
    value["thread"]["metadata"]["artifacts"] = {"prefix": "published/no-platform/", "source": "out"}
    fleet.person.put("no-platform", value)
    fleet.person.say("no-platform", "step by step")
    fleet.person.set_state("no-platform", "pending")
    fleet.await_said("no-platform", "step 5")
    with gamma.dropping("platform"):
        began = time.monotonic()
        fleet.person.hand_over("begun-cut-off", work_folder(fleet, "begun-cut-off"), "hello")
        wait_until(lambda: fleet.record("no-platform").step == "publish", PATIENCE_S, "the turn does not go on")
        wait_until(lambda: time.monotonic() - began > OUTAGE_S, PATIENCE_S)
    said = fleet.await_turns("no-platform")
    begun = fleet.await_turns("begun-cut-off")
    all_has_arrived(gamma)
    assert said == fleet.said("no-platform")
    assert begun == fleet.said("begun-cut-off")
    assert [brief(item) for item in said[:-2]] == [f"step {n}" for n in range(40)]
    assert [kind(item) for item in said[-2:]] == ["artifacts_published", "turn_end"]
    assert said[-2]["metadata"]["aliases"] == ["published/no-platform/plan.md"]
    assert [kind(item) for item in begun] == ["thinking", "text", "tool_call", "tool_result", "turn_end"]


def test_a_post_that_hangs_in_a_cut_is_not_delivered_behind_the_one_that_replaced_it(
    fleet: FleetUnderTest, gamma: Island
):
    fleet.person.hand_over("replaced", work_folder(fleet, "replaced"), "step by step")
    fleet.await_said("replaced", "step 3")
    journal = keys(fleet, "replaced").journal
    with redis.Redis.from_url(fleet.environ["FLEET_REDIS_URL"]) as client, gamma.dropping("platform"):
        wait_until(lambda: client.xlen(journal) >= PILED_UP, PATIENCE_S, "gamma posts nothing")
        with gamma.dropping("redis"):
            wait_until(lambda: client.xlen(journal) == 0, PATIENCE_S, "no other host takes over")
    fleet.await_turns("replaced")
    all_has_arrived(gamma)
    assert_whole(fleet, "replaced")
