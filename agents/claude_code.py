"""Claude Code through `claude-agent-sdk`, which brings the CLI. One process per turn; the CLI keeps the session.

The CLI runs below a guard, by a launcher that the SDK takes for the CLI: the SDK itself would hand the worker's whole
environment on.

Permissions: `autonomous` bypasses the CLI's own checks. `approval` keeps them, and what the CLI would ask a person
about goes to the fleet. `guarded` asks the fleet about every call, by a hook that blocks when it fails. With either of
these the settings, hooks and MCP servers in the work folder are not read, only its CLAUDE.md: whoever may write there
could allow calls with them, or run commands.

Questions to a person go through `ask_user` (`agents.claude_ask`), which needs no permission.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import claude_agent_sdk
from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ClaudeSDKError,
    CLIConnectionError,
    CLINotFoundError,
    EffortLevel,
    HookMatcher,
    PermissionResultAllow,
    PermissionResultDeny,
    ProcessError,
    ResultError,
    ResultMessage,
    SystemMessage,
    ToolPermissionContext,
)
from claude_agent_sdk.types import HookContext, HookInput, HookJSONOutput, PreToolUseHookInput

from agents import claude_ask, process
from agents.claude_messages import ended_by, events_in, recorded_in, usage_in
from agents.relay import Relay
from fleet.events import (
    AgentDiedError,
    AgentEvent,
    Decision,
    Ended,
    SessionStarted,
    ToolCall,
    TurnHost,
    TurnRequest,
)

#: Bytes of one line from the CLI. A longer one would end the SDK's reader while the CLI goes on.
MAX_LINE_BYTES = 32 << 20

#: Seconds that the SDK may take to close its connection; it has been seen to hang.
CLOSE_S = 2.0

#: Seconds that a permission waits for its call to be told first; a call that is not told must not wait for ever.
ANNOUNCE_WAIT_S = 2.0

#: Seconds that the prompt may take into the CLI's transcript, and between two looks. Without the transcript there is
#: nothing to resume, so the session is only told of when it is there.
PROMPT_TAKEN_WAIT_S = 2.0
PROMPT_TAKEN_POLL_S = 0.01

#: Seconds. The CLI gives a hook one minute by default, but a person may take days. Its timer ends at 24 days.
HOOK_TIMEOUT_S = 14 * 24 * 3600.0

#: Tools that promise something for after the turn, when no process is there to keep it.
TOOLS_FOR_LATER = ["CronCreate", "CronDelete", "CronList", "Monitor", "ScheduleWakeup"]

#: Environment of a CLI that nobody sits in front of; the request's own values win.
HEADLESS_ENV = {
    "CLAUDE_CODE_ENTRYPOINT": "sdk-py",
    "CLAUDE_AGENT_SDK_VERSION": claude_agent_sdk.__version__,
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",  # a background subagent would bring a second result
    "ENABLE_TOOL_SEARCH": "false",
    "MCP_TOOL_TIMEOUT": str(int(HOOK_TIMEOUT_S * 1000)),  # `ask_user` waits for a person
    "DISABLE_AUTOUPDATER": "1",
}

#: Environment of a CLI that reads no settings from the work folder: it still shall read CLAUDE.md there.
GATED_ENV = {"CLAUDE_CODE_ADDITIONAL_DIRECTORIES_CLAUDE_MD": "1"}

#: Lines of stderr that are kept for the message about a death.
STDERR_LINES = 5

SESSION_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


class ClaudeCode:
    """Adapter for Claude Code."""

    async def turn(self, request: TurnRequest, host: TurnHost) -> AsyncIterator[AgentEvent]:
        """See `fleet.events.Agent.turn`."""
        stderr: deque[str] = deque(maxlen=STDERR_LINES)
        relay = Relay(host)
        gate = _Gate(relay)
        client = ClaudeSDKClient(_options(request, relay, gate, stderr))
        transcript_bytes = _transcript_size(request, request.session_id)
        ended, last_error, completed = None, None, False
        try:
            await _connect(client)
            await client.query(_with_images(request) if request.images else request.prompt)
            messages = client.receive_response()
            while message := await relay.unless_raised(anext(messages, None)):
                if isinstance(message, SystemMessage) and message.subtype == "init":
                    session_id = message.data["session_id"]
                    await _prompt_taken(request, session_id, transcript_bytes)
                    yield SessionStarted(session_id)
                for event in events_in(message):
                    yield event
                    if isinstance(event, ToolCall):
                        gate.announce(event)
                if isinstance(message, AssistantMessage):
                    last_error = message.error
                if isinstance(message, ResultMessage):
                    yield usage_in(message)
                    ended = ended_by(message, last_error)
            completed = ended is not None
        except (ResultError, CLINotFoundError) as error:
            ended = Ended(ok=False, error=str(error))
        except (ProcessError, CLIConnectionError) as error:
            raise AgentDiedError(_death(error, stderr)) from error
        except ClaudeSDKError as error:
            ended = Ended(ok=False, error=str(error))
        finally:
            await _end(client, request, gently=completed)
        if ended is None:
            raise AgentDiedError(_death("the CLI ended without a result", stderr))
        yield ended

    def recorded(self, request: TurnRequest) -> list[AgentEvent]:
        """See `fleet.events.Agent.recorded`."""
        path = _transcript(request, request.session_id)
        if path is None:
            return []
        with path.open(encoding="utf-8", errors="replace") as lines:
            return recorded_in(lines)


class _Gate:
    """Takes calls to the fleet: each once, and not before the thread has been told of it."""

    def __init__(self, host: TurnHost) -> None:
        self._host = host
        self._announced: dict[str, asyncio.Event] = {}
        self._decisions: dict[str, Decision] = {}

    def announce(self, call: ToolCall) -> None:
        """The call has been told of."""
        self._announcement(call.invocation_id).set()

    async def decide(self, call: ToolCall) -> Decision:
        """Ask the fleet about `call`; the CLI may ask twice about one, by the hook and by its own check."""
        if call.name == claude_ask.ASK_USER:
            return Decision(allow=True)
        if call.invocation_id not in self._decisions:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._announcement(call.invocation_id).wait(), ANNOUNCE_WAIT_S)
            self._decisions[call.invocation_id] = await self._host.permit(call)
        return self._decisions[call.invocation_id]

    async def can_use_tool(
        self, name: str, tool_input: dict[str, Any], context: ToolPermissionContext
    ) -> PermissionResultAllow | PermissionResultDeny:
        """Answer the CLI's own question about a call."""
        decision = await self.decide(ToolCall(context.tool_use_id or "", name, tool_input))
        return PermissionResultAllow() if decision.allow else PermissionResultDeny(message=decision.message)

    async def before_tool_use(self, about: HookInput, _id: str | None, _context: HookContext) -> HookJSONOutput:
        """Answer the hook that the CLI calls before every call, whatever it thinks of it."""
        use = cast(PreToolUseHookInput, about)
        decision = await self.decide(ToolCall(use["tool_use_id"], use["tool_name"], use["tool_input"]))
        return {
            "hookSpecificOutput": {
                "hookEventName": "PreToolUse",
                "permissionDecision": "allow" if decision.allow else "deny",
                "permissionDecisionReason": decision.message,
            }
        }

    def _announcement(self, invocation_id: str) -> asyncio.Event:
        return self._announced.setdefault(invocation_id, asyncio.Event())


