"""Thread items: one pure builder per `metadata.type` (protocol §4).

An item is `{"content": [{"type": "text", "text": BRIEF}], "metadata": {"type": TYPE, ...}}`. Builders never raise:
what JSON or UTF-8 can't carry is replaced. Only the fields that `fleet.truncation` can excerpt keep their whole length;
every other text that an agent or a person chose is bounded here, so that it can't push an item over the budget.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from fleet.events import (
    AgentEvent,
    Answer,
    Injected,
    PromptKind,
    Question,
    Status,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)

if TYPE_CHECKING:
    from fleet.artifacts import Published

Item = dict[str, Any]
AuditType = Literal[
    "attached",
    "detached",
    "thread_registered",
    "thread_removed",
    "thread_active",
    "thread_recovered",
    "thread_failed",
    "thread_completed",
]

#: `status` of the `turn_end` of a turn that ended well.
TURN_COMPLETED = "completed"

#: Characters of a call's command or a result's first line in a brief.
TOOL_BRIEF = 80
#: Characters of the agent's reasoning in a brief.
THINKING_BRIEF = 120
#: Characters of any other one-line brief.
LINE_BRIEF = 200

#: Entries of `aliases` and of `skipped` in one `artifacts_published`.
ARTIFACTS_SHOWN = 100
#: Rules in one `policy_applied`.
RULES_SHOWN = 100
#: Bytes of JSON of a path or an error there, so that the lists at their longest stay within the budget.
PATH_BYTES = 256
#: Bytes of JSON of a detail, a question, an answer; of an option's label or description. Four questions with four
#: options each stay below the platform's lower cap of 60 KiB.
DETAIL_BYTES = 4096
OPTION_BYTES = 512

#: Levels of nesting that an item may have; JSON readers commonly give up at a few hundred.
MAX_DEPTH = 100
#: Bits of an integer that is written as digits; Python itself refuses to write more than 4,300 digits.
MAX_INTEGER_BITS = 1024

_STATS = ("input_tokens", "input_tokens_cached", "output_tokens", "duration_ms")


def from_event(event: AgentEvent) -> Item | None:
    """Return the item that an agent's event becomes; None for an event that posts nothing."""
    match event:
        case Text(text=text):
            return _whole_text("text", text)
        case Injected(text=text):
            return _whole_text("injected", text)
        case Thinking(text=text):
            return thinking(text)
        case ToolCall(invocation_id=invocation_id, name=name, input=input_):
            return tool_call(invocation_id, name, input_)
        case ToolResult(invocation_id=invocation_id, output=output, is_error=is_error):
            return tool_result(invocation_id, output, is_error=is_error)
        case Status(status=token, detail=detail):
            return status(token, detail)
        case _:
            return None


def thinking(text: str) -> Item | None:
    """Return the item of the agent's reasoning; None when there is none."""
    text = clean(text)
    if not text:
        return None
    brief = text if len(text) <= THINKING_BRIEF else f"{text[:THINKING_BRIEF]}…"
    return _item(f"[thinking] {brief}", "thinking", text=text, full_text_length=len(text))


def tool_call(invocation_id: str, name: str, input_: object) -> Item:
    """Return the item of a call: its brief is the command, else the input's JSON."""
    name, input_ = bounded(name, PATH_BYTES), sanitize(input_)
    brief = _one_line(name, TOOL_BRIEF)
    if input_ not in (None, {}, [], ""):
        command = input_.get("command") if isinstance(input_, dict) else None
        shown = command if isinstance(command, str) and command else json.dumps(input_, ensure_ascii=False)
        brief += f" → {_one_line(shown, TOOL_BRIEF)}"
    return _item(brief, "tool_call", tool={"name": name, "invocation_id": invocation_id, "input": input_})


def tool_result(invocation_id: str, output: str, *, is_error: bool) -> Item:
    """Return the item of a call's result: its brief is the first line, and how many there are."""
    lines = output.splitlines() or [""]
    count = f" ({len(lines)} lines)" if len(lines) > 1 else ""
    brief = f"→ {'error ' if is_error else ''}{lines[0][:TOOL_BRIEF]}{count}"
    tool = {"invocation_id": invocation_id, "is_error": is_error, "output": output}
    return _item(brief, "tool_result", tool=tool)


def status(token: str, detail: str = "") -> Item:
    """Return a status item: `token` for machines, a line made of both for people."""
    token, detail = bounded(token, PATH_BYTES), bounded(detail, DETAIL_BYTES)
    words = token.replace("_", " ").capitalize()
    return _item(
        _one_line(f"{words}: {detail}" if detail else words, LINE_BRIEF), "status", status=token, detail=detail
    )


