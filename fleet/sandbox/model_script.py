"""The script of the model's stand-in: what a model says to which prompt.

    steps:
      - match: parser             # a substring of the prompt; left out: every prompt
        rounds:                   # what the model answers, one list of blocks per request of the step
          - - thinking: "…"
            - text: "…"
            - tool_use: {name: Bash, input: {command: "npm test"}}
          - - text: "…"
        usage: {input_tokens: 20, cache_creation_input_tokens: 0, cache_read_input_tokens: 400, output_tokens: 30}
        delay_s: 0.5              # before each answer
        errors: {times: 2, status: 529, round: 0}   # the first requests of that round fail; or `severed: 1`

`severed` breaks the stream off behind that many whole blocks instead of failing the request.

The step and the round are found from the request alone: the last prompt that a step matches, and how often the model
has spoken since. So any number of conversations go on at once, and each survives a restart. Only `errors` are counted
here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

DEFAULT_TEXT = "This is a rehearsed model, and its script says nothing about this."

#: Beginnings of text blocks in a user's message that the CLIs add; they are no prompt.
ADDED_BY_CLI = ("<system-reminder>", "<environment_context>", "<user_instructions>", "<turn_aborted>")

#: What the CLI puts into the conversation in the model's name when the API failed; it is no answer of the model.
API_ERROR_TEXT = "API Error"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolUse(_Strict):
    """A call that the model makes."""

    name: str
    input: dict[str, Any] = {}


class Block(_Strict):
    """One block of an answer: exactly one of its fields."""

    thinking: str | None = None
    text: str | None = None
    tool_use: ToolUse | None = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> Block:
        if len(self.model_fields_set) != 1:
            raise ValueError("a block is exactly one of thinking, text, tool_use")
        return self


class Tokens(_Strict):
    """Token counts of each answer, in the API's split: the three inputs don't overlap."""

    input_tokens: int = 20
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 400
    output_tokens: int = 30


class Errors(_Strict):
    """The first `times` requests of `round` fail with `status`, or their stream is cut off behind `severed` blocks."""

    times: int = Field(ge=1)
    status: Annotated[int, Field(ge=400, le=599)] = 529
    severed: Annotated[int, Field(strict=True, ge=0)] | None = None
    round: int = Field(default=0, ge=0)


class Step(_Strict):
    """What the model does about one prompt."""

    match: str | None = None
    rounds: list[list[Block]]
    usage: Tokens = Tokens()
    delay_s: float = Field(default=0, ge=0)
    errors: Errors | None = None


class Script(_Strict):
    """The whole play."""

    steps: list[Step]


def load(path: Path) -> Script:
    """Read a script.

    Raises:
        ValueError: it is not a script, and why.
    """
    try:
        return Script.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error


def find_round(steps: Sequence[Step], messages: Sequence[dict[str, Any]]) -> tuple[int, int] | None:
    """Return the step of the last prompt that matches one, and how many rounds of it the conversation already has."""
    rounds = 0
    speaker = ""
    for message in reversed(messages):
        role = message["role"]
        if role == "assistant":
            rounds += speaker != role and not _is_api_error(message)
        elif role == "user" and (step := _matching(steps, prompt_in(message))) is not None:
            return step, rounds
        speaker = role
    return None


def prompt_in(message: dict[str, Any]) -> str:
    """Return a user message's prompt; empty when it has only tool results."""
    return "\n".join(text for text in _texts(message) if not text.lstrip().startswith(ADDED_BY_CLI))


def _texts(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    if isinstance(content, str):
        return [content]
    return [block["text"] for block in content if block.get("type") == "text"]


def _is_api_error(message: dict[str, Any]) -> bool:
    return any(text.startswith(API_ERROR_TEXT) for text in _texts(message))


def _matching(steps: Sequence[Step], prompt: str) -> int | None:
    if not prompt:
        return None
    return next((n for n, step in enumerate(steps) if step.match is None or step.match in prompt), None)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model answers to one request. `status` is an HTTP error instead.

    `severed` is the number of whole blocks behind which the stream breaks off.
    """

    blocks: Sequence[Block]
    usage: Tokens
    status: int | None = None
    severed: int | None = None


class Rehearsal:
    """Plays a script."""

    def __init__(self, script: Script) -> None:
        self._steps = script.steps
        self._failed: Counter[int] = Counter()

    async def answer(self, messages: Sequence[dict[str, Any]]) -> Answer:
        """Return the conversation's next round. Messages are `{role, content}` as in Anthropic's API."""
        found = find_round(self._steps, messages)
        if found is None:
            return Answer([Block(text=DEFAULT_TEXT)], Tokens())
        number, round_ = found
        step = self._steps[number]
        await asyncio.sleep(step.delay_s)
        blocks = step.rounds[round_] if round_ < len(step.rounds) else [Block(text=DEFAULT_TEXT)]
        errors = step.errors
        if errors is None or errors.round != round_ or self._failed[number] >= errors.times:
            return Answer(blocks, step.usage)
        self._failed[number] += 1
        return Answer(blocks, step.usage, errors.status if errors.severed is None else None, errors.severed)
