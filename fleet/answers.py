"""What a person's item answers to a question, and how answers are put into words (protocol §4, interactive prompts)."""

from __future__ import annotations

import re
from typing import Any

from fleet.events import Answer, Decision, PromptKind, Question

Json = dict[str, Any]

#: Plain answers that approve, exactly, after strip and lower; anything else denies.
APPROVALS = frozenset({"approve", "approved", "yes", "y", "ok", "allow", "1"})
APPROVE, DENY = "Approve", "Deny"


def read_answer(kind: PromptKind, questions: tuple[Question, ...], item: Json) -> Answer:
    """Return what a person's item answers. `metadata.answers` wins over the text.

    A number or a label picks an option, several for multi-select, comma or space separated; else it is free text. Of
    several questions each is answered by a line of its own.
    """
    structured = _structured(questions, item.get("metadata"))
    if structured is not None:
        return structured
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


def approval_question(brief: str) -> Question:
    """Return the question whether a call, in brief, may run."""
    return Question(f"Allow {brief}?", "Approval", ((APPROVE, ""), (DENY, "")))


def in_words(kind: PromptKind, questions: tuple[Question, ...], answer: Answer) -> str:
    """Return what an agent is told when it is resumed with the answer to a question that it was parked on."""
    if kind == "approval":
        decision = approval(answer)
        asked = questions[0].question.removeprefix("Allow ").removesuffix("?")
        if decision.allow:
            return f"The user approved this call: {asked}. Make it again now."
        return f"{decision.message} It was about this call: {asked}. Do not make it; go on without it."
    pairs = (
        f"{question.question}\n{', '.join(given)}" for question, given in zip(questions, answer.answers, strict=False)
    )
    return "The user answered your question.\n\n" + "\n\n".join(pairs)


def _structured(questions: tuple[Question, ...], metadata: object) -> Answer | None:
    """Return `metadata.answers` when it has an answer for each question."""
    answers = metadata.get("answers") if isinstance(metadata, dict) else None
    if not isinstance(answers, list) or len(answers) != len(questions):
        return None
    given = [_strings(entry.get("answer")) for entry in answers if isinstance(entry, dict)]
    return Answer(tuple(given)) if len(given) == len(questions) and all(given) else None


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
