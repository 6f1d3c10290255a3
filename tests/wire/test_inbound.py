"""What persons say: seen once, in order, whatever the lists do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fleet.reconcile import reconcile
from tests.wire.stage import Sandbox, Stage

Play = Callable[..., Any]


@pytest.mark.parametrize("created_at", ["iso", "ms"])
def test_pages_of_any_size_lose_and_double_nothing(play: Play, sandbox: Sandbox, created_at: str):
    async def scene(stage: Stage) -> None:
        sandbox.conditions(max_page=3, created_at=created_at)
        await stage.hand_over("t", *(f"message {n}" for n in range(11)))
        await stage.poll()
        for n in range(11, 20):
            await stage.say("t", f"message {n}")
        await stage.poll()
        await stage.poll()
        assert await stage.inbox("t") == [f"message {n}" for n in range(20)]

    play(scene)


def test_a_lagging_list_loses_no_message(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "first")
        await stage.poll()
        sandbox.conditions(list_lag_ms=400.0)
        await stage.say("t", "second")
        for _ in range(100):
            await stage.poll()
            if await stage.inbox("t") == ["first", "second"]:
                return
        raise AssertionError(await stage.inbox("t"))

    play(scene)


def test_what_was_consumed_does_not_come_again(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "one")
        await stage.poll()
        record = await stage.record("t")
        assert (record.step, record.turn) == ("run", 1)
        item = (await stage.items("t"))[0]
        lease = await stage.fleet.leases.take(record)
        assert lease is not None
        records = stage.fleet.records
        assert await records.transition(record, "turn_ran", token=lease.token)
        assert await records.transition(await stage.record("t"), "published", token=lease.token)
        consumed = {"consumed_at": item["created_at"], "consumed": [item["id"]]}
        assert await records.transition(
            await stage.record("t"),
            "turn_closed",
            token=lease.token,
            release=True,
            consumed_ids=(item["id"],),
            **consumed,
        )
        value = (await stage.person.download_object(stage.at, "t"))["value"]
        value["thread"]["metadata"]["instance"]["state"] = "pending"
        await stage.person.upload_object(stage.at, "t", value)
        await stage.poll()
        assert await stage.inbox("t") == []
        await stage.say("t", "two")
        await stage.poll()
        assert await stage.inbox("t") == ["two"]

    play(scene)


def test_the_echo_of_our_own_items_costs_no_request(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        await stage.poll()
        for n in range(50):
            item = {"content": [{"type": "text", "text": str(n)}], "metadata": {"type": "text"}}
            stored = await stage.fleet.platform.post_item(stage.at, "t", item)
            await stage.fleet.store.redis.zadd(stage.fleet.store.session(stage.at.session_id).ours, {stored["id"]: 1})
        sandbox.reset_requests()
        await stage.poll()
        requests = sandbox.requests()
        assert requests.get("get_session_thread_item", 0) == 0
        assert requests.get("list_session_thread_items", 0) == 0

    play(scene)


def test_an_event_whose_handling_failed_stays_due(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        await stage.say("t", "hello")
        sandbox.conditions(faults=[{"match": "get_session_thread_item", "kind": "500_before", "times": 1}])
        with pytest.raises(Exception, match="500"):
            await stage.poll()
        await stage.fleet.nudges.ingest(stage.ref("t"))
        await stage.settle()
        assert await stage.inbox("t") == ["hello"]

    play(scene)


def test_what_was_said_around_the_start_is_found_by_reading_the_list_once_more(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        keys = stage.fleet.store.session(stage.at.session_id)
        item_id = await stage.say("t", "hello")
        await stage.fleet.store.redis.zadd(keys.ours, {item_id: 2**50})
        await stage.poll()
        await stage.fleet.nudges.ingest(stage.ref("t"))
        await stage.settle()
        assert await stage.inbox("t") == []
        await stage.fleet.store.redis.hset(keys.due, "list t", "1")  # Redis time in ms: the list's lag is over
        await stage.fleet.nudges.ingest(stage.ref("t"))
        await stage.settle()
        assert await stage.inbox("t") == ["hello"]
        assert not await stage.fleet.store.redis.hexists(keys.due, "list t")

    play(scene)


def test_reconcile_nudges_what_is_due_and_what_stands_still(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "hello")
        await stage.poll()
        stage.nudges.waiting.clear()
        keys = stage.fleet.store.session(stage.at.session_id)
        await stage.fleet.store.redis.zadd(keys.attention, {"t": 1})
        await stage.fleet.store.redis.zadd(keys.due_at, {"t": 1})
        await reconcile(stage.fleet)
        assert {name for name, _ in stage.nudges.waiting} == {"ingest", "run_turn"}
        stage.nudges.waiting.clear()
        await reconcile(stage.fleet)
        assert not stage.nudges.waiting

    play(scene)


def test_a_message_stays_due_until_the_thread_has_been_looked_at_with_it(play: Play, monkeypatch: pytest.MonkeyPatch):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        said = await stage.say("t", "hello")

        async def die(*_: Any) -> None:
            raise SystemError("killed")

        with monkeypatch.context() as patched:
            patched.setattr("fleet.lifecycle.advance", die)
            with pytest.raises(SystemError):
                await stage.poll()
        assert await stage.inbox("t") == ["hello"]
        assert said in await stage.fleet.due_items(stage.ref("t"))

    play(scene)