def error(code: str, detail: str) -> Item:
    """Return the `status`/`error` item of a failing thread (protocol §3.5)."""
    detail = bounded(detail, DETAIL_BYTES)
    brief = _one_line(f"{code}: {detail}", LINE_BRIEF)
    return _item(brief, "status", status="error", code=code, detail=detail)


def turn_end(status: str, stats: Mapping[str, int], error: str = "") -> Item:
    """Return the marker of a turn's end; `status` is `TURN_COMPLETED` or why the turn ended otherwise.

    `stats` has `input_tokens` (cached ones included), `input_tokens_cached`, `output_tokens` and `duration_ms`; what is
    missing is 0.
    """
    brief = "Turn complete" if status == TURN_COMPLETED else f"Turn ended ({status})"
    details = {"error": bounded(error, DETAIL_BYTES)} if error else {}
    return _item(brief, "turn_end", status=status, stats={key: stats.get(key, 0) for key in _STATS}, **details)


def pending_prompt(prompt_id: str, kind: PromptKind, questions: Sequence[Question], subject: str = "") -> Item:
    """Return the item that asks a person: the questions, each with its options numbered from 1.

    `subject` is the call that an approval is about, so that the prompt can be read back from its item.
    """
    asked = [_question(question) for question in questions]
    brief = "\n\n".join(_question_brief(question) for question in asked)
    prompt = {"prompt_id": prompt_id, "kind": kind, "prompt_state": "pending", "questions": asked}
    if subject:
        prompt["subject"] = bounded(subject, DETAIL_BYTES)
    return _item(brief, "pending_prompt", prompt=prompt)


def prompt_answered(prompt_id: str, kind: PromptKind, questions: Sequence[Question], answer: Answer) -> Item:
    """Return the item of an answered prompt, with one entry of `answers` per question."""
    answers = [
        {
            "question": bounded(question.question, DETAIL_BYTES),
            "answer": [bounded(text, DETAIL_BYTES) for text in texts],
        }
        for question, texts in zip(questions, answer.answers, strict=False)
    ]
    brief = "; ".join(", ".join(entry["answer"]) for entry in answers)
    prompt = {"prompt_id": prompt_id, "kind": kind, "prompt_state": "answered", "answers": answers}
    return _item(_one_line(f"✓ Answered: {brief}", LINE_BRIEF), "pending_prompt_resolved", prompt=prompt)


def prompt_closed(prompt_id: str, kind: PromptKind, state: Literal["cancelled", "failed"], reason: str) -> Item:
    """Return the item of a prompt that nobody will answer, or whose answer did not reach the agent."""
    reason = bounded(reason, DETAIL_BYTES)
    prompt = {"prompt_id": prompt_id, "kind": kind, "prompt_state": state, "reason": reason}
    brief = _one_line(f"✗ {state.capitalize()}: {reason}", LINE_BRIEF)
    return _item(brief, "pending_prompt_resolved", prompt=prompt)


def artifacts_published(report: Published) -> Item:
    """Return the audit record of one turn's publishing."""
    details = {"error": report.error} if report.error else {}
    return _item(
        f"Published {report.published_count} artifact(s), skipped {report.skipped_count}",
        "artifacts_published",
        aliases=report.aliases,
        skipped=[{"path": skip.path, "reason": skip.reason} for skip in report.skipped],
        counts={"published": report.published_count, "skipped": report.skipped_count},
        **details,
    )


def policy_applied(rules: Iterable[Mapping[str, str]], default: str) -> Item:
    """Return the acknowledgement of a policy; `rules` have `id`, `origin` (worker or thread) and `action`, in order.

    The list is cut to `RULES_SHOWN` entries; then `counts` has the true number.
    """
    shown = [
        {"id": bounded(rule["id"], PATH_BYTES), "origin": rule["origin"], "action": rule["action"]} for rule in rules
    ]
    cut: dict[str, Any] = {"counts": {"rules": len(shown)}} if len(shown) > RULES_SHOWN else {}
    brief = f"Policy in force: {len(shown)} rule(s), default {default}"
    return _item(brief, "policy_applied", rules=shown[:RULES_SHOWN], default=default, **cut)


def policy_denied(rule: str, effect: str, detail: str) -> Item:
    """Return the item of one denied call; `detail` is its command, its path or its tool's name."""
    rule, detail = bounded(rule, PATH_BYTES), bounded(detail, DETAIL_BYTES)
    brief = _one_line(f"Blocked by policy rule '{rule}': {detail}", LINE_BRIEF)
    return _item(brief, "policy_denied", rule=rule, effect=effect, detail=detail)


