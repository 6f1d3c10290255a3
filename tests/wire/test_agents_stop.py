"""How long an agent has between SIGTERM and SIGKILL is the configuration's to say."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agents import base, process
from fleet import turn
from fleet.config import TurnsConfig
from fleet.events import Agent, AgentDiedError, AgentEvent, Ended, SessionStarted, TurnHost, TurnRequest
from tests.wire.agents import Host
from tests.wire.stage import Stage

#: Seconds; not the usual value.
GRACE_S = 1.25


@pytest.mark.parametrize("agent_type", base.ADAPTERS)
def test_every_adapter_stops_its_agent_with_the_requests_grace(
    agent_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not base.has_bundled_cli(agent_type):
        pytest.skip(f"the CLI of {agent_type} is not installed")
    graces: list[float] = []

    def guard_command(*_: Any, term_grace_s: float, **__: Any) -> list[str]:
        graces.append(term_grace_s)
        return ["/bin/false"]

    def end_leftovers(_: Path, *, term_grace_s: float) -> int:
        graces.append(term_grace_s)
        return 0

    monkeypatch.setattr(process, "guard_command", guard_command)
    monkeypatch.setattr(process, "end_leftovers", end_leftovers)
    (tmp_path / "script.yaml").write_text("turns: [{match: hello, events: [{text: hi}]}]")
    request = TurnRequest(
        work_folder=tmp_path,
        prompt="hello",
        turn=1,
        session_id=None,
        permissions="autonomous",
        state_dir=tmp_path,
        process_file=tmp_path / "process.json",
        env={"HOME": str(tmp_path)},
        options={"script": str(tmp_path / "script.yaml")},
        stop_grace_s=GRACE_S,
    )

    async def play() -> None:
        async for _ in base.load(agent_type).turn(request, Host()):
            pass

    with pytest.raises(AgentDiedError):
        asyncio.run(asyncio.wait_for(play(), 20))
    assert graces == [GRACE_S, GRACE_S]


class Asked:
    """An agent, and the runtime that has it, which keeps the grace that it was given."""

    def __init__(self) -> None:
        self.graces: list[float] = []

    def load(self, agent_type: str) -> Agent:
        return self

    def end_leftovers(self, process_file: Path, grace_s: float) -> int:
        self.graces.append(grace_s)
        return 0

    async def turn(self, request: TurnRequest, host: TurnHost) -> AsyncIterator[AgentEvent]:
        self.graces.append(request.stop_grace_s)
        yield SessionStarted("session")
        yield Ended(ok=True)

    def recorded(self, request: TurnRequest) -> list[AgentEvent]:
        return []


def test_a_turn_hands_on_the_grace_of_the_configuration_to_its_agent_and_to_what_a_crash_left(play: Callable[..., Any]):
    agent = Asked()

    async def scene(stage: Stage) -> None:
        turns = TurnsConfig(stop_grace_s=GRACE_S)
        stage.fleet.config = stage.fleet.config.model_copy(update={"turns": turns})
        await stage.hand_over("t", "hello")
        await stage.poll()
        epoch = (await stage.record("t")).epoch
        await turn.run_turn(stage.fleet, agent, stage.ref("t"), epoch, 1, asyncio.Event())

    play(scene)
    assert agent.graces == [GRACE_S, GRACE_S]
