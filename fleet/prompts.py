"""Questions of an agent that a person answers in the thread (protocol §4, interactive prompts)."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from contextlib import suppress
from typing import Any

from fleet import items
from fleet.context import Fleet
from fleet.emitter import Emitter, LeaseLostError
from fleet.events import Answer, Decision, Permissions, PromptKind, Question, ToolCall
from fleet.leases import WATCH_S, Lease
from fleet.refs import ThreadRef

Json = dict[str, Any]

#: Plain answers that approve, exactly, after strip and lower; anything else denies.
APPROVALS = frozenset({"approve", "approved", "yes", "y", "ok", "allow", "1"})
APPROVE, DENY = "Approve", "Deny"


def read_answer(kind: PromptKind, questions: tuple[Question, ...], item: Json) -> Answer:
    """Return what a person's item answers. `metadata.answers` wins over the text.

    A number or a label picks an option, several for multi-select, comma or space separated; else it is free text.
    """
    metadata = item.get("metadata")
    structured = metadata.get("answers") if isinstance(metadata, dict) else None
    if isinstance(structured, list) and len(structured) == len(questions):
        given = [_strings(entry.get("answer")) for entry in structured if isinstance(entry, dict)]
        if len(given) == len(questions) and all(given):
            return Answer(tuple(given))
    text = _text(item).strip()
    if kind != "ask_user_question":
        return Answer(((text,),))
    lines = text.splitlines() if len(questions) > 1 else [text]
    padded = lines + [""] * (len(questions) - len(lines))
    return Answer(tuple(_picked(question, line.strip()) for question, line in zip(questions, padded, strict=False)))


def approval(answer: Answer) -> Decision:
    """Return the decision that an answer to an approval prompt is; the words of a denial are its reason."""
    words = answer.answers[0][0] if answer.answers and answer.answers[0] else ""
    if words.strip().lower() in APPROVALS:
        return Decision(allow=True)
    return Decision(allow=False, message=f"The user denied this: {words}" if words else "The user denied this.")


def _strings(value: object) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(entry for entry in values if isinstance(entry, str))


def _text(item: Json) -> str:
    blocks = item.get("content")
    texts = (block.get("text") for block in blocks if isinstance(block, dict)) if isinstance(blocks, list) else ()
    return "\n".join(text for text in texts if isinstance(text, str))


def _picked(question: Question, text: str) -> tuple[str, ...]:
    whole = _option(question, text)
    if whole is not None:
        return (whole,)
    if question.multi_select:
        for separator in (r"\s*,\s*", r"[\s,]+"):
            parts = [_option(question, part) for part in re.split(separator, text) if part]
            if parts and all(parts):
                return tuple(dict.fromkeys(part for part in parts if part))
    return (text,)


def _option(question: Question, text: str) -> str | None:
    labels = [label for label, _ in question.options]
    if text.isascii() and text.isdigit() and 1 <= int(text) <= len(labels):
        return labels[int(text) - 1]
    return next((label for label in labels if label.lower() == text.lower()), None)


async def answer_open(fleet: Fleet, ref: ThreadRef, item: Json) -> bool:
    """Give a person's item to the thread's open prompt. Returns whether it was its answer."""
    keys = fleet.store.thread(ref)
    return bool(await fleet.store.run("prompt_answer", [keys.prompt, keys.seen], [item["id"], json.dumps(item)]))


class Asker:
    """What a running turn offers its agent: the permission gate, and questions to a person."""

    def __init__(self, fleet: Fleet, lease: Lease, emitter: Emitter, permissions: Permissions) -> None:
        self._fleet = fleet
        self._lease = lease
        self._emitter = emitter
        self._permissions = permissions
        self._one_at_a_time = asyncio.Lock()

    async def permit(self, call: ToolCall) -> Decision:
        """Decide whether a tool call may run: always when autonomous, else a person says so."""
        if self._permissions == "autonomous":
            return Decision(allow=True)
        brief = items.tool_call(call.invocation_id, call.name, call.input)["content"][0]["text"]
        question = Question(f"Allow {brief}?", "Approval", ((APPROVE, ""), (DENY, "")))
        return approval(await self.ask("approval", (question,)))

    async def ask(self, kind: PromptKind, questions: tuple[Question, ...]) -> Answer:
        """Post a prompt, wait for the next item of a person, and post that it is resolved."""
        async with self._one_at_a_time:
            prompt_id = secrets.token_hex(8)
            await self._emitter.emit(items.pending_prompt(prompt_id, kind, questions))
            key = self._fleet.store.thread(self._lease.record.ref).prompt
            await self._fleet.store.redis.hset(key, mapping={"id": prompt_id, "state": "open"})
            try:
                item = await self._answered(key)
            except asyncio.CancelledError:
                with suppress(LeaseLostError):
                    await self._emitter.emit(items.prompt_closed(prompt_id, kind, "cancelled", "the turn was stopped"))
                raise
            finally:
                await self._fleet.store.redis.delete(key)
            answer = read_answer(kind, questions, item)
            await self._emitter.emit(items.prompt_answered(prompt_id, kind, questions, answer))
            return answer

    async def _answered(self, key: str) -> Json:
        while True:
            answer = await self._fleet.store.redis.hget(key, "answer")
            if answer is not None:
                item: Json = json.loads(answer)
                return item
            await asyncio.sleep(WATCH_S)