def _options(request: TurnRequest, host: TurnHost, gate: _Gate, stderr: deque[str]) -> ClaudeAgentOptions:
    autonomous = request.permissions == "autonomous"
    hook = HookMatcher(hooks=[gate.before_tool_use], timeout=HOOK_TIMEOUT_S, on_failure="block")
    return ClaudeAgentOptions(
        cli_path=_launcher(request),
        cwd=request.work_folder,
        resume=request.session_id,
        model=request.model or None,
        effort=cast(EffortLevel, request.effort) if request.effort else None,
        system_prompt={"type": "preset", "preset": "claude_code"},
        permission_mode="bypassPermissions" if autonomous else "default",
        can_use_tool=None if autonomous else gate.can_use_tool,
        hooks={"PreToolUse": [hook]} if request.permissions == "guarded" else None,
        setting_sources=["user", "project", "local"] if autonomous else ["user"],
        add_dirs=[] if autonomous else [request.work_folder],  # with GATED_ENV: CLAUDE.md without the settings
        strict_mcp_config=not autonomous,
        mcp_servers={claude_ask.SERVER: claude_ask.server(host)},
        disallowed_tools=[*TOOLS_FOR_LATER, claude_ask.BUILT_IN],
        verbatim_prompts=True,  # an @path in somebody's words would read the file before any gate
        max_buffer_size=MAX_LINE_BYTES,
        stderr=stderr.append,
    )


