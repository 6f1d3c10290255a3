"""OpenAI's Responses API, as far as Codex uses it: answers of a script, on the wire."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from fleet.sandbox.model_script import Answer, Block, Tokens
from fleet.sandbox.sse import SeveredStreamError, event

#: Status → the API's word for it. Other statuses from 500 on are `server_error`.
ERROR_CODES = {
    400: "invalid_request_error",
    401: "invalid_api_key",
    402: "billing_not_active",
    403: "permission_denied",
    429: "rate_limit_exceeded",
}

#: Types of input items in which the model spoke; outputs of tools and the user's messages are the other side's.
SPOKEN_BY_MODEL = frozenset({"reasoning", "function_call", "custom_tool_call"})


def messages_in(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a request's input as messages of Anthropic's form, as far as `model_script` looks at them."""
    return [message for item in items if (message := _message(item)) is not None]


def respond(body: dict[str, Any], answer: Answer) -> Response:
    """Answer the request `body` with a stream: Codex asks for nothing else."""
    if answer.status is not None:
        return _error(answer.status)
    custom = {tool["name"] for tool in body.get("tools", ()) if tool.get("type") == "custom"}
    items = [_item(block, custom) for block in answer.blocks]
    return StreamingResponse(_stream(items, answer.usage, severed=answer.severed), media_type="text/event-stream")


def _message(item: dict[str, Any]) -> dict[str, Any] | None:
    kind = item.get("type", "message")
    if kind in SPOKEN_BY_MODEL:
        return {"role": "assistant", "content": []}
    if kind.endswith("_output"):
        return {"role": "user", "content": []}
    if kind != "message" or item["role"] not in ("user", "assistant"):
        return None
    texts = [{"type": "text", "text": part["text"]} for part in item["content"] if "text" in part]
    return {"role": item["role"], "content": texts}


def _item(block: Block, custom: set[str]) -> dict[str, Any]:
    identity = uuid.uuid4().hex[:24]
    if block.thinking is not None:
        summary = [{"type": "summary_text", "text": block.thinking}]
        return {"type": "reasoning", "id": f"rs_{identity}", "summary": summary}
    if block.tool_use is None:
        spoken = {"type": "output_text", "text": block.text}
        return {"type": "message", "id": f"msg_{identity}", "role": "assistant", "content": [spoken]}
    name, given = block.tool_use.name, block.tool_use.input
    call = {"name": name, "call_id": f"call_{identity}"}
    if name in custom:  # takes plain text instead of JSON
        return {"type": "custom_tool_call", "id": f"ctc_{identity}", **call, "input": given["input"]}
    return {"type": "function_call", "id": f"fc_{identity}", **call, "arguments": json.dumps(given)}


def _error(status: int) -> Response:
    code = ERROR_CODES.get(status, "server_error")
    error = {"message": f"rehearsed {code}", "type": code, "code": code, "param": None}
    return JSONResponse({"error": error}, status, {"retry-after": "0"})


async def _stream(items: Sequence[dict[str, Any]], usage: Tokens, *, severed: int | None) -> AsyncIterator[bytes]:
    """Yield a response as the API streams it; a severed one breaks off behind `severed` whole items."""
    response = {"id": f"resp_{uuid.uuid4().hex[:24]}", "object": "response"}
    yield event("response.created", response=response)
    for index, item in enumerate(items):
        yield event("response.output_item.added", output_index=index, item={**item, **_emptied(item)})
        if item["type"] == "message":
            text = item["content"][0]["text"]
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            yield event("response.output_text.delta", **place, delta=text)
        if index == severed:
            raise SeveredStreamError
        yield event("response.output_item.done", output_index=index, item=item)
    if severed is not None:
        raise SeveredStreamError
    yield event("response.completed", response={**response, "usage": _usage(usage)})


def _emptied(item: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that an item has only when it is done, as they are before."""
    return {name: type(item[name])() for name in ("content", "summary", "arguments", "input") if name in item}


def _usage(tokens: Tokens) -> dict[str, Any]:
    """Return the counts in this API's split: cached input is a part of the input."""
    given = tokens.input_tokens + tokens.cache_creation_input_tokens + tokens.cache_read_input_tokens
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": tokens.cache_read_input_tokens},
        "output_tokens": tokens.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + tokens.output_tokens,
    }
