"""What a running turn offers its agent (`fleet.events.TurnHost`): the permission gate, and questions to a person."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from fleet import items
from fleet.answers import approval, approval_question, in_words, read_answer
from fleet.context import Fleet
from fleet.emitter import Emitter, LeaseLostError, RedisBehindError
from fleet.events import Answer, Decision, Permissions, PromptKind, Question, ToolCall
from fleet.leases import WATCH_S, Lease
from fleet.policy import Policy, Verdict, evaluate
from fleet.prompts import Prompt, new_prompt, subject_of
from fleet.refs import ThreadRef

#: Called with each item that answered a question.
Gave = Callable[[items.Item], Awaitable[None]]


class ParkedError(Exception):
    """A question was held for long enough: the turn gives its place back, and the answer starts a new one."""


@dataclass(frozen=True, slots=True)
class Guard:
    """The policy of a guarded turn, and what it is about."""

    policy: Policy
    agent_type: str
    work_folder: Path
    outbox: Path | None

    def verdict(self, call: ToolCall) -> Verdict:
        """Judge a call; looks at the file system."""
        return evaluate(self.policy, self.agent_type, call, self.work_folder, self.outbox)

    def applied(self) -> items.Item:
        """Return the item that says which policy is in force."""
        rules = ({"id": rule.id, "origin": rule.origin, "action": rule.action} for rule in self.policy.rules)
        return items.policy_applied(rules, self.policy.default)


class Asker:
    """Asks for one turn, as the holder of its lease.

    `hold_s`: seconds for which the agent's process waits for an answer. `gave` is told of each item that answered.
    `grants`: calls that were approved while they were parked, each for one retry, and by which user. `spent`: ids of
    items that were said for something else, and so answer nothing.
    """

    def __init__(
        self,
        fleet: Fleet,
        lease: Lease,
        emitter: Emitter,
        permissions: Permissions,
        hold_s: float,
        gave: Gave,
        guard: Guard | None = None,
        *,
        grants: dict[str, str] | None = None,
        spent: Collection[str] = (),
    ) -> None:
        self._fleet = fleet
        self._ref = lease.record.ref
        self._epoch, self._token = lease.record.epoch, lease.token
        self._emitter = emitter
        self._permissions = permissions
        self._hold_s = hold_s
        self._gave = gave
        self._guard = guard
        self._grants = grants if grants is not None else {}
        self._spent = spent
        self._one_at_a_time = asyncio.Lock()

    async def permit(self, call: ToolCall) -> Decision:
        """Decide whether a call may run: always when autonomous, by the policy when guarded, else a person decides."""
        if self._permissions == "autonomous":
            return Decision(allow=True)
        if self._guard is not None:
            verdict = await asyncio.to_thread(self._guard.verdict, call)
            if verdict.action == "allow":
                return Decision(allow=True)
            if verdict.action == "deny":
                return await self._denied(verdict)
        subject = subject_of(call)
        if subject in self._grants:
            await self._emitter.emit(items.approval_granted(subject, self._grants.pop(subject)))
            return Decision(allow=True)
        brief = items.tool_call(call.invocation_id, call.name, call.input)["content"][0]["text"]
        return approval(await self._ask("approval", (approval_question(brief),), subject))

    async def _denied(self, verdict: Verdict) -> Decision:
        """Say that the policy denies a call, before its refusal reaches the agent."""
        rule = verdict.rule_id or verdict.origin
        await self._emitter.emit(items.policy_denied(rule, verdict.effect or "", verdict.detail))
        return Decision(allow=False, message=f"Blocked by policy rule '{rule}': {verdict.reason}")

    async def ask(self, kind: PromptKind, questions: tuple[Question, ...]) -> Answer:
        """Ask a person and wait for the answer.

        Raises:
            ParkedError: nobody has answered for as long as the agent's process may wait.
        """
        return await self._ask(kind, questions, "")

    async def _ask(self, kind: PromptKind, questions: tuple[Question, ...], subject: str) -> Answer:
        async with self._one_at_a_time:
            prompt = await self._opened(kind, questions, subject)
            item = await self._answered(prompt)
            answer = read_answer(kind, questions, item)
            await resolve_answered(self._fleet, self._emitter, self._ref, prompt, answer)
            await self._gave(item)
            await self._fleet.prompts.take(self._ref, self._token)
            return answer

    async def _opened(self, kind: PromptKind, questions: tuple[Question, ...], subject: str) -> Prompt:
        """Return the prompt of this question: the one that an interrupted attempt left, or a new one."""
        prompts = self._fleet.prompts
        left = await prompts.read(self._ref)
        if left is not None and left.asks(kind, questions) and left.taken != self._token:
            if not left.parked and not self._emitter.has_said_prompt(left.id):
                await self._emitter.emit(items.pending_prompt(left.id, kind, questions, left.subject))
            return left
        if left is not None and left.answer is None:
            await prompts.cancel(self._ref, "superseded by a newer question")
        prompt = new_prompt(kind, questions, subject)
        # Opened before it is said: a question that persons see and nobody knows of would be asked again, as another.
        if not await prompts.open(self._ref, prompt, self._token):
            raise LeaseLostError(f"a question in {self._ref} was taken over")
        await self._emitter.emit(items.pending_prompt(prompt.id, kind, questions, subject))
        return prompt

    async def _answered(self, prompt: Prompt) -> items.Item:
        """Wait for the item that answers `prompt`.

        Raises:
            ParkedError: nobody has answered for as long as the agent's process may wait.
            RedisBehindError: Redis has lost the prompt.
        """
        deadline = time.monotonic() + self._hold_s
        while True:
            now = await self._fleet.prompts.read(self._ref)
            if now is None or now.id != prompt.id:
                # Where a new epoch was claimed, it was cancelled. Else the answer may have come already, as a message.
                if (await self._fleet.records.read(self._ref)).epoch == self._epoch:
                    raise RedisBehindError(f"the open question of {self._ref} is forgotten")
            elif now.answer is not None:
                if now.answer["id"] not in self._spent:
                    return now.answer
                await self._fleet.prompts.reopen(self._ref)
            if time.monotonic() >= deadline and await self._fleet.prompts.park(self._ref, prompt):
                raise ParkedError(f"a question of kind {prompt.kind} is parked")
            await asyncio.sleep(WATCH_S)


async def resolve_answered(fleet: Fleet, emitter: Emitter, ref: ThreadRef, prompt: Prompt, answer: Answer) -> None:
    """Say that a prompt was answered, once, before the answer counts as consumed."""
    said = emitter.has_said_prompt(prompt.id, "pending_prompt_resolved")
    if not said and not await fleet.prompts.is_resolved(ref, prompt.id):
        await emitter.emit(items.prompt_answered(prompt.id, prompt.kind, prompt.questions, answer))
        await fleet.prompts.was_resolved(ref, prompt.id)


async def parked_answer(
    fleet: Fleet, emitter: Emitter, ref: ThreadRef, gave: Gave, grants: dict[str, str], spent: Collection[str]
) -> str:
    """Return what the agent is told of the answer to its parked prompt, and grant what was approved; "" without one.

    For `grants` and `spent` see `Asker`.
    """
    prompt = await fleet.prompts.read(ref)
    if prompt is None or not prompt.parked or prompt.answer is None:
        return ""
    if prompt.answer["id"] in spent:
        await fleet.prompts.reopen(ref)
        return ""
    answer = read_answer(prompt.kind, prompt.questions, prompt.answer)
    await resolve_answered(fleet, emitter, ref, prompt, answer)
    await gave(prompt.answer)
    if prompt.kind == "approval" and approval(answer).allow:
        grants[prompt.subject] = str(prompt.answer.get("user_id", ""))
    return in_words(prompt.kind, prompt.questions, answer)
