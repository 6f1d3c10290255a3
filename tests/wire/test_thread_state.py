"""The record, its leases and its journal in a real Redis: what the Lua scripts promise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from fleet.journal import Appended, Journal, Numbered, item_draft
from fleet.leases import Lease, Leases
from fleet.record import TRANSITIONS, Record, Records
from fleet.redaction import Redactor
from fleet.refs import ThreadRef, post_id
from fleet.store import Store

T = TypeVar("T")
REF = ThreadRef("s1", "a/b")


def with_store(url: str, work: Callable[[Store], Awaitable[T]]) -> T:
    async def run() -> T:
        store = Store(url, "test")
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def claimed(store: Store, step: Any = "start") -> Record:
    records = Records(store)
    assert await records.claim(await records.read(REF), step, host="alpha") is not None
    return await records.read(REF)


async def in_turn(store: Store) -> tuple[Record, Lease]:
    records, leases = Records(store), Leases(store, 5)
    assert await records.transition(await claimed(store), "started")
    assert await records.transition(await records.read(REF), "turn_begun", turn=1)
    lease = await leases.take(await records.read(REF))
    assert lease is not None
    return lease.record, lease


def item(n: int) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": f"line {n}"}], "metadata": {"type": "text"}}


def numbered(*numbers: int) -> list[Numbered]:
    return [Numbered(n, f"id{n}", json.dumps(item(n))) for n in numbers]


def test_an_epoch_is_above_what_a_host_knows_of_though_the_clock_of_redis_is_behind(redis_url: str):
    async def work(store: Store) -> None:
        records = Records(store)
        ahead = await store.now_ms() + 3_600_000
        assert await records.claim(await records.read(REF), "start", above=ahead) == ahead + 1

    with_store(redis_url, work)


def test_of_two_claims_on_one_reading_only_one_wins(redis_url: str):
    async def work(store: Store) -> None:
        records = Records(store)
        seen = await records.read(REF)
        won = await asyncio.gather(*(records.claim(seen, "start", host=f"h{n}") for n in range(20)))
        assert sum(epoch is not None for epoch in won) == 1

    with_store(redis_url, work)


def test_an_epoch_only_grows_and_outlives_a_lost_redis(redis_url: str):
    async def work(store: Store) -> None:
        first = await claimed(store)
        second = await claimed(store)
        await store.redis.flushall()
        while (
            await store.now_ms() <= second.epoch
        ):  # two claims in one millisecond are a millisecond ahead of the clock
            await asyncio.sleep(0.001)
        third = await claimed(store)
        assert first.epoch < second.epoch < third.epoch

    with_store(redis_url, work)


def test_a_claim_clears_what_belonged_to_the_old_epoch_and_keeps_the_session(redis_url: str):
    async def work(store: Store) -> None:
        records = Records(store)
        record = await claimed(store)
        assert await records.transition(record, "started", agent_session="abc", turn=3)
        await records.request_stop(await records.read(REF), "completed")
        again = await claimed(store)
        assert (again.stop, again.told, again.agent_session, again.turn) == ("", "", "abc", 3)

    with_store(redis_url, work)


@pytest.mark.parametrize("name", sorted(TRANSITIONS))
def test_a_transition_from_another_step_changes_nothing(redis_url: str, name: str):
    async def work(store: Store) -> None:
        records = Records(store)
        record = await claimed(store)
        stale = Record(
            REF, epoch=record.epoch, step=sorted({"idle", "run", "close"} & TRANSITIONS[name][0] or {"publish"})[0]
        )
        assert not await records.transition(stale, name)
        assert (await records.read(REF)).step == "start"

    with_store(redis_url, work)


def test_a_transition_of_an_old_epoch_changes_nothing(redis_url: str):
    async def work(store: Store) -> None:
        records = Records(store)
        old = await claimed(store)
        new = await claimed(store)
        assert not await records.transition(old, "started")
        assert await records.read(REF) == new

    with_store(redis_url, work)


def test_a_transition_needs_the_lease_where_somebody_holds_it(redis_url: str):
    async def work(store: Store) -> None:
        records = Records(store)
        record, lease = await in_turn(store)
        assert not await records.transition(record, "turn_ran")
        assert not await records.transition(record, "turn_ran", token="another")
        assert await records.transition(record, "turn_ran", token=lease.token, release=True)
        assert not await Leases(store, 5).held(record)

    with_store(redis_url, work)


def test_a_step_is_begun_by_one_holder_at_a_time(redis_url: str):
    async def work(store: Store) -> None:
        record, lease = await in_turn(store)
        leases = Leases(store, 5)
        assert await leases.take(record) is None
        await leases.release(lease)
        assert await leases.take(record) is not None
        assert (await Records(store).read(REF)).attempt == 2

    with_store(redis_url, work)


@pytest.mark.parametrize(("change", "reason"), [("stop", "completed"), ("claim", "superseded"), ("drop", "lost")])
def test_a_holder_learns_why_it_must_stop(redis_url: str, change: str, reason: str):
    async def work(store: Store) -> None:
        records = Records(store)
        record, lease = await in_turn(store)
        keeping = asyncio.create_task(Leases(store, 5).keep(lease))
        if change == "stop":
            await records.request_stop(record, "completed")
        elif change == "claim":
            await claimed(store)
        else:
            await store.redis.delete(store.thread(REF).lease)
        assert await asyncio.wait_for(keeping, 3) == reason

    with_store(redis_url, work)


def test_a_kept_lease_outlives_its_first_life(redis_url: str):
    async def work(store: Store) -> None:
        leases = Leases(store, 0.6)
        record = await claimed(store)
        lease = await leases.take(record)
        assert lease is not None
        async with leases.kept(lease):
            deadline = asyncio.get_running_loop().time() + 1.5
            while asyncio.get_running_loop().time() < deadline:
                assert await leases.held(record)
                await asyncio.sleep(0.1)
        assert not await leases.held(record)

    with_store(redis_url, work)


def test_an_append_is_idempotent_in_its_numbers_and_answers_a_gap(redis_url: str):
    async def work(store: Store) -> None:
        _, lease = await in_turn(store)
        journal = Journal(store, Redactor([]))

        async def append(*numbers: int) -> Appended:
            return await journal.append(lease, 1, numbered(*numbers))

        assert (await append(1, 2)).last == 2
        assert (await append(1, 2)).depth == 2
        assert (await append(5)).last == 2
        assert (await append(1, 2, 3)).last == 3
        assert await store.journal_depth(REF) == 3

    with_store(redis_url, work)


def test_a_zombie_cannot_speak(redis_url: str):
    async def work(store: Store) -> None:
        _, lease = await in_turn(store)
        await store.redis.delete(store.thread(REF).lease)
        assert (await Journal(store, Redactor([])).append(lease, 1, numbered(1))).last is None
        await claimed(store)
        assert (await Journal(store, Redactor([])).append(lease, 1, numbered(1))).last is None
        assert await store.journal_depth(REF) == 0

    with_store(redis_url, work)


def test_a_cause_is_said_once_however_often_it_is_nudged(redis_url: str):
    async def work(store: Store) -> None:
        journal = Journal(store, Redactor([]))
        for _ in range(3):
            await journal.append_once(REF, "no_host:1", item_draft(item(1)))
        await journal.append_once(REF, "no_host:2", item_draft(item(1)))
        assert await store.journal_depth(REF) == 2

    with_store(redis_url, work)


def test_a_draining_journal_hands_out_its_entries_in_order_to_one_drainer(redis_url: str):
    async def work(store: Store) -> None:
        _, lease = await in_turn(store)
        journal = Journal(store, Redactor([]))
        await journal.append(lease, 1, numbered(1, 2))
        begun = await journal.begin(REF)
        assert begun is not None
        assert await journal.begin(REF) is None
        token, first = begun
        assert first is not None
        second = await journal.stored(REF, token, first, "item-1")
        assert second is not None
        assert [first.post_id, second.post_id] == ["id1", "id2"]
        assert await journal.stored(REF, token, second, "item-2") is None
        assert await store.redis.zscore(store.session("s1").ours, "item-1") is not None
        assert int((await store.hash(store.thread(REF).journal_meta))["bytes"]) == 0

    with_store(redis_url, work)


def test_an_entry_that_an_earlier_drainer_may_have_posted_is_marked(redis_url: str):
    async def work(store: Store) -> None:
        _, lease = await in_turn(store)
        journal = Journal(store, Redactor([]))
        await journal.append(lease, 1, numbered(1))
        begun = await journal.begin(REF)
        assert begun is not None
        assert begun[1] is not None
        assert not begun[1].again
        await journal.release(REF, begun[0])
        begun = await journal.begin(REF)
        assert begun is not None
        assert begun[1] is not None
        assert begun[1].again

    with_store(redis_url, work)


def test_an_append_that_meets_a_drainer_calls_no_second_one(redis_url: str):
    async def work(store: Store) -> None:
        _, lease = await in_turn(store)
        journal = Journal(store, Redactor([]))
        assert (await journal.append(lease, 1, numbered(1))).idle
        begun = await journal.begin(REF)
        assert begun is not None
        assert not (await journal.append(lease, 1, numbered(2))).idle

    with_store(redis_url, work)


def test_a_post_id_is_a_pure_function_of_its_cause():
    assert post_id(REF, 1, 2, 3) == post_id(REF, 1, 2, 3)
    assert len({post_id(REF, 1, 2, 3), post_id(REF, 1, 23), post_id(ThreadRef("s1", "a"), 1, 2, 3)}) == 3
