"""Open prompts in Redis and in the thread: superseded, answered in the moment of parking, read back from the thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fleet.asker import Asker, ParkedError
from fleet.emitter import Emitter
from fleet.events import Question, ToolCall
from fleet.inbound import catch_up
from fleet.leases import Lease
from tests.wire.stage import Stage

Play = Callable[..., Any]
WHICH = (Question("Which?", "", (("Red", ""), ("Blue", ""))),)
WHY = (Question("Why?"),)


async def in_turn(stage: Stage) -> Lease:
    await stage.hand_over("t", "hello")
    await stage.poll()
    lease = await stage.fleet.leases.take(await stage.record("t"))
    assert lease is not None
    return lease


def asker(
    stage: Stage,
    lease: Lease,
    permissions: Any = "approval",
    hold_s: float = 0.0,
    grants: dict[str, str] | None = None,
    said: int = 0,
) -> Asker:
    async def gave(_item: Any) -> None:
        return None

    return Asker(stage.fleet, lease, Emitter(stage.fleet, lease, said), permissions, hold_s, gave, grants=grants)


async def types(stage: Stage) -> list[str]:
    await stage.settle()
    own = [item for item in await stage.items("t") if item["user_id"] == stage.worker_user]
    return [item["metadata"]["type"] for item in own]


def test_a_newer_question_supersedes_an_older_one(play: Play):
    async def scene(stage: Stage) -> None:
        lease = await in_turn(stage)
        asking = asker(stage, lease)
        with pytest.raises(ParkedError):
            await asking.ask("ask_user_question", WHICH)
        with pytest.raises(ParkedError):
            await asking.ask("text", WHY)
        assert await types(stage) == ["pending_prompt", "pending_prompt_resolved", "pending_prompt"]
        prompt = await stage.fleet.prompts.read(stage.ref("t"))
        assert prompt is not None
        assert prompt.kind == "text"

    play(scene)


def test_a_question_that_is_asked_again_after_a_crash_is_not_posted_again(play: Play):
    async def scene(stage: Stage) -> None:
        lease = await in_turn(stage)
        with pytest.raises(ParkedError):
            await asker(stage, lease).ask("ask_user_question", WHICH)
        await stage.say("t", "2")
        await stage.poll()
        answer = await asker(stage, lease, said=1).ask("ask_user_question", WHICH)
        assert answer.answers == (("Blue",),)
        assert await types(stage) == ["pending_prompt", "pending_prompt_resolved"]

    play(scene)


def test_the_same_question_again_in_one_attempt_is_a_new_one(play: Play):
    async def scene(stage: Stage) -> None:
        lease = await in_turn(stage)
        asking = asker(stage, lease, hold_s=20)
        for _ in range(2):
            waiting = asyncio.create_task(asking.ask("ask_user_question", WHICH))
            while (prompt := await stage.fleet.prompts.read(stage.ref("t"))) is None or prompt.answer is not None:
                await asyncio.sleep(0.01)
            await stage.say("t", "1")
            await stage.poll()
            assert (await waiting).answers == (("Red",),)
        assert (await types(stage)).count("pending_prompt") == 2

    play(scene)


def test_an_answer_in_the_moment_of_parking_is_used_and_used_once(play: Play):
    async def scene(stage: Stage) -> None:
        lease = await in_turn(stage)
        asking = asker(stage, lease, hold_s=20)
        waiting = asyncio.create_task(asking.ask("ask_user_question", WHICH))
        while (prompt := await stage.fleet.prompts.read(stage.ref("t"))) is None:
            await asyncio.sleep(0.01)
        await stage.say("t", "1")
        await stage.poll()
        assert not await stage.fleet.prompts.park(stage.ref("t"), prompt)
        assert (await waiting).answers == (("Red",),)
        assert await stage.inbox("t") == ["hello"]

    play(scene)


def test_a_grant_lets_exactly_that_call_through_once(play: Play):
    async def scene(stage: Stage) -> None:
        lease = await in_turn(stage)
        asking = asker(stage, lease, grants={"Bash make deploy": "somebody"})
        with pytest.raises(ParkedError):
            await asking.permit(ToolCall("1", "Bash", {"command": "make destroy"}))
        assert (await asking.permit(ToolCall("2", "Bash", {"command": "make deploy"}))).allow
        with pytest.raises(ParkedError):
            await asking.permit(ToolCall("3", "Bash", {"command": "make deploy"}))

    play(scene)


def test_an_open_prompt_is_read_back_from_the_thread_when_redis_is_lost(play: Play):
    async def scene(stage: Stage) -> None:
        lease = await in_turn(stage)
        with pytest.raises(ParkedError):
            await asker(stage, lease).permit(ToolCall("1", "Bash", {"command": "make deploy"}))
        await stage.settle()
        before = await stage.fleet.prompts.read(stage.ref("t"))
        await stage.say("t", "approve")
        await stage.fleet.prompts.forget(stage.ref("t"))
        await catch_up(stage.fleet, stage.at, await stage.record("t"), rebuild=True)
        after = await stage.fleet.prompts.read(stage.ref("t"))
        assert before is not None
        assert after is not None
        assert (after.id, after.kind, after.questions, after.subject) == (
            before.id,
            before.kind,
            before.questions,
            "Bash make deploy",
        )
        assert after.parked
        assert after.answer is not None

    play(scene)