def approval_granted(subject: str, granted_by: str) -> Item:
    """Return the item of a grant that lets one retried call through; `granted_by` is a user's id."""
    subject = bounded(subject, DETAIL_BYTES)
    return _item(
        _one_line(f"Approved: {subject}", LINE_BRIEF), "approval_granted", subject=subject, granted_by=granted_by
    )


def audit(
    type_: AuditType,
    alias: str = "",
    *,
    reason: str = "",
    agent_session_id: str | None = None,
    code: str = "",
    message: str = "",
) -> Item:
    """Return an item of the worker object's activity log (protocol §2).

    `reason` belongs to `detached`, `agent_session_id` to `thread_active`, `code` and `message` to `thread_failed`.
    """
    message = bounded(message, DETAIL_BYTES)
    details: dict[str, Any] = {"thread": {"alias": alias}} if alias else {}
    if type_ == "detached":
        details["reason"] = reason
    if type_ == "thread_active":
        details["agent_session_id"] = agent_session_id or None
    if type_ == "thread_failed":
        details["error"] = {"code": code, "message": message}
    words = type_.removeprefix("thread_")
    why = ": ".join(part for part in (reason, code, message) if part)
    brief = f"Thread {alias} {words}" if alias else words.capitalize()
    return _item(_one_line(f"{brief}: {why}" if why else brief, LINE_BRIEF), type_, **details)


def clean(text: str) -> str:
    """Return `text` with each lone surrogate replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def sanitize(value: object) -> Any:
    """Return the nearest value that JSON and UTF-8 can carry. Never raises."""
    return _sanitize(value, ())


def bounded(text: str, limit: int) -> str:
    """Return `text`, cleaned and with its middle left out where its JSON has more than `limit` bytes."""
    text = clean(text[: 2 * limit] + text[-limit:] if len(text) > 3 * limit else text)
    if len(text) <= limit and _json_bytes(text) <= limit:
        return text
    room = limit - _json_bytes("…")
    head = _leading(text, room * 2 // 3)
    tail = _leading(text[::-1], room // 3)[::-1]
    return f"{head}…{tail}"


def _leading(text: str, room: int) -> str:
    """Return the longest beginning of `text` whose JSON has at most `room` bytes."""
    used = 0

    def fits(character: str) -> bool:
        nonlocal used
        used += _json_bytes(character)
        return used <= room

    return "".join(takewhile(fits, text[:room]))


def _json_bytes(text: str) -> int:
    return len(json.dumps(text)) - len('""')


def _sanitize(value: object, within: tuple[int, ...]) -> Any:
    """Sanitize `value`; `within` are the ids of the containers around it, to tell a cycle."""
    match value:
        case None | bool():
            return value
        case str():
            return clean(value)
        case int():
            return int(value) if value.bit_length() <= MAX_INTEGER_BITS else f"<int of {value.bit_length()} bits>"
        case float():
            return float(value) if math.isfinite(value) else str(float(value))
        case bytes() | bytearray():
            return value.decode("utf-8", "replace")
    if not isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return f"<{type(value).__name__}>"
    if id(value) in within or len(within) >= MAX_DEPTH:
        return "…"
    inside = (*within, id(value))
    if isinstance(value, Mapping):
        return {_key(key): _sanitize(inner, inside) for key, inner in value.items()}
    return [_sanitize(inner, inside) for inner in value]


def _key(key: object) -> str:
    clean_key = _sanitize(key, ())
    return clean_key if isinstance(clean_key, str) else json.dumps(clean_key)


def _item(brief: str, type_: str, **metadata: Any) -> Item:
    return {"content": [{"type": "text", "text": clean(brief)}], "metadata": {"type": type_, **sanitize(metadata)}}


def _whole_text(type_: str, text: str) -> Item | None:
    return _item(text, type_) if text else None


def _one_line(text: str, limit: int) -> str:
    """Return the first `limit` characters of `text` with each line break made a space."""
    # Only a line break of two characters gets shorter, so twice the limit is enough of a long text.
    return " ".join(text[: 2 * limit + 2].splitlines())[:limit]


def _question(question: Question) -> dict[str, Any]:
    return {
        "question": bounded(question.question, DETAIL_BYTES),
        "header": bounded(question.header, OPTION_BYTES),
        "options": [
            {"label": bounded(label, OPTION_BYTES), "description": bounded(description, OPTION_BYTES)}
            for label, description in question.options
        ],
        "multiSelect": question.multi_select,
    }


def _question_brief(question: Mapping[str, Any]) -> str:
    lines = [question["question"]]
    for number, option in enumerate(question["options"], start=1):
        description = f" — {option['description']}" if option["description"] else ""
        lines.append(f"{number}. {option['label']}{description}")
    return "\n".join(lines)
