"""A stand-in for the model's API: `python -m fleet.sandbox.model_api --script FILE [--port P] [--ready-file FILE]`.

It answers `POST /v1/messages` as a real agent CLI expects it, streamed or whole, and plays a script instead of a model,
so that the real CLI runs its real tools without a network. It listens on 127.0.0.1 only and ends on SIGTERM or SIGINT.

    steps:
      - match: parser             # a substring of the prompt; left out: every prompt
        rounds:                   # what the model answers, one list of blocks per request of the step
          - - thinking: "…"
            - text: "…"
            - tool_use: {name: Bash, input: {command: "npm test"}}
          - - text: "…"
        usage: {input_tokens: 20, cache_creation_input_tokens: 0, cache_read_input_tokens: 400, output_tokens: 30}
        delay_s: 0.5              # before each answer
        errors: {times: 2, status: 529, round: 0}   # the first requests of that round fail; or `severed: true`

The step and the round are found from the request alone: the last prompt that a step matches, and how often the model
has spoken since. So any number of conversations go on at once, and each survives a restart. Only `errors` are counted
here.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
import uvicorn
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

DEFAULT_TEXT = "This is a rehearsed model, and its script says nothing about this."

#: Text blocks in a user's message that the CLI adds; they are no prompt.
ADDED_BY_CLI = "<system-reminder>"

#: What the CLI puts into the conversation in the model's name when the API failed; it is no answer of the model.
API_ERROR_TEXT = "API Error"

#: Status → the API's word for it. Other statuses from 500 on are `api_error`.
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    429: "rate_limit_error",
    529: "overloaded_error",
}

#: Characters of text or JSON in one streamed delta.
DELTA_CHARACTERS = 200


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
    """The first `times` requests of `round` fail with `status`, or their stream is cut off."""

    times: int = Field(ge=1)
    status: Annotated[int, Field(ge=400, le=599)] = 529
    severed: bool = False
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


class SeveredStreamError(Exception):
    """The script wants this connection to break."""


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


class ModelApi:
    """Answers requests from a script."""

    def __init__(self, script: Script) -> None:
        self._steps = script.steps
        self._failed: Counter[int] = Counter()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/messages", self.messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            ]
        )

    async def count_tokens(self, request: Request) -> Response:
        """Answer with about four characters per token."""
        return JSONResponse({"input_tokens": len(await request.body()) // 4})

    async def messages(self, request: Request) -> Response:
        """Answer with the conversation's next round."""
        body = await request.json()
        # Side requests, such as one for a title, repeat the prompt but offer no tools.
        found = find_round(self._steps, body["messages"]) if body.get("tools") else None
        if found is None:
            return self._answer(body, [Block(text=DEFAULT_TEXT)], Tokens(), severed=False)
        number, round_ = found
        step = self._steps[number]
        await asyncio.sleep(step.delay_s)
        errors = step.errors
        fails = errors is not None and errors.round == round_ and self._failed[number] < errors.times
        self._failed[number] += fails
        if errors is not None and fails and not errors.severed:
            return _error(errors.status)
        blocks = step.rounds[round_] if round_ < len(step.rounds) else [Block(text=DEFAULT_TEXT)]
        return self._answer(body, blocks, step.usage, severed=fails)

    def _answer(self, body: dict[str, Any], blocks: list[Block], usage: Tokens, *, severed: bool) -> Response:
        message = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model", "rehearsed"),
            "content": [_content(block) for block in blocks],
            "stop_reason": "tool_use" if any(block.tool_use for block in blocks) else "end_turn",
            "stop_sequence": None,
            "usage": usage.model_dump(),
        }
        if body.get("stream"):
            return StreamingResponse(_stream(message, severed=severed), media_type="text/event-stream")
        return _error(500) if severed else JSONResponse(message)


def _content(block: Block) -> dict[str, Any]:
    if block.tool_use is not None:
        return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", **block.tool_use.model_dump()}
    if block.thinking is not None:
        return {"type": "thinking", "thinking": block.thinking, "signature": "rehearsed"}
    return {"type": "text", "text": block.text}


def _error(status: int) -> Response:
    kind = ERROR_TYPES.get(status, "api_error")
    return JSONResponse(
        {"type": "error", "error": {"type": kind, "message": f"rehearsed {kind}"}}, status, {"retry-after": "0"}
    )


async def _stream(message: dict[str, Any], *, severed: bool) -> AsyncIterator[bytes]:
    """Yield a message as the API streams it; a severed one breaks off in its first block."""
    usage = {**message["usage"], "output_tokens": 1}
    start = {**message, "content": [], "stop_reason": None, "usage": usage}
    yield _sse("message_start", message=start)
    for index, block in enumerate(message["content"]):
        empty, deltas = _deltas(block)
        yield _sse("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _sse("content_block_delta", index=index, delta=delta)
            if severed:
                raise SeveredStreamError
        yield _sse("content_block_stop", index=index)
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield _sse("message_delta", delta=ending, usage=message["usage"])
    yield _sse("message_stop")


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the block as it starts, and the deltas that complete it."""
    if block["type"] == "tool_use":
        parts = _pieces(json.dumps(block["input"]))
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in parts]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": part} for part in _pieces(block["thinking"])]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {"type": "thinking", "thinking": "", "signature": ""}, deltas
    return {"type": "text", "text": ""}, [{"type": "text_delta", "text": part} for part in _pieces(block["text"])]


def _pieces(text: str) -> list[str]:
    return [text[at : at + DELTA_CHARACTERS] for at in range(0, len(text), DELTA_CHARACTERS)] or [""]


def _sse(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


class _Server(uvicorn.Server):
    """Announces that it listens."""

    def __init__(self, config: uvicorn.Config, url: str, ready_file: Path | None) -> None:
        super().__init__(config)
        self._url = url
        self._ready_file = ready_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready_file is not None:
            draft = self._ready_file.with_name(f"{self._ready_file.name}.{os.getpid()}")
            draft.write_text(json.dumps({"url": self._url, "pid": os.getpid()}))
            draft.replace(self._ready_file)
        print(f"listening on {self._url}", flush=True)


@click.command()
@click.option("--script", type=click.Path(path_type=Path), required=True, help="What the model says.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1; 0 is any free one.")
@click.option("--ready-file", type=click.Path(path_type=Path), help='Gets {"url", "pid"} when the API listens.')
def main(script: Path, port: int, ready_file: Path | None) -> None:
    """Run a stand-in for the model's API on this machine."""
    try:
        api = ModelApi(load(script))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    listener = socket.create_server(("127.0.0.1", port))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    # Only "critical": a severed stream is an exception on purpose.
    config = uvicorn.Config(
        api.app(), lifespan="off", log_level="critical", access_log=False, timeout_graceful_shutdown=0
    )
    _Server(config, url, ready_file).run([listener])


if __name__ == "__main__":
    main()
