"""The open prompt of a thread: at most one, answered by the next item of a person (protocol §4, interactive prompts).

Key `NS:{SESSION}:prompt:ALIAS` (hash): `id`, `kind`, `questions` (JSON), `subject` (of an approval), `state` (open or
answered), `parked` (1: no process waits for the answer, it starts a new turn), `item` and `answer` (id and JSON of the
item that answered), `taken` (token of the lease under which the agent got the answer). Written by the turn under its
lease, answered by whoever takes in the thread's items, deleted by the turn's end.
Key `NS:{SESSION}:grant:ALIAS` (string): a call that a person approved while it was parked, for one retry; written and
deleted by the turn under its lease.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from fleet import items
from fleet.events import PromptKind, Question, ToolCall
from fleet.journal import Journal, item_draft
from fleet.refs import ThreadRef
from fleet.store import Store

Json = dict[str, Any]

#: Keys of a tool's input that name what the call is about, the first that is there.
SUBJECT_KEYS = ("command", "file_path", "notebook_path", "path", "url")


def subject_of(call: ToolCall) -> str:
    """Return what a call is about: its command or path, else its whole input. A grant is bound to it and the tool."""
    if isinstance(call.input, dict):
        for key in SUBJECT_KEYS:
            value = call.input.get(key)
            if isinstance(value, str) and value:
                return f"{call.name} {value}"
    return f"{call.name} {json.dumps(call.input, sort_keys=True, default=str)}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it stands. `subject`: what an approval is about. `answer`: the item that answered, if one has."""

    id: str
    kind: PromptKind
    questions: tuple[Question, ...]
    subject: str = ""
    parked: bool = False
    answer: Json | None = None
    taken: str = ""

    def asks(self, kind: PromptKind, questions: tuple[Question, ...]) -> bool:
        """Whether this is the same question."""
        return (self.kind, self.questions) == (kind, questions)


def new_prompt(kind: PromptKind, questions: tuple[Question, ...], subject: str) -> Prompt:
    """Return a prompt that nobody has seen yet."""
    return Prompt(secrets.token_hex(8), kind, questions, subject)


def prompt_of_item(item: Json) -> Prompt | None:
    """Read a prompt back from its own item; None when the item is no `pending_prompt`."""
    metadata = item.get("metadata") or {}
    prompt = metadata.get("prompt")
    if metadata.get("type") != "pending_prompt" or not isinstance(prompt, dict):
        return None
    questions = tuple(
        Question(
            str(asked.get("question", "")),
            str(asked.get("header", "")),
            tuple((str(o.get("label", "")), str(o.get("description", ""))) for o in asked.get("options", [])),
            bool(asked.get("multiSelect")),
        )
        for asked in prompt.get("questions", [])
    )
    return Prompt(str(prompt.get("prompt_id")), prompt["kind"], questions, str(prompt.get("subject", "")), parked=True)


class Prompts:
    """Reads and changes the open prompts of threads."""

    def __init__(self, store: Store, journal: Journal) -> None:
        self._store = store
        self._journal = journal

    async def read(self, ref: ThreadRef) -> Prompt | None:
        """Return a thread's prompt, open or answered; None when there is none."""
        fields = await self._store.hash(self._store.thread(ref).prompt)
        if "id" not in fields:
            return None
        questions = tuple(
            Question(q["question"], q["header"], tuple((o[0], o[1]) for o in q["options"]), q["multi_select"])
            for q in json.loads(fields["questions"])
        )
        kind: Any = fields["kind"]
        return Prompt(
            fields["id"],
            kind,
            questions,
            fields["subject"],
            fields.get("parked") == "1",
            json.loads(fields["answer"]) if "answer" in fields else None,
            fields.get("taken", ""),
        )

    async def open(self, ref: ThreadRef, prompt: Prompt) -> None:
        """Make `prompt` the thread's open one."""
        key = self._store.thread(ref).prompt
        fields = {
            "id": prompt.id,
            "kind": prompt.kind,
            "questions": json.dumps([asdict(question) for question in prompt.questions]),
            "subject": prompt.subject,
            "parked": "1" if prompt.parked else "",
            "state": "open",
        }
        async with self._store.redis.pipeline() as pipe:
            pipe.delete(key)
            pipe.hset(key, items=[part for pair in fields.items() for part in pair])
            await pipe.execute()

    async def answer(self, ref: ThreadRef, item: Json) -> bool:
        """Give a person's item to the thread's open prompt. Returns whether it is its answer."""
        keys = self._store.thread(ref)
        return bool(await self._store.run("prompt_answer", [keys.prompt, keys.seen], [item["id"], json.dumps(item)]))

    async def park(self, ref: ThreadRef, prompt: Prompt) -> bool:
        """Park an open prompt. Returns False when it has been answered in this moment."""
        return bool(await self._store.run("prompt_park", [self._store.thread(ref).prompt], [prompt.id]))

    async def take(self, ref: ThreadRef, token: str) -> None:
        """Note under which lease the agent gets the answer: a later attempt may need it again."""
        await self._store.put(self._store.thread(ref).prompt, {"taken": token})

    async def forget(self, ref: ThreadRef) -> None:
        """Delete a thread's prompt and grant: the turn that was given the answer has ended."""
        keys = self._store.thread(ref)
        await self._store.redis.delete(keys.prompt, keys.grant)

    async def resolve(self, ref: ThreadRef, prompt: Prompt, item: items.Item) -> bool:
        """Say, once per prompt, how it was resolved. Returns whether a drainer must be called."""
        return await self._journal.append_once(ref, f"prompt:{prompt.id}", item_draft(item))

    async def cancel(self, ref: ThreadRef, reason: str) -> bool:
        """Cancel a thread's prompt, if it has one. Returns whether a drainer must be called."""
        prompt = await self.read(ref)
        if prompt is None:
            return False
        item = items.prompt_closed(prompt.id, prompt.kind, "cancelled", reason)
        call = await self.resolve(ref, prompt, item) if prompt.answer is None else False
        await self.forget(ref)
        return call

    async def grant(self, ref: ThreadRef, subject: str) -> None:
        """Let the next call about `subject` through, once."""
        await self._store.redis.set(self._store.thread(ref).grant, subject)

    async def spend_grant(self, ref: ThreadRef, subject: str) -> bool:
        """Use up the grant for `subject`. Returns False when there is none."""
        key = self._store.thread(ref).grant
        return await self._store.redis.get(key) == subject and bool(await self._store.redis.delete(key))
