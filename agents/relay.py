"""Questions of an agent on their way to the fleet, for adapters whose vendor asks from somewhere else than the turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from fleet.events import Answer, Decision, PromptCancelledError, PromptKind, Question, ToolCall, TurnHost

T = TypeVar("T")


class Relay:
    """A `TurnHost` before another one. What that one raises ends the turn, and is no answer to the agent.

    So a turn can be parked or taken away while its agent waits: the question stays unanswered until the agent is ended.
    """

    def __init__(self, host: TurnHost) -> None:
        self._host = host
        self._raised: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    async def permit(self, call: ToolCall) -> Decision:
        """See `fleet.events.TurnHost.permit`."""
        return await self._answer(self._host.permit(call))

    async def ask(self, kind: PromptKind, questions: tuple[Question, ...]) -> Answer:
        """See `fleet.events.TurnHost.ask`."""
        return await self._answer(self._host.ask(kind, questions))

    async def unless_raised(self, work: Awaitable[T]) -> T:
        """Return what `work` gives, or raise what the fleet has raised meanwhile."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._raised}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._raised.done():
                raise self._raised.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})  # else it could still be reading when the next one begins to

    async def _answer(self, question: Awaitable[T]) -> T:
        try:
            return await question
        except PromptCancelledError:
            raise
        except Exception as error:
            if not self._raised.done():
                self._raised.set_result(error)
            never: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            return await never
