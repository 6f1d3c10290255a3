"""The scripted agent: plays a YAML script in a real process that can be killed, orphaned and resumed like a real agent.

For demonstrations, tests and benchmarks. The option `script` names the file; `agents.script` describes it, and
`agents.scripted_player` is the process.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from agents import process, scripted_player
from agents.script import ScriptError, load
from fleet.events import (
    AgentDiedError,
    AgentEvent,
    Answer,
    Ended,
    PromptCancelledError,
    Question,
    SessionStarted,
    Status,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    TurnHost,
    TurnRequest,
    Usage,
)

SESSION_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


class Scripted:
    """Adapter for the scripted agent."""

    async def turn(self, request: TurnRequest, host: TurnHost) -> AsyncIterator[AgentEvent]:
        """See `fleet.events.Agent.turn`. A script that can't be played ends the turn with an error."""
        try:
            start = _start(request)
        except ScriptError as error:
            yield Ended(ok=False, error=str(error))
            return
        argv = [sys.executable, "-I", "-S", scripted_player.__file__]
        player = process.running(
            argv,
            env=request.env,
            cwd=request.work_folder,
            process_file=request.process_file,
            term_grace_s=request.stop_grace_s,
        )
        ended = None
        async with player as running:
            _send(running, start)
            async for line in process.read_lines(running.stdout):
                message = json.loads(line)
                if message["type"] == "ended":
                    ended = Ended(message["ok"], message["error"], message["transient"])
                    break
                if message["type"] in REPLIES:
                    _send(running, await REPLIES[message["type"]](message, host))
                else:
                    yield EVENTS[message["type"]](message)
                    if message["type"] == "session":
                        _send(running, {"type": "noted"})
            if ended is None:
                status = await running.process.wait()
                detail = process.stderr_tail(request.process_file)
                raise AgentDiedError(f"the scripted agent's process ended with status {status}. {detail}".rstrip())
        yield ended

    def recorded(self, request: TurnRequest) -> list[AgentEvent]:
        """See `fleet.events.Agent.recorded`."""
        if request.session_id is None or not SESSION_ID.fullmatch(request.session_id):
            return []
        lines, _ = scripted_player.read_lines(_transcript(request, request.session_id))
        events: list[AgentEvent] = []
        for line in lines:
            if line["type"] in ("prompt", "resumed"):
                events.clear()
            elif line["type"] in EVENTS:
                events.append(EVENTS[line["type"]](line))
        return events


def _start(request: TurnRequest) -> dict[str, Any]:
    """Return the player's first line.

    Raises:
        ScriptError: there is no script that can be played.
    """
    script = request.options.get("script")
    if not isinstance(script, str) or not script:
        raise ScriptError("agents.scripted.script: must be the path of a script")
    session_id = request.session_id or str(uuid.uuid4())
    if not SESSION_ID.fullmatch(session_id):
        raise ScriptError(f"not a session of the scripted agent: {session_id!r}")
    return {
        "turns": load(Path(script)),
        "prompt": request.prompt,
        "turn": request.turn,
        "session_id": session_id,
        "transcript": str(_transcript(request, session_id)),
        "work_folder": str(request.work_folder),
    }


def _transcript(request: TurnRequest, session_id: str) -> Path:
    return request.state_dir.absolute() / "scripted" / f"{session_id}.jsonl"


def _send(running: process.Running, message: dict[str, Any]) -> None:
    """Send one message. Its size is bounded by the script's, so the pipe's own buffer is enough."""
    with suppress(BrokenPipeError, ConnectionResetError):  # the end of stdout tells of the death
        running.stdin.write(scripted_player.encode(message))


async def _permit(message: dict[str, Any], host: TurnHost) -> dict[str, Any]:
    decision = await host.permit(ToolCall(message["invocation_id"], message["name"], message["input"]))
    return {"allow": decision.allow, "message": decision.message}


async def _ask(message: dict[str, Any], host: TurnHost) -> dict[str, Any]:
    questions = tuple(
        Question(
            each["question"],
            each["header"],
            tuple((option["label"], option["description"]) for option in each["options"]),
            each["multiSelect"],
        )
        for each in message["questions"]
    )
    try:
        answer: Answer = await host.ask(message["kind"], questions)
    except PromptCancelledError:
        return {"answers": None}
    return {"answers": answer.answers}


#: What the player asks, and who answers.
REPLIES = {"permit": _permit, "ask": _ask}

#: What the player says, as events. The transcript's lines have the same form.
EVENTS: dict[str, Callable[[dict[str, Any]], AgentEvent]] = {
    "session": lambda m: SessionStarted(m["session_id"]),
    "text": lambda m: Text(m["text"], m["uid"]),
    "thinking": lambda m: Thinking(m["text"], m["uid"]),
    "tool_call": lambda m: ToolCall(m["invocation_id"], m["name"], m["input"], m["uid"]),
    "tool_result": lambda m: ToolResult(m["invocation_id"], m["output"], m["is_error"], m["uid"]),
    "status": lambda m: Status(m["status"], m["detail"], m["uid"]),
    "usage": lambda m: Usage(m["input_tokens"], m["input_tokens_cached"], m["output_tokens"]),
}
