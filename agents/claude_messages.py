"""What Claude Code says, as events: pure functions of the SDK's messages and of the CLI's transcript."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from claude_agent_sdk import (
    AssistantMessage,
    ContentBlock,
    Message,
    ResultMessage,
    SystemMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)

from fleet.events import AgentEvent, Ended, Injected, Status, Text, Thinking, ToolCall, ToolResult, Usage

#: HTTP statuses below 500 that waiting may cure (protocol §3.7).
TRANSIENT_STATUSES = frozenset({408, 429})

#: What the CLI calls failures that no waiting cures, for those that come without a status.
LASTING_ERRORS = frozenset({"authentication_failed", "billing_error", "invalid_request"})


def events_in(message: Message) -> Iterator[AgentEvent]:
    """Yield what a message says. The end of a turn is `usage_in` and `ended_by`."""
    if isinstance(message, SystemMessage) and message.subtype == "api_retry":
        yield Status("api_retry", _retry_detail(message.data), message.data.get("uuid"))
    elif isinstance(message, AssistantMessage) and message.error is None:
        yield from _blocks_said(message.content, message.uuid, by_subagent=message.parent_tool_use_id is not None)
    elif isinstance(message, UserMessage):
        content = [TextBlock(message.content)] if isinstance(message.content, str) else message.content
        yield from _blocks_injected(content, message.uuid, by_subagent=message.parent_tool_use_id is not None)


def usage_in(result: ResultMessage) -> Usage:
    """Return the turn's tokens. The API's three inputs don't overlap; the fleet counts all that was processed."""
    usage = result.usage or {}
    cached = int(usage.get("cache_read_input_tokens") or 0)
    uncached = int(usage.get("input_tokens") or 0) + int(usage.get("cache_creation_input_tokens") or 0)
    return Usage(uncached + cached, cached, int(usage.get("output_tokens") or 0))


def ended_by(result: ResultMessage, last_error: str | None) -> Ended:
    """Return how the turn ended. `last_error` is the `error` of the turn's last assistant message."""
    # A result of the subtype "success" can be an error all the same.
    if not result.is_error and result.subtype == "success":
        return Ended(ok=True)
    words = result.result or "; ".join(result.errors or ()) or result.subtype
    return Ended(ok=False, error=words, transient=_is_transient(result, last_error))


def recorded_in(lines: Iterable[str]) -> list[AgentEvent]:
    """Return the events of the last turn in a session's transcript; `uid` is that of the live event."""
    events: list[AgentEvent] = []
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # a kill cut it short
            continue
        if line.get("isSidechain") or line.get("isMeta") or line.get("type") not in ("assistant", "user"):
            continue
        content = line["message"]["content"]
        if line.get("promptSource"):
            events.clear()
        elif line["type"] == "assistant" and not line.get("isApiErrorMessage"):
            events += _blocks_said(_parsed(content), line["uuid"])
        elif line["type"] == "user":
            events += _blocks_injected(_parsed(content), line["uuid"])
    return events


def _blocks_said(
    blocks: Iterable[ContentBlock], uuid: str | None, *, by_subagent: bool = False
) -> Iterator[AgentEvent]:
    """Yield the model's blocks. What a subagent says goes to the agent, not to a person; its calls do count."""
    for index, block in enumerate(blocks):
        uid = _uid(uuid, index)
        if isinstance(block, ToolUseBlock):
            yield ToolCall(block.id, block.name, block.input, uid)
        elif isinstance(block, TextBlock) and not by_subagent:
            yield Text(block.text, uid)
        elif isinstance(block, ThinkingBlock) and not by_subagent:
            yield Thinking(block.thinking, uid)


def _blocks_injected(
    blocks: Iterable[ContentBlock], uuid: str | None, *, by_subagent: bool = False
) -> Iterator[AgentEvent]:
    """Yield the blocks of the user's role: results of tools, and text that the CLI put there."""
    for index, block in enumerate(blocks):
        uid = _uid(uuid, index)
        if isinstance(block, ToolResultBlock):
            yield ToolResult(block.tool_use_id, _output(block.content), bool(block.is_error), uid)
        elif isinstance(block, TextBlock) and not by_subagent:
            yield Injected(block.text, uid)


def _uid(uuid: str | None, index: int) -> str | None:
    return None if uuid is None else f"{uuid}:{index}"


def _output(content: str | list[dict[str, Any]] | None) -> str:
    """Return a result as text; what isn't text, such as an image, is named."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block["text"] if block.get("type") == "text" else f"[{block.get('type')}]" for block in content)


def _parsed(content: str | list[dict[str, Any]]) -> list[ContentBlock]:
    """Parse the content of a transcript's line, of which only the kinds that become events matter."""
    if isinstance(content, str):
        return [TextBlock(content)]
    return [_block(block) for block in content]


def _block(block: Mapping[str, Any]) -> ContentBlock:
    kind = block["type"]
    if kind == "tool_use":
        return ToolUseBlock(block["id"], block["name"], block["input"])
    if kind == "tool_result":
        return ToolResultBlock(block["tool_use_id"], block.get("content"), block.get("is_error"))
    if kind == "thinking":
        return ThinkingBlock(block["thinking"], block["signature"])
    return TextBlock(block["text"] if kind == "text" else f"[{kind}]")


def _retry_detail(data: Mapping[str, Any]) -> str:
    status = f" {data['error_status']}" if data.get("error_status") else ""
    delay_s = (data.get("retry_delay_ms") or 0) / 1000
    attempt = f"attempt {data.get('attempt')} of {data.get('max_retries')}"
    return f"{data.get('error', 'error')}{status}, {attempt}, next in {delay_s:.1f} s"


def _is_transient(result: ResultMessage, last_error: str | None) -> bool:
    if result.api_error_status is not None:
        return result.api_error_status >= 500 or result.api_error_status in TRANSIENT_STATUSES
    # No status: the connection was refused or severed.
    return result.terminal_reason == "api_error" and last_error not in LASTING_ERRORS
