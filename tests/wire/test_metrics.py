"""What is counted while a host works, and what a scrape reads from Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet import drain, finish, metrics, sections
from fleet.envelope import WORKER_ALIAS
from fleet.items import status
from fleet.journal import item_draft
from fleet.metrics import REGISTRY, count_lost_lease, read_load
from fleet.record import Record
from tests.wire.stage import Sandbox, Stage

Play = Callable[..., Any]
POST = "post_session_thread_item"


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {"host": "alpha", **labels}) or 0


@pytest.fixture(autouse=True)
def _from_zero() -> None:
    """Nothing of what other tests have counted."""
    for metric in (metrics.TURNS, metrics.TURN_SECONDS, metrics.CUT_OFF, metrics.TOKENS, metrics.POSTED):
        metric.clear()
    for metric in (metrics.REFUSED, metrics.POST_SECONDS, metrics.POST_RETRIES, metrics.POLLS, metrics.POLL_SECONDS):
        metric.clear()


async def in_close(stage: Stage, alias: str, **ended: Any) -> Record:
    """Take a thread to the step `close` of its first turn, as if the turn had run and ended as `ended` says."""
    await stage.hand_over(alias, "hello")
    await stage.poll()
    records, leases = stage.fleet.records, stage.fleet.leases
    lease = await leases.take(await stage.record(alias))
    assert lease is not None
    assert await records.transition(lease.record, "turn_ran", token=lease.token, release=True, **ended)
    assert await records.transition(await stage.record(alias), "published")
    return await stage.record(alias)


async def append(stage: Stage, alias: str, *details: str) -> None:
    for detail in details:
        await stage.fleet.journal.append_once(stage.ref(alias), detail, item_draft(status("note", detail)))


def test_a_closed_turn_is_counted_once_with_its_outcome_tokens_and_time(play: Play):
    async def scene(stage: Stage) -> None:
        stats = {"input_tokens": 100, "input_tokens_cached": 60, "output_tokens": 7, "duration_ms": 4000}
        record = await in_close(stage, "t", turn_status="completed", stats=stats, attempt=3)
        for _ in range(2):  # a message too many
            await finish.close_turn(stage.fleet, record.ref, record.epoch, record.turn)
        assert value("fleet_turns_total", agent="scripted", outcome="completed") == 1
        assert value("fleet_turn_attempts_cut_off_total", agent="scripted") == 2
        assert value("fleet_turn_seconds_sum", agent="scripted") == 4
        tokens = {kind: value("fleet_tokens_total", agent="scripted", kind=kind) for kind in metrics.TOKENS_OF}
        assert tokens == {"input": 100, "input_cached": 60, "output": 7}

    play(scene)


def test_a_turn_whose_attempts_are_used_up_is_counted_as_crashed(play: Play):
    async def scene(stage: Stage) -> None:
        record = await in_close(stage, "t", turn_status="failed", fail_code="AGENT_CRASHED", error="3 attempts")
        await finish.close_turn(stage.fleet, record.ref, record.epoch, record.turn)
        assert value("fleet_turns_total", agent="scripted", outcome="crashed") == 1

    play(scene)


def test_a_word_out_of_an_envelope_or_a_newer_record_is_no_label(play: Play):
    async def scene(stage: Stage) -> None:
        metrics.count_turn(stage.fleet, Record(stage.ref("t"), agent="made_up", turn_status="vanished"), 1)
        assert value("fleet_turns_total", agent="other", outcome="other") == 1

    play(scene)


def test_posts_are_counted_by_kind_and_so_are_their_retries(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        before = value("fleet_items_posted_total", kind="item")
        await append(stage, "t", "one", "two")
        sandbox.conditions(faults=[{"match": POST, "kind": "429", "times": 2}])
        await drain.drain(stage.fleet, stage.ref("t"))
        assert value("fleet_items_posted_total", kind="item") - before == 2
        assert value("fleet_items_posted_total", kind="audit") == len(await stage.items(WORKER_ALIAS))
        assert value("fleet_post_retries_total") == 2
        assert value("fleet_post_seconds_count") >= 2

    play(scene)


def test_an_item_that_is_refused_for_good_is_counted_as_that_and_not_as_posted(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.poll()
        before = value("fleet_items_posted_total", kind="item")
        await append(stage, "there/is/no/such/thread", "one")
        await drain.drain(stage.fleet, stage.ref("there/is/no/such/thread"))
        assert value("fleet_items_refused_total") == 1
        assert value("fleet_items_posted_total", kind="item") == before

    play(scene)


def test_the_poll_lag_grows_while_the_platform_does_not_answer_and_is_over_with_the_next_poll(
    play: Play, sandbox: Sandbox
):
    async def scene(stage: Stage) -> None:
        assert (await read_load(stage.fleet)).poll_lag_s is None
        await stage.poll()
        fresh = await read_load(stage.fleet)
        assert fresh.sections == {"attached": 1, "retrying": 0, "down": 0}
        sandbox.conditions(faults=[{"match": "", "kind": "500_before"}])
        await sections.poll_section(stage.fleet, stage.fleet.config.sections[0])
        stale = await read_load(stage.fleet)
        assert stale.sections == {"attached": 0, "retrying": 1, "down": 0}
        assert stale.poll_lag_s is not None
        assert fresh.poll_lag_s is not None
        assert stale.poll_lag_s > fresh.poll_lag_s
        sandbox.conditions(faults=[])
        await stage.poll()
        polls = {result: value("fleet_polls_total", result=result) for result in metrics.POLL_RESULTS}
        assert polls == {"read": 2, "retrying": 1, "down": 0}

    play(scene)


def test_a_section_that_stands_down_has_no_lag(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        await stage.poll()
        sandbox.set_session(stage.at.session_id, "closed")
        await stage.poll()
        load = await read_load(stage.fleet)
        assert load.sections["down"] == 1
        assert load.poll_lag_s is None

    play(scene)


def test_a_due_turn_waits_until_its_lease_is_taken(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "hello")
        await stage.poll()
        assert (await read_load(stage.fleet)).turns_waiting == 1
        assert await stage.fleet.leases.take(await stage.record("t")) is not None
        assert (await read_load(stage.fleet)).turns_waiting == 0

    play(scene)


def test_journals_are_counted_for_the_host_of_their_threads(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        for alias in ("one", "two"):
            await stage.hand_over(alias)
        await stage.poll()
        await append(stage, "one", "a", "b", "c")
        await append(stage, "two", "d")
        here = await read_load(stage.fleet)
        assert (here.journal_entries, here.journal_longest) == (4, 3)
        stage.fleet.environment = replace(stage.fleet.environment, host="beta")
        elsewhere = await read_load(stage.fleet)
        assert (elsewhere.journal_entries, elsewhere.journal_longest) == (0, 0)

    play(scene)


def test_a_thread_that_waits_for_a_host_is_counted_on_each(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.fleet.hosts.leave("alpha")
        await stage.hand_over("t", "hello")
        await stage.poll()
        assert (await read_load(stage.fleet)).threads_without_host == 1

    play(scene)


def test_a_lost_lease_is_counted_and_one_that_ended_with_its_epoch_is_not(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "hello")
        await stage.poll()
        record = await stage.record("t")
        older = replace(record, epoch=record.epoch - 1)
        for one in (older, record, older, record):
            count_lost_lease(stage.fleet, one)
        telling = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*(task for task in telling if task is not None))
        assert (await read_load(stage.fleet)).leases_lost == 2

    play(scene)
