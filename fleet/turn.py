"""One turn: the agent is started or resumed, and what it does is said, until it ends or is stopped.

The turn holds the lease of the step `run`. It stops its agent when it is asked to, and at once when it can't renew.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import RedisError

from fleet import attachments, items, lifecycle
from fleet.asker import Asker, Guard, ParkedError, parked_answer
from fleet.context import Fleet
from fleet.emitter import Emitter, LeaseLostError
from fleet.environment import agent_environment
from fleet.errors import ThreadFailedError
from fleet.events import Agent, AgentDiedError, Ended, Image, SaidEvent, SessionStarted, TurnRequest, Usage
from fleet.hostfiles import HostFiles
from fleet.inbound import newest_time, prompt_of, waiting
from fleet.leases import RENEWALS, Lease
from fleet.platform.client import SessionRef, Timestamp
from fleet.policy import parse_policy
from fleet.record import INTERRUPTED, Record
from fleet.refs import ThreadRef
from fleet.start import checkpoint_of, consumed

log = logging.getLogger(__name__)

#: What a resumed agent is told when it had taken the prompt before it was interrupted.
CONTINUE = "You were interrupted. Go on where you left off."
#: The token of the status that names the attachments which could not be fetched (protocol §4).
UNAVAILABLE = "attachment_unavailable"
#: Why an attempt is ended although its turn has not ended.
UNFINISHED = frozenset({"lost", "superseded", "shutdown", INTERRUPTED})
#: Pause in seconds before a turn whose model failed is resumed: the first, and the factor for each further one.
RETRY_PAUSE_S, RETRY_FACTOR = 1.0, 3.0


Json = dict[str, Any]


class AgentRuntime(Protocol):
    """What the turn needs of the agents' side."""

    def load(self, agent_type: str) -> Agent:
        """Return the adapter of an agent type."""
        ...

    def end_leftovers(self, process_file: Path) -> int:
        """End what a crash left behind of an agent, and return how many processes that were."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a turn ended: `status` and `error` as in `turn_end`; `code` when its thread fails with it."""

    status: str
    error: str = ""
    code: str = ""


async def run_turn(
    fleet: Fleet, runtime: AgentRuntime, ref: ThreadRef, epoch: int, turn: int, shutdown: asyncio.Event
) -> None:
    """Run the turn `turn` of `epoch`, if it is still to be run here and nobody runs it.

    When `shutdown` is set, the turn is interrupted so that it is gone on with when the host is back.
    """
    record = await fleet.records.read(ref)
    if (record.epoch, record.turn, record.step, record.host) != (epoch, turn, "run", fleet.host):
        return
    at = await fleet.at(ref.session)
    if at is None or not await _counted(fleet, record):
        return
    lease = await fleet.leases.take(record)
    if lease is None:
        return
    attempt = Attempt(fleet, runtime, lease, at)
    try:
        outcome = await _supervised(fleet, lease, attempt, shutdown)
        if outcome is not None:
            await _over(fleet, lease, attempt, outcome)
    finally:
        await fleet.leases.release(lease)
        first_in_line = await fleet.hosts.turn_over(fleet.host, record.work_folder, ref)
    if not shutdown.is_set() and await fleet.at(ref.session) is not None:
        await lifecycle.dispatch(fleet, await fleet.records.read(ref))
        if first_in_line is not None:
            await _call_up(fleet, record.work_folder, first_in_line)


async def _counted(fleet: Fleet, record: Record) -> bool:
    """Count a turn as running here, unless its work folder has no place left (`concurrency.per_work_folder`)."""
    per_folder = fleet.config.concurrency.per_work_folder
    return await fleet.hosts.turn_runs(fleet.host, record.work_folder, record.ref, fleet.leases.ttl_ms, per_folder)


async def _call_up(fleet: Fleet, folder: str, ref: ThreadRef) -> None:
    """Let the thread that is first in line for a folder try again; one that needs no place any more leaves the line."""
    waiting = await fleet.records.read(ref)
    if waiting.step != "run":
        await fleet.hosts.leave_line(fleet.host, folder, ref)
    await lifecycle.dispatch(fleet, waiting)


