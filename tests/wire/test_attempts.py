"""Attempts of a turn: how one goes on where the one before was cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from fleet.attempt import CONTINUE
from fleet.events import AgentDiedError, AgentEvent, Ended, SessionStarted, Text, TurnHost, TurnRequest
from fleet.turn import run_turn
from tests.wire.stage import Stage

Play = Callable[..., Any]


class Rehearsed:
    """An agent and its runtime in this process: says one text per turn, keeps its session's transcript."""

    def __init__(self) -> None:
        self.requests: list[TurnRequest] = []
        self.transcript: list[AgentEvent] = []
        self.dies = False

    def load(self, _agent_type: str) -> Rehearsed:
        return self

    def end_leftovers(self, _process_file: Path, _grace_s: float) -> int:
        return 0

    def recorded(self, _request: TurnRequest) -> list[AgentEvent]:
        return self.transcript

    async def turn(self, request: TurnRequest, _host: TurnHost) -> AsyncGenerator[AgentEvent, None]:
        self.requests.append(request)
        said = Text(f"text {len(self.requests)}", uid=f"event-{len(self.requests)}")
        self.transcript.append(said)
        yield SessionStarted(f"session-{len(self.requests)}")
        yield said
        if self.dies:
            raise AgentDiedError("as rehearsed")
        yield Ended(ok=True)


async def attempt(stage: Stage, agent: Rehearsed) -> None:
    record = await stage.record("t")
    await run_turn(stage.fleet, agent, record.ref, record.epoch, record.turn, asyncio.Event())


def test_a_session_that_redis_has_not_heard_of_is_gone_on_with(play: Play):
    async def scene(stage: Stage) -> None:
        agent = Rehearsed()
        await stage.hand_over("t", "hello")
        await stage.poll()
        records = stage.fleet.records
        set_held = records.set_held

        async def deaf(*args: Any, **changes: Any) -> bool:
            if "agent_session" in changes:
                raise RedisConnectionError("gone")
            return await set_held(*args, **changes)

        records.set_held = deaf  # type: ignore[method-assign]
        await attempt(stage, agent)
        records.set_held = set_held  # type: ignore[method-assign]
        assert (await stage.record("t")).agent_session == ""
        await attempt(stage, agent)
        await stage.settle()

        assert [(request.prompt, request.session_id) for request in agent.requests] == [
            ("hello", None),
            (CONTINUE, "session-1"),
        ]
        assert [text for text in await stage.texts("t") if text.startswith("text")] == ["text 1", "text 2"]

    play(scene)


def test_attempts_that_redis_has_cut_off_do_not_fail_the_thread(play: Play):
    async def scene(stage: Stage) -> None:
        agent = Rehearsed()
        await stage.hand_over("t", "hello")
        await stage.poll()
        stage.fleet.leases.ttl_ms = 300  # for as long as a lease lives, an append is tried again
        journal = stage.fleet.journal
        append = journal.append

        async def gone(*_: Any, **__: Any) -> Any:
            raise RedisConnectionError("gone")

        journal.append = gone  # type: ignore[method-assign]
        for _ in range(stage.fleet.config.turns.attempts + 1):
            await attempt(stage, agent)
        journal.append = append  # type: ignore[method-assign]
        await attempt(stage, agent)
        assert (await stage.record("t")).turn_status == "completed"

    play(scene)


def test_an_agent_that_dies_in_every_attempt_fails_the_thread(play: Play):
    async def scene(stage: Stage) -> None:
        agent = Rehearsed()
        agent.dies = True
        await stage.hand_over("t", "hello")
        await stage.poll()
        for _ in range(stage.fleet.config.turns.attempts):
            await attempt(stage, agent)
        record = await stage.record("t")
        assert (record.step, record.fail_code) == ("publish", "AGENT_CRASHED")
        assert len(agent.requests) == stage.fleet.config.turns.attempts

    play(scene)
