"""Sections: attached to the right session, standing down in a named state, and back again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fleet import attach, sections
from fleet.envelope import WORKER_ALIAS, WorkerInstance, new_thread, worker_object
from fleet.record import INTERRUPTED
from tests.wire.stage import Sandbox, Stage

Play = Callable[..., Any]


async def state(stage: Stage) -> tuple[str, str]:
    name = stage.fleet.config.sections[0].name
    known = await stage.fleet.store.hash(stage.fleet.store.key("section-state", name))
    return known["state"], known["reason"]


async def audits(stage: Stage) -> list[str]:
    return [item["metadata"]["type"] for item in await stage.items(WORKER_ALIAS)]


def test_a_session_is_taken_with_a_worker_object_and_an_audit_item(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.poll()
        value = (await stage.person.download_object(stage.at, WORKER_ALIAS))["value"]["thread"]["metadata"]
        assert value["user"]["user_id"] == stage.worker_user
        assert value["instance"]["status"] == "attached"
        assert await state(stage) == ("attached", "")
        assert await audits(stage) == ["attached"]

    play(scene)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "note"}, "SECTION_WORKER_OBJECT_MALFORMED"),
        ({"type": "thread", "thread": {"metadata": {}}}, "SECTION_WORKER_OBJECT_MALFORMED"),
        (worker_object("somebody", WorkerInstance("i", "1", "t", "t")), "SESSION_OWNED_BY_DIFFERENT_USER"),
    ],
)
def test_a_session_that_is_not_ours_is_refused(play: Play, value: Any, expected: str):
    async def scene(stage: Stage) -> None:
        await stage.person.upload_object(stage.at, WORKER_ALIAS, value)
        await stage.hand_over("t", "hello")
        await stage.poll()
        assert (await state(stage))[0] == expected
        assert not (await stage.record("t")).exists

    play(scene)


@pytest.mark.parametrize(
    ("revision", "expected"),
    [({"status": "importing"}, "revision_not_ready"), ({"phase": "published"}, "revision_not_writable")],
)
def test_a_revision_that_cannot_be_written_is_waited_for(
    play: Play, sandbox: Sandbox, revision: dict[str, str], expected: str
):
    async def scene(stage: Stage) -> None:
        sandbox.set_revision(**revision)
        await stage.poll()
        assert (await state(stage))[0] == expected
        sandbox.set_revision(phase="draft", status="ready")
        await stage.poll()
        assert await state(stage) == ("attached", "")

    play(scene)


@pytest.mark.parametrize(
    ("status", "expected"), [("closing", "session_closing"), ("closed", "session_closed"), ("deleted", "access_lost")]
)
def test_a_session_that_ends_interrupts_its_turns_and_keeps_their_place(
    play: Play, sandbox: Sandbox, status: str, expected: str
):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "hello")
        await stage.poll()
        assert (await stage.record("t")).step == "run"
        sandbox.set_session(stage.at.session_id, status)
        await stage.poll()
        assert (await state(stage))[0] == expected
        record = await stage.record("t")
        assert (record.step, record.stop) == ("run", INTERRUPTED)
        assert await stage.fleet.at(stage.at.session_id) is None

    play(scene)


def test_a_session_that_is_back_goes_on_where_it_was(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "hello")
        await stage.poll()
        stage.nudges.waiting.clear()
        sandbox.set_revision(status="importing")
        await attach.stand_down(stage.fleet, stage.at.session_id, attach.StandDownError("revision_not_ready", "x"))
        await stage.poll()
        assert (await stage.record("t")).stop == INTERRUPTED
        sandbox.set_revision(status="ready")
        await stage.poll()
        assert (await stage.record("t")).stop == ""
        assert [name for name, _ in stage.nudges.waiting] == ["run_turn"]

    play(scene)


def test_deleting_the_worker_object_detaches_until_somebody_attaches_again(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.poll()
        await stage.person.delete_object(stage.at, WORKER_ALIAS)
        await stage.poll()
        assert (await state(stage))[0] == "detached"
        await stage.poll()
        assert (await state(stage))[0] == "detached"
        await attach.reattach(stage.fleet, "one")
        await stage.poll()
        assert await state(stage) == ("attached", "")

    play(scene)


def test_an_operator_detaches_a_section_with_a_word_in_the_worker_thread(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.poll()
        await attach.detach(stage.fleet, "one", "maintenance")
        await stage.poll()
        assert await state(stage) == ("detached", "maintenance")
        assert await audits(stage) == ["attached", "detached"]

    play(scene)


def test_a_fault_while_attaching_delays_it_and_nothing_else(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "hello")
        sandbox.conditions(faults=[{"match": "/blobs/", "kind": "500_before", "times": 2}])
        for _ in range(2):
            await stage.poll()
            assert (await state(stage))[0] == "retrying"
        await stage.poll()
        assert await state(stage) == ("attached", "")
        assert (await stage.record("t")).step == "run"

    play(scene)


def test_last_seen_is_refreshed_now_and_then(play: Play, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sections, "REFRESH_MS", 0)
    monkeypatch.setattr(attach, "_instance", lambda _fleet: WorkerInstance("again", "1", "t", "later"))

    async def scene(stage: Stage) -> None:
        await stage.poll()
        await stage.poll()
        value = (await stage.person.download_object(stage.at, WORKER_ALIAS))["value"]["thread"]["metadata"]
        assert value["instance"]["last_seen_at"] == "later"

    play(scene)


def test_objects_that_are_not_ours_cost_one_look_each(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        sandbox.conditions(object_types=False)
        for n in range(20):
            await stage.person.upload_object(stage.at, f"notes/{n}", {"type": "message"})
            foreign = {"type": "thread", "thread": {"metadata": {"workspace": {"work_folder": "/x"}}}}
            await stage.person.upload_object(stage.at, f"talks/{n}", foreign)
        await stage.poll()
        sandbox.reset_requests()
        for _ in range(3):
            await stage.fleet.store.redis.hdel(
                stage.fleet.store.session(stage.at.session_id).section("one"), "resync_at"
            )
            await stage.poll()
        assert sandbox.requests().get("download_session_object", 0) <= 3

    play(scene)


def test_what_the_events_missed_is_found_by_the_comparison(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.poll()
        await stage.hand_over("t", "hello")
        keys = stage.fleet.store.session(stage.at.session_id)
        async for page in stage.person.events(stage.at):
            await stage.fleet.store.redis.zadd(keys.events("one"), {event["id"]: 2**50 for event in page})
        await stage.poll()
        assert not (await stage.record("t")).exists
        await stage.fleet.store.redis.hdel(keys.section("one"), "resync_at")
        await stage.poll()
        assert (await stage.record("t")).step == "run"

    play(scene)


def test_only_aliases_below_the_prefix_are_served(play: Play, sandbox: Sandbox):
    async def scene(stage: Stage) -> None:
        for alias in ("team/a", "other/b"):
            value = new_thread(str(stage.folder), "scripted", "autonomous")
            value["thread"]["metadata"]["instance"] = {"state": "pending"}
            await stage.person.upload_object(stage.at, alias, value)
        await stage.poll()
        assert (await stage.record("team/a")).exists
        assert not (await stage.record("other/b")).exists

    play(scene, prefix="team/")