async def _supervised(fleet: Fleet, lease: Lease, attempt: Attempt, shutdown: asyncio.Event) -> Outcome | None:
    """Run an attempt for as long as its lease is kept. None: the turn has not ended, or is not ours any more."""
    name = f"{lease.record.ref} turn {lease.record.turn}"
    keeper = asyncio.create_task(_keep(fleet, lease))
    running = asyncio.create_task(attempt.run())
    leaving = asyncio.create_task(shutdown.wait())
    await asyncio.wait({keeper, running, leaving}, return_when=asyncio.FIRST_COMPLETED)
    stopped_by = keeper.result() if keeper.done() else "shutdown"
    for task in (keeper, running, leaving):
        task.cancel()
    try:
        return await running
    except asyncio.CancelledError:
        log.info("%s was stopped: %s", name, stopped_by)
        if stopped_by in ("shutdown", INTERRUPTED):
            await fleet.records.set_held(lease.record, lease.token, attempt=attempt.number - 1)
        return None if stopped_by in UNFINISHED else Outcome("stopped")
    except ParkedError as error:
        log.info("%s: %s", name, error)
        return PARKED
    except ThreadFailedError as error:
        return Outcome("failed", error.detail, error.code)
    except LeaseLostError as error:
        log.warning("%s: %s", name, error)
        return None
    except AgentDiedError as error:
        log.warning("%s, attempt %d: %s", name, attempt.number, error)
    except Exception:
        log.exception("%s, attempt %d", name, attempt.number)
    if attempt.number >= fleet.config.turns.attempts:
        return crashed(attempt.number)
    return None


#: The turn gives its place back without a `turn_end`: a person's answer starts a new one in the same agent session.
PARKED = Outcome("parked")


def crashed(attempts: int) -> Outcome:
    """Return the end of a turn that was interrupted too often."""
    return Outcome("failed", f"{attempts} attempts of the turn were interrupted", "AGENT_CRASHED")


async def _keep(fleet: Fleet, lease: Lease) -> str:
    counting = asyncio.create_task(_count(fleet, lease))
    try:
        return await fleet.leases.keep(lease)
    finally:
        counting.cancel()


async def _count(fleet: Fleet, lease: Lease) -> None:
    """Keep the turn counted among those of the host."""
    while True:
        await asyncio.sleep(lease.ttl_ms / 1000 / RENEWALS)
        with suppress(RedisError):
            await _counted(fleet, lease.record)


async def _over(fleet: Fleet, lease: Lease, attempt: Attempt, outcome: Outcome) -> None:
    if outcome is PARKED:
        await _park(fleet, lease)
        return
    stats = {**asdict(attempt.tokens), "duration_ms": await attempt.duration_ms()}
    await fleet.records.transition(
        lease.record,
        "turn_ran",
        token=lease.token,
        release=True,
        turn_status=outcome.status,
        error=outcome.error,
        fail_code=outcome.code,
        said=attempt.said,
        stats=stats,
    )


async def _park(fleet: Fleet, lease: Lease) -> None:
    """Give the thread's place back: what the turn was given counts as consumed, the prompt stays open."""
    record = consumed(await fleet.records.read(lease.record.ref))
    checkpoint_of(record).write(HostFiles(fleet.environment.home, record.ref).checkpoint)
    await fleet.records.transition(
        lease.record,
        "turn_parked",
        token=lease.token,
        release=True,
        consumed_ids=record.turn_items,
        consumed_at=record.consumed_at,
        consumed=record.consumed,
    )


