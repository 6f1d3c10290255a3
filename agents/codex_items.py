"""What Codex says, as events: pure functions of the app-server's items and errors, and of the CLI's rollout files.

Tools have the fleet's names, since Codex reports kinds of items instead: `shell`, `write_stdin`, `file_change`,
`mcp__SERVER__TOOL`, `web_search`, `view_image`, `image_generation`, `subagent`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any
from urllib.parse import unquote, urlsplit

from fleet.events import AgentEvent, Injected, Status, Text, Thinking, ToolCall, ToolResult, Usage

Json = dict[str, Any]

#: HTTP statuses below 500 that waiting may cure (protocol §3.7).
TRANSIENT_STATUSES = frozenset({408, 429})

#: Kinds of errors that waiting may cure, of those without an HTTP status.
TRANSIENT_ERRORS = frozenset({"rateLimitExceeded", "flexUnavailable", "serverOverloaded", "internalServerError"})

#: Kinds of errors that have an HTTP status, or none when there was no answer at all.
CONNECTION_ERRORS = frozenset(
    {
        "httpConnectionFailed",
        "responseStreamConnectionFailed",
        "responseStreamDisconnected",
        "responseTooManyFailedAttempts",
    }
)

#: How the message of a severed stream begins; when its retries are spent, Codex calls its kind just `other`.
SEVERED = "stream disconnected"

#: What Codex puts around the model's command line, with `-c` or `-lc`. The model may name another shell, and that one
#: has to be seen: it can be any program.
SHELLS = frozenset(f"{folder}/{name}" for folder in ("/bin", "/usr/bin") for name in ("bash", "sh", "zsh"))

#: Types of items in the rollout file → the app-server's, for those whose fields are the same.
RECORDED_TYPES = {"McpToolCall": "mcpToolCall", "WebSearch": "webSearch", "ImageView": "imageView"}


def said_in(item: Json) -> AgentEvent | None:
    """Return what a completed item says, unless it is a tool's: those are `call_in` and `result_in`."""
    kind, uid = item["type"], item.get("id")
    if kind == "agentMessage":
        return Text(item["text"], uid)
    if kind == "reasoning":
        return Thinking("\n\n".join(item.get("summary") or item.get("content") or ()), uid)
    if kind == "hookPrompt":
        return Injected("\n".join(fragment["text"] for fragment in item["fragments"]), uid)
    if kind == "contextCompaction":
        return Status("compacting_context", "The conversation so far was summarised.", uid)
    return None


def call_in(item: Json) -> ToolCall | None:
    """Return the call that an item is; None when it is no call."""
    named = _named(item)
    return None if named is None else ToolCall(item["id"], *named, f"{item['id']}:call")


def result_in(item: Json, refusal: str = "") -> ToolResult:
    """Return the result of a completed call. `refusal` is why the fleet declined it."""
    status = item.get("status", "completed")
    is_error = status not in ("completed", "inProgress") or item.get("exitCode") not in (None, 0)
    output = refusal or _output(item) or ("" if status == "completed" else status)
    return ToolResult(item["id"], output, is_error, f"{item['id']}:result")


def command_line(command: str | list[str]) -> str:
    """Return the command line as the model wrote it, without the shell that Codex puts around it."""
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError:
        words = []
    if len(words) == 3 and words[1] in ("-c", "-lc") and words[0] in SHELLS:
        return words[2]
    return command if isinstance(command, str) else shlex.join(command)


def tokens_in(usage: Json) -> Usage:
    """Return the counts of a `tokenUsage.total` or `.last`; the input includes what was cached."""
    return Usage(usage["inputTokens"], usage["cachedInputTokens"], usage["outputTokens"])


def is_transient(error: Json) -> bool:
    """Tell whether resuming may cure the error of a failed turn (protocol §3.7)."""
    kind = error.get("codexErrorInfo")
    if isinstance(kind, dict):
        name, detail = next(iter(kind.items()))
        status = (detail or {}).get("httpStatusCode")
        return name in CONNECTION_ERRORS and (status is None or status >= 500 or status in TRANSIENT_STATUSES)
    return kind in TRANSIENT_ERRORS or error["message"].startswith(SEVERED)


def is_unanswered(error: Json) -> bool:
    """Tell whether the provider has not answered at all."""
    kind = error.get("codexErrorInfo")
    return isinstance(kind, dict) and any((detail or {}).get("httpStatusCode") is None for detail in kind.values())


