"""The open prompt of a thread: at most one, answered by the next item of a person (protocol §4, interactive prompts).

Key `NS:{SESSION}:prompt:ALIAS` (hash): `id`, `asked` (JSON of `kind`, `questions` and `subject`, sealed), `state`
(open or answered), `parked` (1: no process waits for the answer, it starts a new turn), `item` and `answer` (id and
sealed JSON of the item that answered), `taken` (token of the lease under which the agent got the answer). Written by
the turn under its lease, answered by whoever takes in the thread's items, deleted by the turn's end. An answer is
sealed for its prompt; a prompt that does not open is none, and an answer that does not is taken away.
"""

from __future__ import annotations

import json
import logging
import secrets
from dataclasses import asdict, dataclass
from typing import Any

from fleet import items
from fleet.events import PromptKind, Question, ToolCall
from fleet.inbox import read_again
from fleet.journal import Journal, item_draft
from fleet.refs import ThreadRef
from fleet.signing import Seal, TamperedError
from fleet.store import Store

Json = dict[str, Any]

log = logging.getLogger(__name__)

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

    def __init__(self, store: Store, journal: Journal, seal: Seal) -> None:
        self._store = store
        self._journal = journal
        self._seal = seal

    async def read(self, ref: ThreadRef) -> Prompt | None:
        """Return a thread's prompt, open or answered; None when there is none."""
        fields = await self._store.hash(self._store.thread(ref).prompt)
        if "id" not in fields:
            return None
        try:
            asked = json.loads(self._seal.open(_asked_in(ref, fields["id"]), fields["asked"]))
        except TamperedError as error:
            log.warning("%s: the open prompt is passed over: %s", ref, error)
            return None
        questions = tuple(
            Question(q["question"], q["header"], tuple((o[0], o[1]) for o in q["options"]), q["multi_select"])
            for q in asked["questions"]
        )
        return Prompt(
            fields["id"],
            asked["kind"],
            questions,
            asked["subject"],
            fields.get("parked") == "1",
            await self._opened_answer(ref, fields),
            fields.get("taken", ""),
        )

    async def _opened_answer(self, ref: ThreadRef, fields: dict[str, str]) -> Json | None:
        if "answer" not in fields:
            return None
        try:
            answer: Json = json.loads(self._seal.open(_answer_of(ref, fields["id"]), fields["answer"]))
        except TamperedError as error:
            log.warning("%s: the answer to a prompt is dropped: %s", ref, error)
            await self.reopen(ref)
            await read_again(self._store, ref, fields.get("item", ""))
            return None
        return answer

    async def reopen(self, ref: ThreadRef) -> None:
        """Take the answer to a thread's prompt away: nobody has given it."""
        key = self._store.thread(ref).prompt
        async with self._store.redis.pipeline() as pipe:
            pipe.hset(key, "state", "open")
            pipe.hdel(key, "item", "answer")
            await pipe.execute()

    async def open(self, ref: ThreadRef, prompt: Prompt, token: str = "") -> bool:
        """Make `prompt` the thread's open one. Returns False when the lease `token` is somebody else's by now."""
        keys = self._store.thread(ref)
        asked = {
            "kind": prompt.kind,
            "questions": [asdict(question) for question in prompt.questions],
            "subject": prompt.subject,
        }
        fields = {
            "id": prompt.id,
            "asked": self._seal.seal(_asked_in(ref, prompt.id), json.dumps(asked)),
            "parked": "1" if prompt.parked else "",
            "state": "open",
        }
        pairs = [part for pair in fields.items() for part in pair]
        return bool(await self._store.run("prompt_open", [keys.prompt, keys.lease], [token, *pairs]))

    async def answer(self, ref: ThreadRef, item: Json) -> bool:
        """Give a person's item to the thread's open prompt. Returns whether it is its answer."""
        keys = self._store.thread(ref)
        id_ = await self._store.redis.hget(keys.prompt, "id")
        if id_ is None:
            return False
        answer = self._seal.seal(_answer_of(ref, str(id_)), json.dumps(item))
        return bool(await self._store.run("prompt_answer", [keys.prompt, keys.seen], [item["id"], answer, str(id_)]))

    async def park(self, ref: ThreadRef, prompt: Prompt) -> bool:
        """Park an open prompt. Returns False when it has been answered in this moment."""
        return bool(await self._store.run("prompt_park", [self._store.thread(ref).prompt], [prompt.id]))

    async def take(self, ref: ThreadRef, token: str) -> None:
        """Note under which lease the agent gets the answer: a later attempt may need it again."""
        await self._store.put(self._store.thread(ref).prompt, {"taken": token})

    async def forget(self, ref: ThreadRef) -> None:
        """Delete a thread's prompt: the turn that was given the answer has ended."""
        await self._store.redis.delete(self._store.thread(ref).prompt)

    async def resolve(self, ref: ThreadRef, prompt: Prompt, item: items.Item, epoch: int | None = None) -> bool:
        """Say, once per prompt and only in `epoch`, how it was resolved. Returns whether a drainer must be called."""
        return await self._journal.append_once(ref, _resolved(prompt.id), item_draft(item), epoch=epoch)

    async def is_resolved(self, ref: ThreadRef, prompt_id: str) -> bool:
        """Whether it was said how a prompt was resolved."""
        cause = _resolved(prompt_id)
        return await self._store.redis.zscore(self._store.thread(ref).causes, cause) is not None

    async def was_resolved(self, ref: ThreadRef, prompt_id: str) -> None:
        """Note that it was said how a prompt was resolved."""
        await self._journal.was_appended(ref, _resolved(prompt_id))

    async def cancel(self, ref: ThreadRef, reason: str) -> bool:
        """Cancel a thread's prompt, if it has one. Returns whether a drainer must be called."""
        call = await self.say_cancelled(ref, reason)
        await self.forget(ref)
        return call

    async def say_cancelled(self, ref: ThreadRef, reason: str, epoch: int | None = None) -> bool:
        """Say that a thread's prompt, if it has one without an answer, is cancelled. Returns as `resolve`."""
        prompt = await self.read(ref)
        if prompt is None or prompt.answer is not None:
            return False
        return await self.resolve(ref, prompt, items.prompt_closed(prompt.id, prompt.kind, "cancelled", reason), epoch)


def _resolved(prompt_id: str) -> str:
    return f"prompt:{prompt_id}"


def _asked_in(ref: ThreadRef, id_: str) -> str:
    return f"prompt {ref} {id_}"


def _answer_of(ref: ThreadRef, id_: str) -> str:
    return f"answer {ref} {id_}"