@dataclass(slots=True)
class Attempt:
    """One attempt of a turn. `number` counts from 1; `said` and `tokens` are right at any moment."""

    fleet: Fleet
    runtime: AgentRuntime
    lease: Lease
    at: SessionRef
    number: int = 0
    tokens: Usage = field(default_factory=Usage)
    _began_ms: int = 0
    _emitter: Emitter | None = None
    _given: list[Json] = field(default_factory=list)
    _ids: tuple[str, ...] = ()
    _newest: Timestamp | None = None
    _guard: Guard | None = None
    _images: tuple[Image, ...] = ()

    @property
    def said(self) -> int:
        """Number of the turn's last item."""
        return self._emitter.said if self._emitter else 0

    async def duration_ms(self) -> int:
        """Return how long the turn has taken by Redis's clock, earlier attempts included."""
        return await self.fleet.store.now_ms() - self._began_ms if self._began_ms else 0

    async def run(self) -> Outcome:
        """Run the agent until its turn has ended.

        Raises:
            AgentDiedError: the agent's process ended unasked.
            LeaseLostError: somebody else holds the turn by now.
            ThreadFailedError: the thread must fail.
        """
        record = await self.fleet.records.read(self.lease.record.ref)
        self.number = record.attempt
        files = HostFiles(self.fleet.environment.home, record.ref)
        left = await asyncio.to_thread(self.runtime.end_leftovers, files.process)
        if left:
            log.warning("%s: ended %d processes that a crash had left", record.ref, left)
        self._emitter = emitter = Emitter(self.fleet, self.lease)
        try:
            if record.began_ms:
                await self._recover(emitter, record, files)
            self._guard = self._guarded(record)
            if self._guard is not None and not _was_said(files, record, type="policy_applied"):
                await emitter.emit(self._guard.applied())
            if self.number > self.fleet.config.turns.attempts:
                return crashed(self.number - 1)
            record, prompt = await self._begin(emitter, record, files)
            return await self._with_retries(emitter, record, prompt, files)
        finally:
            emitter.close()

    def _guarded(self, record: Record) -> Guard | None:
        """Return the policy that the turn runs under; None when it is not guarded."""
        settings = record.settings
        if settings["permissions"] != "guarded":
            return None
        policy = parse_policy(settings["policy"], self.fleet.config.policy.rules)
        outbox = Path(settings["artifacts"]["source"]) if settings["artifacts"] else None
        return Guard(policy, record.agent, Path(record.work_folder), outbox)

    async def _recover(self, emitter: Emitter, record: Record, files: HostFiles) -> None:
        """Say what earlier attempts left unsaid: from the log, then from the agent's own transcript."""
        said = await emitter.recover()
        if record.prompted:
            recorded = self.runtime.load(record.agent).recorded
            for event in await asyncio.to_thread(recorded, self._request(record, "", files)):
                if isinstance(event, SaidEvent) and event.uid is not None and event.uid not in said:
                    await emitter.emit(items.from_event(event), event.uid)
        detail = f"Turn {self.lease.record.turn} was interrupted and goes on (attempt {self.number})."
        await emitter.emit(items.status("recovering", detail))

    async def _begin(self, emitter: Emitter, record: Record, files: HostFiles) -> tuple[Record, str]:
        """Return the record with the turn's items fixed, and the prompt they make."""
        inbox = await waiting(self.fleet, record.ref)
        self._given = [item for item in inbox if not record.began_ms or item["id"] in record.turn_items]
        self._began_ms = record.began_ms or await self.fleet.store.now_ms()
        self._newest = newest_time(self._given, record.turn_newest)
        self._ids = tuple(dict.fromkeys((*record.turn_items, *(item["id"] for item in self._given))))
        await self._give()
        said = "" if record.prompted else await self._said_by_persons(emitter, record, files)
        answer = await parked_answer(self.fleet, record.ref, self._gave)
        prompt = CONTINUE if record.prompted else "\n\n".join(text for text in (answer, said) if text)
        return replace(record, began_ms=self._began_ms), prompt

    async def _said_by_persons(self, emitter: Emitter, record: Record, files: HostFiles) -> str:
        """Return what the turn's items say, once their attachments are in the work folder."""
        inbox = record.settings["inbox"]
        fetched = await attachments.fetch(self.fleet.platform, self.at, Path(record.work_folder), inbox, self._given)
        self._images = fetched.images
        if fetched.unavailable and not _was_said(files, record, status=UNAVAILABLE):
            await emitter.emit(items.status(UNAVAILABLE, "; ".join(fetched.unavailable)))
        return prompt_of(self._given, fetched.words)

    async def _gave(self, item: Json) -> None:
        """Count an item that answered a question among those that this turn was given."""
        self._newest = newest_time([item], self._newest)
        self._ids = (*self._ids, item["id"])
        await self._give()

    async def _give(self) -> None:
        await self._note(began_ms=self._began_ms, turn_items=self._ids, turn_newest=self._newest)

    async def _note(self, **changes: Any) -> None:
        if not await self.fleet.records.set_held(self.lease.record, self.lease.token, **changes):
            raise LeaseLostError(f"turn {self.lease.record.turn} of {self.lease.record.ref} was taken over")

    async def _with_retries(self, emitter: Emitter, record: Record, prompt: str, files: HostFiles) -> Outcome:
        """Run the agent, and resume it where its model's service failed for a moment (protocol §3.7)."""
        retries = self.fleet.config.agents[record.agent].turn_retries
        pause = RETRY_PAUSE_S
        for retry in range(retries + 1):
            ended, record = await self._stream(emitter, record, prompt, files)
            if ended.ok:
                return Outcome("completed")
            if not ended.transient or retry == retries:
                return Outcome("failed", ended.error)
            detail = f"{ended.error}. Resuming in {pause:g} s ({retry + 1} of {retries})."
            await emitter.emit(items.status("retrying", detail))
            await asyncio.sleep(pause)
            pause *= RETRY_FACTOR
            prompt = CONTINUE if record.prompted else prompt
        raise AssertionError("the last retry returns")

    async def _stream(self, emitter: Emitter, record: Record, prompt: str, files: HostFiles) -> tuple[Ended, Record]:
        agent = self.runtime.load(record.agent)
        configured = self.fleet.config.agents[record.agent]
        hold_s = 0.0 if configured.wait == "parked" else configured.hold_s
        host = Asker(self.fleet, self.lease, emitter, record.settings["permissions"], hold_s, self._gave, self._guard)
        async with aclosing(agent.turn(self._request(record, prompt, files), host)) as events:
            async for event in events:
                match event:
                    case Ended():
                        return event, record
                    case Usage():
                        self.tokens = _sum(self.tokens, event)
                    case SessionStarted(session_id):
                        record = replace(record, agent_session=session_id, prompted=True)
                        await self._note(agent_session=session_id, prompted=True)
                        checkpoint_of(record).write(files.checkpoint)
                    case _:
                        await emitter.emit(items.from_event(event), event.uid)
        raise AgentDiedError("the agent said nothing of how its turn ended")

    def _request(self, record: Record, prompt: str, files: HostFiles) -> TurnRequest:
        settings = record.settings
        configured = self.fleet.config.agents[record.agent]
        return TurnRequest(
            work_folder=Path(record.work_folder),
            prompt=prompt,
            turn=record.turn,
            session_id=record.agent_session or None,
            permissions=settings["permissions"],
            state_dir=files.agent_state,
            process_file=files.process,
            env=agent_environment(os.environ, configured.env),
            executable=settings["executable"],
            model=settings["model"],
            effort=settings["effort"],
            options={"script": str(configured.script)} if configured.script else {},
            images=() if record.prompted else self._images,
        )


def _was_said(files: HostFiles, record: Record, **metadata: str) -> bool:
    """Whether an attempt of the turn has said an item with this metadata."""
    said = files.said(record.epoch, record.turn)
    return any(metadata.items() <= entry["item"]["metadata"].items() for entry in said)


def _sum(total: Usage, more: Usage) -> Usage:
    return Usage(
        total.input_tokens + more.input_tokens,
        total.input_tokens_cached + more.input_tokens_cached,
        total.output_tokens + more.output_tokens,
    )
