"""One attempt of a turn: the agent is started or resumed, and what it does is said, until its turn has ended."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fleet import attachments, items
from fleet.asker import Asker, Guard, parked_answer
from fleet.config import AgentConfig
from fleet.context import Fleet
from fleet.emitter import Emitter, LeaseLostError
from fleet.environment import agent_environment
from fleet.errors import ThreadFailedError
from fleet.events import Agent, AgentDiedError, Ended, Image, SaidEvent, SessionStarted, TurnRequest, Usage
from fleet.hostfiles import Checkpoint, HostFiles
from fleet.inbound import newest_time, prompt_of
from fleet.leases import Lease
from fleet.platform.client import SessionRef
from fleet.policy import parse_policy
from fleet.rebuild import checkpoint_of
from fleet.record import Record
from fleet.start import checked_folder

log = logging.getLogger(__name__)

Json = dict[str, Any]

#: What a resumed agent is told when it had taken the prompt before it was interrupted.
CONTINUE = "You were interrupted. Go on where you left off."
#: The token of the status that names the attachments which could not be fetched (protocol §4).
UNAVAILABLE = "attachment_unavailable"
#: Pause in seconds before a turn whose model failed is resumed: the first, and the factor for each further one.
RETRY_PAUSE_S, RETRY_FACTOR = 1.0, 3.0


class AgentRuntime(Protocol):
    """What the turn needs of the agents' side."""

    def load(self, agent_type: str) -> Agent:
        """Return the adapter of an agent type."""
        ...

    def end_leftovers(self, process_file: Path, grace_s: float) -> int:
        """End what a crash left behind of an agent, by force after `grace_s`; return how many processes that were."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a turn ended: `status` and `error` as in `turn_end`; `code` when its thread fails with it."""

    status: str
    error: str = ""
    code: str = ""


def crashed(attempts: int) -> Outcome:
    """Return the end of a turn that was interrupted too often."""
    return Outcome("failed", f"{attempts} attempts of the turn were interrupted", "AGENT_CRASHED")


