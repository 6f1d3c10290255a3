"""The drainer against a platform that fails in every way of protocol §1: each item once, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fleet import drain
from fleet.events import Text
from fleet.items import from_event
from fleet.journal import item_draft, state_draft
from tests.wire.stage import Sandbox, Stage

Play = Callable[..., Any]


async def said(stage: Stage, alias: str, *texts: str) -> None:
    for text in texts:
        item = from_event(Text(text))
        assert item is not None
        await stage.fleet.journal.append_once(stage.ref(alias), f"said:{text[:40]}", item_draft(item))


@pytest.mark.parametrize("kind", ["429", "500_before", "500_after", "cut_before", "cut_after"])
def test_every_item_is_stored_once_and_in_order_whatever_a_post_comes_to(play: Play, sandbox: Sandbox, kind: str):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        await said(stage, "t", *(f"line {n}" for n in range(6)))
        fault = {"match": "post_session_thread_item", "kind": kind, "rate": 0.5, "times": 3}
        sandbox.conditions(faults=[fault], seed=7)
        await drain.drain(stage.fleet, stage.ref("t"))
        assert await stage.texts("t") == [f"line {n}" for n in range(6)]

    play(scene)


def test_a_lagging_list_does_not_double_an_item(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        await said(stage, "t", "one", "two")
        sandbox.conditions(
            list_lag_ms=1500.0, faults=[{"match": "post_session_thread_item", "kind": "500_after", "times": 2}]
        )
        await drain.drain(stage.fleet, stage.ref("t"))
        sandbox.conditions(list_lag_ms=0.0)
        assert await stage.texts("t") == ["one", "two"]

    play(scene)


def test_a_drainer_that_gives_up_leaves_the_rest_for_the_next(
    play: Play, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(drain, "PATIENCE_S", 0.3)

    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        await said(stage, "t", "one", "two")
        sandbox.conditions(faults=[{"match": "post_session_thread_item", "kind": "429"}])
        await drain.drain(stage.fleet, stage.ref("t"))
        assert await stage.fleet.store.journal_depth(stage.ref("t")) == 2
        assert "t" in await stage.fleet.store.scores(stage.fleet.store.session(stage.at.session_id).attention)
        sandbox.conditions(faults=[])
        await drain.drain(stage.fleet, stage.ref("t"))
        assert await stage.texts("t") == ["one", "two"]

    play(scene)


def test_an_item_over_the_platforms_lower_cap_is_excerpted_and_posted(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        await said(stage, "t", "x" * 100_000)
        await drain.drain(stage.fleet, stage.ref("t"))
        (text,) = await stage.texts("t")
        assert "…[truncated 93856 bytes; see " in text

    play(scene)


def test_a_refused_item_fails_its_thread_with_a_code_and_lets_others_pass(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        bad = {"content": "no list", "metadata": {"type": "text"}}
        await stage.fleet.journal.append_once(stage.ref("t"), "bad", item_draft(bad))
        await stage.settle()
        await drain.drain(stage.fleet, stage.ref("t"))
        await stage.settle()
        texts = await stage.texts("t")
        assert texts[0].startswith("THREAD_POST_FAILED")
        record = await stage.record("t")
        assert (record.outcome, record.error) == ("failed", "THREAD_POST_FAILED")

    play(scene)


def test_a_session_without_access_keeps_its_items_waiting(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        await said(stage, "t", "one")
        sandbox.set_session(stage.at.session_id, "deleted")
        await drain.drain(stage.fleet, stage.ref("t"))
        assert await stage.fleet.store.journal_depth(stage.ref("t")) == 1

    play(scene)


def test_the_state_of_an_old_epoch_is_not_written(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        record = await stage.record("t")
        await stage.fleet.journal.append_once(stage.ref("t"), "old", state_draft("failed", record.epoch - 1))
        await drain.drain(stage.fleet, stage.ref("t"))
        value = (await stage.person.download_object(stage.at, "t"))["value"]
        assert value["thread"]["metadata"]["instance"]["state"] == "active"

    play(scene)


def test_completed_is_not_overwritten_by_a_late_active(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t")
        await stage.poll()
        record = await stage.record("t")
        value = (await stage.person.download_object(stage.at, "t"))["value"]
        value["thread"]["metadata"]["instance"]["state"] = "completed"
        await stage.person.upload_object(stage.at, "t", value)
        await stage.fleet.journal.append_once(stage.ref("t"), "late", state_draft("active", record.epoch))
        await drain.drain(stage.fleet, stage.ref("t"))
        value = (await stage.person.download_object(stage.at, "t"))["value"]
        assert value["thread"]["metadata"]["instance"]["state"] == "completed"

    play(scene)