def words_of(error: Json) -> str:
    """Return the provider's own words. Codex hands on the JSON of some errors."""
    message: str = error["message"]
    try:
        words = json.loads(message)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return message
    return words if isinstance(words, str) else message


def retry_detail(error: Json) -> str:
    """Return one line on an error after which Codex tries again."""
    return ": ".join(part for part in (error["message"], error.get("additionalDetails")) if part)


def recorded_in(lines: Iterable[str], thread_id: str) -> list[AgentEvent]:
    """Return the events of the last turn in a rollout file; `uid` is that of the live event."""
    events: list[AgentEvent] = []
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # a kill cut it short
            continue
        payload = line.get("payload")
        if line.get("type") != "event_msg" or not isinstance(payload, dict):
            continue
        if payload.get("type") == "task_started":
            events.clear()
        elif payload.get("type") == "item_completed" and payload.get("thread_id") == thread_id:
            events += _recorded(payload["item"])
    return events


def _named(item: Json) -> tuple[str, Any] | None:
    """Return a call's tool and input."""
    kind = item["type"]
    if kind == "commandExecution":
        return "shell", {"command": command_line(item["command"]), "cwd": item["cwd"]}
    if kind == "fileChange":
        # Sorted, since Codex gives them in any order: the same change has to look the same whenever it is told.
        return "file_change", {"changes": [_change(each) for each in sorted(item["changes"], key=itemgetter("path"))]}
    if kind == "mcpToolCall":
        return f"mcp__{item['server']}__{item['tool']}", item.get("arguments")
    if kind == "webSearch":
        return "web_search", {"query": item["query"], "action": item.get("action")}
    if kind == "imageView":
        return "view_image", {"path": item["path"]}
    if kind == "imageGeneration":
        return "image_generation", {"prompt": item.get("revisedPrompt"), "saved_to": item.get("savedPath")}
    if kind == "collabAgentToolCall":
        return "subagent", {"action": item["tool"], "prompt": item.get("prompt"), "model": item.get("model")}
    return None


def _change(change: Json) -> Json:
    """Return one file's change: `path`, `kind` (add, delete, update), `diff`, and `move_path` when it was moved."""
    kind = change["kind"]
    moved = {"move_path": kind["move_path"]} if kind.get("move_path") else {}
    return {"path": change["path"], "kind": kind["type"], "diff": change["diff"], **moved}


def _output(item: Json) -> str:
    kind = item["type"]
    if kind == "commandExecution":
        return item.get("aggregatedOutput") or ""
    if kind == "mcpToolCall":
        return _mcp_output(item)
    if kind == "fileChange":
        return "\n".join(sorted(f"{change['kind']['type']} {change['path']}" for change in item["changes"]))
    return ""


def _mcp_output(item: Json) -> str:
    if item.get("error"):
        return str(item["error"].get("message", ""))
    blocks = (item.get("result") or {}).get("content") or ()
    return "\n".join(block["text"] if block.get("type") == "text" else f"[{block.get('type')}]" for block in blocks)


def _recorded(item: Json) -> Iterator[AgentEvent]:
    live = _as_live(item)
    if live is None:
        return
    said = said_in(live)
    if said is not None:
        yield said
    elif (call := call_in(live)) is not None:
        yield call
        yield result_in(live)


def _as_live(item: Json) -> Json | None:
    """Return an item of the rollout file as the app-server tells of it; None for a kind that becomes no event."""
    kind = item["type"]
    if kind == "AgentMessage":
        text = "".join(part.get("text", "") for part in item["content"])
        return {"type": "agentMessage", "id": item["id"], "text": text}
    if kind == "Reasoning":
        summary, content = item["summary_text"], item.get("raw_content")
        return {"type": "reasoning", "id": item["id"], "summary": summary, "content": content}
    if kind == "CommandExecution":
        return {
            **item,
            "type": "commandExecution",
            "cwd": unquote(urlsplit(item["cwd"]).path),
            "aggregatedOutput": item.get("aggregated_output"),
            "exitCode": item.get("exit_code"),
        }
    if kind == "FileChange":
        return {**item, "type": "fileChange", "changes": [_live_change(*each) for each in item["changes"].items()]}
    return {**item, "type": RECORDED_TYPES[kind]} if kind in RECORDED_TYPES else None


def _live_change(path: str, change: Json) -> Json:
    kind = {"type": change["type"], "move_path": change.get("move_path")}
    return {"path": path, "kind": kind, "diff": change.get("unified_diff") or change.get("content", "")}