class Attempt:
    """One attempt of a turn, as the holder of its lease.

    `record` is the thread's record as this attempt has changed it, `tokens` what the agent has used, and `said` the
    number of the turn's last item, known when the attempt has ended.
    """

    _emitter: Emitter
    _agent: Agent
    _configured: AgentConfig
    _guard: Guard | None

    def __init__(self, fleet: Fleet, runtime: AgentRuntime, lease: Lease, record: Record, at: SessionRef) -> None:
        self.tokens = Usage()
        self.said = 0
        self._fleet = fleet
        self._runtime = runtime
        self._lease = lease
        self._at = at
        self._files = HostFiles(fleet.environment.home, record.ref)
        self._images: tuple[Image, ...] = ()
        self._grants: dict[str, str] = {}
        self._spent: set[str] = set(record.consumed)
        # Whether the turn was interrupted, and in which session, is this host's word, not that of Redis: an agent would
        # be told to go on, and Redis may not have heard of the session that its agent had begun.
        before = Checkpoint.read(self._files.checkpoint)
        self._under_way = (before.turn, before.step) == (record.turn, "run")
        taken: Json = {"agent_session": before.agent_session, "prompted": True} if before.prompted else {}
        self.record = replace(record, **taken) if self._under_way else record

    @property
    def number(self) -> int:
        """The number of this attempt, from 1, among those that count."""
        return self.record.attempt - self._files.excused(self.record.epoch, self.record.turn)

    def excuse(self) -> None:
        """Let this attempt not count: what interrupted it was no fault of its agent's."""
        self._files.excuse(self.record.epoch, self.record.turn)

    async def duration_ms(self) -> int:
        """Return how long the turn has taken by Redis's clock, earlier attempts included."""
        return await self._fleet.store.now_ms() - self.record.began_ms if self.record.began_ms else 0

    async def run(self) -> Outcome:
        """Run the agent until its turn has ended.

        Raises:
            AgentDiedError: the agent's process ended unasked.
            LeaseLostError: somebody else holds the turn by now.
            ParkedError: a person's answer will start a new turn.
            ThreadFailedError: the thread must fail.
        """
        if not self.record.settings:
            raise ThreadFailedError("ACTIVATION_UNKNOWN", f"epoch {self.record.epoch} was not started here")
        self._agent = self._runtime.load(self.record.agent)
        self._configured = self._fleet.config.agents[self.record.agent]
        self._guard = self._guarded()
        grace_s = self._fleet.config.turns.stop_grace_s
        left = await asyncio.to_thread(self._runtime.end_leftovers, self._files.process, grace_s)
        if left:
            log.warning("%s: ended %d processes that a crash had left", self.record.ref, left)
        self._emitter = Emitter(self._fleet, self._lease)
        try:
            if self.record.began_ms:
                await self._recover()
            checked_folder(self.record.work_folder, self._fleet.config.hosts[self._fleet.host].work_folders)
            if self._guard is not None and not self._was_said(type="policy_applied"):
                await self._emitter.emit(self._guard.applied())
            if self.number > self._fleet.config.turns.attempts:
                return crashed(self.number - 1)
            prompt = await self._begin()
            if prompt:
                return await self._with_retries(prompt)
            await self._note()  # that the turn is still ours: the inbox of a Redis that was emptied is empty, too
            return Outcome("completed")
        finally:
            self.said = self._emitter.said
            self._emitter.close()

    def _guarded(self) -> Guard | None:
        """Return the policy that the turn runs under; None when it is not guarded."""
        settings = self.record.settings
        if settings["permissions"] != "guarded":
            return None
        policy = parse_policy(settings["policy"], self._fleet.config.policy.rules)
        outbox = Path(settings["artifacts"]["source"]) if settings["artifacts"] else None
        return Guard(policy, self.record.agent, Path(self.record.work_folder), outbox)

    async def _recover(self) -> None:
        """Say what earlier attempts left unsaid: from the log, then from the agent's own transcript."""
        said = await self._emitter.recover()
        if self.record.prompted and self._under_way:
            for event in await asyncio.to_thread(self._agent.recorded, self._request("")):
                if isinstance(event, SaidEvent) and event.uid is not None and event.uid not in said:
                    await self._emitter.emit(items.from_event(event), event.uid)
        detail = f"Turn {self.record.turn} was interrupted and goes on (attempt {self.record.attempt})."
        await self._emitter.emit(items.status("recovering", detail))

    async def _begin(self) -> str:
        """Fix the items that the turn is given, and return the prompt they make; "" when nobody has said anything.

        Raises:
            ThreadFailedError: the agent is said to be at work on the prompt, which this host does not know of.
        """
        given = await self._given()
        self._spent.update(item["id"] for item in given)
        under_way = self._under_way or await self._fleet.prompts.read(self.record.ref) is not None
        if given or under_way:
            await self._gave(*given)
        answer = await parked_answer(self._fleet, self._emitter, self.record.ref, self._gave, self._grants, self._spent)
        if self.record.prompted:
            if not under_way:
                raise ThreadFailedError("ACTIVATION_UNKNOWN", f"turn {self.record.turn} was not begun here")
            return CONTINUE
        said = await self._said_by_persons(given)
        return "\n\n".join(text for text in (answer, said) if text)

    async def _given(self) -> list[Json]:
        """Return the items of the inbox that the turn is given. What a turn has consumed is given to no other."""
        inbox = await self._fleet.inbox.waiting(self.record.ref)
        new = [item for item in inbox if item["id"] not in self._spent]
        if len(new) < len(inbox):
            await self._fleet.inbox.drop(self.record.ref, self._spent.intersection(item["id"] for item in inbox))
        return [item for item in new if not self.record.began_ms or item["id"] in self.record.turn_items]

    async def _said_by_persons(self, given: list[Json]) -> str:
        """Return what the turn's items say, once their attachments are in the work folder."""
        folder, inbox = Path(self.record.work_folder), self.record.settings["inbox"]
        fetched = await attachments.fetch(self._fleet.platform, self._at, folder, inbox, given)
        self._images = fetched.images
        if fetched.unavailable and not self._was_said(status=UNAVAILABLE):
            await self._emitter.emit(items.status(UNAVAILABLE, "; ".join(fetched.unavailable)))
        return prompt_of(given, fetched.words)

    async def _gave(self, *given: Json) -> None:
        """Count items among those that this turn was given: they are consumed when it ends."""
        ids = dict.fromkeys((*self.record.turn_items, *(item["id"] for item in given)))
        await self._note(
            began_ms=self.record.began_ms or await self._fleet.store.now_ms(),
            turn_items=tuple(ids),
            turn_newest=newest_time(given, self.record.turn_newest),
        )

    async def _note(self, **changes: Any) -> None:
        """Change the record, in Redis and on this host."""
        if not await self._fleet.records.set_held(self._lease.record, self._lease.token, **changes):
            raise LeaseLostError(f"turn {self.record.turn} of {self.record.ref} was taken over")
        self.record = replace(self.record, **changes)
        checkpoint_of(self.record).write(self._files.checkpoint)

    async def _prompt_taken(self, session_id: str) -> None:
        """Note the session whose transcript has the prompt: here first, for the agent works on while Redis is slow."""
        taken: Json = {"agent_session": session_id, "prompted": True}
        checkpoint_of(replace(self.record, **taken)).write(self._files.checkpoint)
        await self._note(**taken)

    async def _with_retries(self, prompt: str) -> Outcome:
        """Run the agent, and resume it where its model's service failed for a moment (protocol §3.7)."""
        retries = self._configured.turn_retries
        pause = RETRY_PAUSE_S
        for retry in range(retries + 1):
            ended = await self._stream(prompt)
            if ended.ok:
                return Outcome("completed")
            if not ended.transient or retry == retries:
                return Outcome("failed", ended.error)
            detail = f"{ended.error}. Resuming in {pause:g} s ({retry + 1} of {retries})."
            await self._emitter.emit(items.status("retrying", detail))
            await asyncio.sleep(pause)
            pause *= RETRY_FACTOR
            prompt = CONTINUE if self.record.prompted else prompt
        raise AssertionError("the last retry returns")

    async def _stream(self, prompt: str) -> Ended:
        hold_s = 0.0 if self._configured.wait == "parked" else self._configured.hold_s
        permissions = self.record.settings["permissions"]
        host = Asker(
            self._fleet,
            self._lease,
            self._emitter,
            permissions,
            hold_s,
            self._gave,
            self._guard,
            grants=self._grants,
            spent=self._spent,
        )
        async with aclosing(self._agent.turn(self._request(prompt), host)) as events:
            async for event in events:
                match event:
                    case Ended():
                        return event
                    case Usage():
                        self.tokens = _sum(self.tokens, event)
                    case SessionStarted(session_id):
                        await self._prompt_taken(session_id)
                    case _:
                        await self._emitter.emit(items.from_event(event), event.uid)
        raise AgentDiedError("the agent said nothing of how its turn ended")

    def _request(self, prompt: str) -> TurnRequest:
        settings = self.record.settings
        script = self._configured.script
        return TurnRequest(
            work_folder=Path(self.record.work_folder),
            prompt=prompt,
            turn=self.record.turn,
            session_id=self.record.agent_session or None,
            permissions=settings["permissions"],
            state_dir=self._files.agent_state,
            process_file=self._files.process,
            env=agent_environment(os.environ, self._configured.env),
            executable=settings["executable"],
            model=settings["model"],
            effort=settings["effort"],
            options={"script": str(script)} if script else {},
            images=() if self.record.prompted else self._images,
            stop_grace_s=self._fleet.config.turns.stop_grace_s,
        )

    def _was_said(self, **metadata: str) -> bool:
        """Whether an attempt of the turn has said an item with this metadata."""
        said = self._files.said_in(self.record.turn)
        return any(metadata.items() <= entry["item"]["metadata"].items() for entry in said)


def _sum(total: Usage, more: Usage) -> Usage:
    return Usage(
        total.input_tokens + more.input_tokens,
        total.input_tokens_cached + more.input_tokens_cached,
        total.output_tokens + more.output_tokens,
    )
