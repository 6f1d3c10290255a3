"""Anthropic's Messages API, as far as Claude Code uses it: answers of a script, on the wire."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from fleet.sandbox.model_script import Answer, Block
from fleet.sandbox.sse import SeveredStreamError, event

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


def respond(body: dict[str, Any], answer: Answer) -> Response:
    """Answer the request `body`, streamed or whole as it asks."""
    if answer.status is not None:
        return _error(answer.status)
    message = {
        "id": f"msg_{uuid.uuid4().hex[:24]}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "rehearsed"),
        "content": [_content(block) for block in answer.blocks],
        "stop_reason": "tool_use" if any(block.tool_use for block in answer.blocks) else "end_turn",
        "stop_sequence": None,
        "usage": answer.usage.model_dump(),
    }
    if body.get("stream"):
        return StreamingResponse(_stream(message, severed=answer.severed), media_type="text/event-stream")
    return JSONResponse(message) if answer.severed is None else _error(500)


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


async def _stream(message: dict[str, Any], *, severed: int | None) -> AsyncIterator[bytes]:
    """Yield a message as the API streams it; a severed one breaks off behind `severed` whole blocks."""
    usage = {**message["usage"], "output_tokens": 1}
    start = {**message, "content": [], "stop_reason": None, "usage": usage}
    yield event("message_start", message=start)
    for index, block in enumerate(message["content"]):
        empty, deltas = _deltas(block)
        yield event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
            if index == severed:
                raise SeveredStreamError
        yield event("content_block_stop", index=index)
    if severed is not None:
        raise SeveredStreamError
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ending, usage=message["usage"])
    yield event("message_stop")


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