async def _with_images(request: TurnRequest) -> AsyncIterator[dict[str, Any]]:
    """Yield the user's message: the prompt, then the images that belong to it."""
    images = [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": image.content_type,
                "data": base64.b64encode(image.data).decode("ascii"),
            },
        }
        for image in request.images
    ]
    content = [{"type": "text", "text": request.prompt}, *images]
    yield {"type": "user", "message": {"role": "user", "content": content}, "parent_tool_use_id": None}


def _launcher(request: TurnRequest) -> Path:
    """Write what the SDK starts as the CLI, and return its path."""
    command = process.guard_command(
        [request.executable or str(_bundled_cli())],
        env=_environment(request),
        process_file=request.process_file,
        term_grace_s=request.stop_grace_s,
    )
    request.state_dir.mkdir(parents=True, exist_ok=True)
    launcher = request.state_dir.absolute() / "claude"
    process.write_launcher(launcher, command)
    return launcher


def _bundled_cli() -> Path:
    return Path(claude_agent_sdk.__file__).parent / "_bundled" / "claude"


def _environment(request: TurnRequest) -> dict[str, str]:
    env = {**HEADLESS_ENV, **request.env, "PWD": str(request.work_folder)}
    if request.permissions != "autonomous":
        env |= GATED_ENV
    elif os.geteuid() == 0:
        env["IS_SANDBOX"] = "1"  # else the CLI refuses to bypass permissions for root
    return env


async def _connect(client: ClaudeSDKClient) -> None:
    """Start the CLI. One that doesn't answer is a bare Exception in the SDK.

    Raises:
        ClaudeSDKError: the CLI can't be started, or ended.
    """
    try:
        await client.connect()
    except ClaudeSDKError:
        raise
    except Exception as error:
        raise CLIConnectionError(str(error)) from error


async def _end(client: ClaudeSDKClient, request: TurnRequest, *, gently: bool) -> None:
    """End the CLI; after a completed turn it may first close by itself, which lets it write its transcript."""
    try:
        if gently:
            await _close(client)
    finally:
        try:
            await process.end(request.process_file, term_grace_s=request.stop_grace_s)
        finally:
            await _close(client)


async def _close(client: ClaudeSDKClient) -> None:
    with suppress(TimeoutError, ClaudeSDKError):
        await asyncio.wait_for(client.disconnect(), CLOSE_S)


def _death(error: object, stderr: deque[str]) -> str:
    return "; ".join([f"Claude Code's process ended: {error}", *stderr])


def _transcript(request: TurnRequest, session_id: str | None) -> Path | None:
    """Return the CLI's transcript of a session, if there is one."""
    if session_id is None or not SESSION_ID.fullmatch(session_id):
        return None
    home = Path(request.env.get("HOME") or Path.home())
    projects = Path(request.env.get("CLAUDE_CONFIG_DIR") or home / ".claude") / "projects"
    return next(projects.glob(f"*/{session_id}.jsonl"), None)


def _transcript_size(request: TurnRequest, session_id: str | None) -> int:
    path = _transcript(request, session_id)
    return path.stat().st_size if path else 0


async def _prompt_taken(request: TurnRequest, session_id: str, before: int) -> None:
    """Wait until the transcript has a user's message behind its first `before` bytes."""
    for _ in range(int(PROMPT_TAKEN_WAIT_S / PROMPT_TAKEN_POLL_S)):
        path = _transcript(request, session_id)
        if path is not None and b'"type":"user"' in _tail(path, before):
            return
        await asyncio.sleep(PROMPT_TAKEN_POLL_S)


def _tail(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()
