"""Questions of a thread as a person meets them: which one is open, what words answer it, the item that says so.

The fleet's own side of this is `fleet.prompts` and `fleet.answers` (protocol §4, interactive prompts).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fleet.answers import read_answer
from fleet.errors import FleetError
from fleet.events import Answer, Question
from fleet.prompts import Prompt, prompt_of_item

Json = dict[str, Any]

#: Words that can only mean numbers of options.
_NUMBERS = re.compile(r"[\d\s,]+")


@dataclass(slots=True)
class QuestionWatch:
    """Follows a thread's items, oldest first, and knows which question is open.

    `worker` is the user whose questions count: nobody waits for an answer to what others write in the form of one.
    While no worker is known, None, every item that is not a person's counts.
    """

    worker: str | None
    open: Prompt | None = None

    def see(self, items: Iterable[Json]) -> None:
        """Take in the next items."""
        for item in items:
            if not self._is_workers(item):
                self.open = None  # the next item of a person is the answer, whatever it says
            elif (asked := asked_in(item)) is not None:
                self.open = asked
            elif self.open is not None and _ends(item, self.open):
                self.open = None

    def _is_workers(self, item: Json) -> bool:
        return item.get("user_id") == self.worker if self.worker else "type" in _metadata(item)


def asked_in(item: Mapping[str, Any]) -> Prompt | None:
    """Return the question that an item asks; None when it asks none, or not in the protocol's form."""
    try:
        prompt = prompt_of_item(dict(item))
    except (AttributeError, KeyError, TypeError):
        return None
    return prompt if prompt is not None and prompt.questions else None


def picked(question: Question, words: str) -> tuple[str, ...]:
    """Return what `words` answer, read as the fleet reads them: labels of options, else the words themselves.

    Raises:
        FleetError: `argument_invalid`, they are empty, or numbers that pick no option.
    """
    words = words.strip()
    if not words:
        raise FleetError("argument_invalid", "the answer is empty")
    item = {"content": [{"type": "text", "text": words}]}
    chosen = read_answer("ask_user_question", (question,), item).answers[0]
    labels = {label for label, _ in question.options}
    if labels and not labels.issuperset(chosen) and _NUMBERS.fullmatch(words):
        how_many = "one or more" if question.multi_select else "one"
        raise FleetError("argument_invalid", f"{words} is not {how_many} of the {len(labels)} options")
    return chosen


def answering(questions: tuple[Question, ...], answer: Answer) -> Json:
    """Return the item of a person's answer: `metadata.answers` for programs, a line for each question for people."""
    pairs = list(zip(questions, answer.answers, strict=True))
    lines = [", ".join(given) for _, given in pairs]
    if len(lines) > 1:
        lines = [" ".join(line.split()) for line in lines]
    answers = [{"question": question.question, "answer": list(given)} for question, given in pairs]
    return {"content": [{"type": "text", "text": "\n".join(lines)}], "metadata": {"answers": answers}}


def _ends(item: Json, prompt: Prompt) -> bool:
    """Tell whether an item of the worker says that nobody waits for an answer to `prompt` any more."""
    metadata = _metadata(item)
    if metadata.get("type") == "turn_end":
        return True
    if metadata.get("type") != "pending_prompt_resolved":
        return False
    resolved = metadata.get("prompt")
    return isinstance(resolved, Mapping) and resolved.get("prompt_id") == prompt.id


def _metadata(item: Json) -> Mapping[str, Any]:
    metadata = item.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}
