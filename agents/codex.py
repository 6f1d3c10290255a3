"""Codex through `codex app-server`, which is in the wheel `openai-codex-cli-bin`. One process per turn.

The user's own Codex configuration (CODEX_HOME, else HOME/.codex, of the request's environment) says which provider is
asked, and how it is paid.

Permissions: `autonomous` has no sandbox and asks about nothing. `approval` and `guarded` run in Codex's sandbox, which
lets commands write into the work folder and temporary folders and keeps them off the network; what is to leave it is
asked for, and the question goes to the fleet. With either of these the work folder's `.codex` is not read: its MCP
servers and hooks would run outside of any sandbox. Its AGENTS.md is, by this adapter.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import subprocess
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agents import process
from agents.codex_items import recorded_in
from agents.codex_rpc import AppServer, Json, RpcError
from agents.codex_turn import Turn
from fleet.events import AgentDiedError, AgentEvent, Ended, TurnHost, TurnRequest

log = logging.getLogger(__name__)

#: The versions that this adapter is tested with: from, and below which.
TESTED_VERSIONS = ((0, 163), (0, 164))

#: Seconds that `codex --version` may take.
VERSION_TIMEOUT_S = 10.0

#: Seconds for the CLI to end by itself, in which it writes its rollout file. With the usual `stop_grace_s` this
#: stays below the two seconds in which a thread set to `completed` must have stopped.
CLOSE_S = 1.0

#: What the app-server need not send: parts of what comes whole later, and news for a screen.
UNWANTED = (
    "account/rateLimits/updated",
    "item/agentMessage/delta",
    "item/commandExecution/outputDelta",
    "item/fileChange/outputDelta",
    "item/fileChange/patchUpdated",
    "item/plan/delta",
    "item/reasoning/summaryPartAdded",
    "item/reasoning/summaryTextDelta",
    "item/reasoning/textDelta",
    "remoteControl/status/changed",
    "thread/readState/changed",
    "thread/status/changed",
    "turn/diff/updated",
)

#: Variables that OpenAI's own provider takes its key from; those of others are named in the user's configuration.
OPENAI_KEYS = ("OPENAI_API_KEY", "CODEX_API_KEY", "CODEX_ACCESS_TOKEN")

#: Bytes of AGENTS.md that are handed on, as many as Codex itself would take.
AGENTS_MD_BYTES = 32 << 10

THREAD_ID = re.compile(r"[A-Za-z0-9-]{1,64}")


class Codex:
    """Adapter for Codex."""

    async def turn(self, request: TurnRequest, host: TurnHost) -> AsyncIterator[AgentEvent]:
        """See `fleet.events.Agent.turn`."""
        argv = [request.executable or bundled_cli(), "app-server", *overrides(request)]
        env = {**request.env, "PWD": str(request.work_folder)}
        cli = process.running(
            argv,
            env=env,
            cwd=request.work_folder,
            process_file=request.process_file,
            term_grace_s=request.stop_grace_s,
        )
        async with cli as agent:
            server = AppServer(agent)
            turn = None
            try:
                await _greet(server)
                thread_id = await _open_thread(server, request)
                turn = Turn(server, host, thread_id)
                await turn.start({**_settings(request), "input": _input(request)})
                async for event in turn.events():
                    yield event
            except RpcError as error:
                yield Ended(ok=False, error=str(error))
            except EOFError as error:
                raise AgentDiedError(await _death(agent, request.process_file)) from error
            finally:
                if turn is not None:
                    turn.stop()
                await server.close(CLOSE_S)

    def recorded(self, request: TurnRequest) -> list[AgentEvent]:
        """See `fleet.events.Agent.recorded`."""
        if request.session_id is None or not THREAD_ID.fullmatch(request.session_id):
            return []
        sessions = _codex_home(request.env) / "sessions"
        path = next(sessions.glob(f"*/*/*/rollout-*-{request.session_id}.jsonl"), None)
        if path is None:
            return []
        with path.open(encoding="utf-8", errors="replace") as lines:
            return recorded_in(lines, request.session_id)


def bundled_cli() -> str:
    """Return the path of the CLI in `openai-codex-cli-bin`.

    Raises:
        ImportError: the wheel is not installed.
    """
    from codex_cli_bin import bundled_codex_path

    return str(bundled_codex_path())


def version_warning(executable: str = "") -> str | None:
    """Return what is to be said about the version of a CLI (default: the bundled one); None when it is a tested one.

    Raises:
        OSError: it can't be started.
        subprocess.TimeoutExpired: it does not answer.
    """
    argv = [executable or bundled_cli(), "--version"]
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False)
    return _version_warning(answer.stdout)


def overrides(request: TurnRequest) -> list[str]:
    """Return the options with which this turn's configuration differs from the user's own."""
    config = _user_config(request.env)
    policy = config.get("shell_environment_policy", {})
    hidden = sorted({*policy.get("exclude", ()), *_provider_keys(config)})
    settings = {
        "shell_environment_policy.exclude": _toml(hidden),
        "features.default_mode_request_user_input": "true",
        "suppress_unstable_features_warning": "true",
    }
    if request.permissions != "autonomous":
        # Starting a thread makes Codex trust its folder, unless the folder, or the repository around it, is refused.
        folders = (request.work_folder, *request.work_folder.parents)
        refused = (f'{_toml(str(folder))} = {{trust_level = "untrusted"}}' for folder in folders)
        settings["projects"] = f"{{{', '.join(refused)}}}"
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]


async def _greet(server: AppServer) -> None:
    hello = await server.call(
        "initialize",
        {
            "clientInfo": {"name": "blobhub-fleet", "version": "1"},
            "capabilities": {"experimentalApi": True, "optOutNotificationMethods": UNWANTED},
        },
    )
    server.notify("initialized")
    if warning := _version_warning(hello.get("userAgent", "")):
        log.warning(warning)


async def _open_thread(server: AppServer, request: TurnRequest) -> str:
    """Start or resume the thread, and return its id. Both forget sandbox and approvals, so they are always sent."""
    autonomous = request.permissions == "autonomous"
    params: Json = {
        "cwd": str(request.work_folder),
        "sandbox": "danger-full-access" if autonomous else "workspace-write",
        "approvalPolicy": "never" if autonomous else "on-request",
        **({"model": request.model} if request.model else {}),
    }
    if request.session_id:
        await server.call("thread/resume", {**params, "threadId": request.session_id, "excludeTurns": True})
        return request.session_id
    started = await server.call("thread/start", params)
    thread_id: str = started["thread"]["id"]
    if not autonomous and (text := _agents_md(request.work_folder)):
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await server.call("thread/inject_items", {"threadId": thread_id, "items": [item]})
    return thread_id


def _settings(request: TurnRequest) -> Json:
    """Return what holds for the turn, as `turn/start` names it."""
    autonomous = request.permissions == "autonomous"
    return {
        "cwd": str(request.work_folder),
        "sandboxPolicy": {"type": "dangerFullAccess" if autonomous else "workspaceWrite"},
        "approvalPolicy": "never" if autonomous else "on-request",
        **({"model": request.model} if request.model else {}),
        **({"effort": request.effort} if request.effort else {}),
    }


def _input(request: TurnRequest) -> list[Json]:
    """Return the user's message: the prompt, then the images that belong to it."""
    urls = (
        f"data:{image.content_type};base64,{base64.b64encode(image.data).decode('ascii')}" for image in request.images
    )
    return [{"type": "text", "text": request.prompt}, *({"type": "image", "url": url} for url in urls)]


def _agents_md(folder: Path) -> str:
    """Return the work folder's AGENTS.md as Codex puts it into a conversation; empty when there is none."""
    try:
        with (folder / "AGENTS.md").open("rb") as file:
            text = file.read(AGENTS_MD_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return f"# AGENTS.md instructions for {folder}\n\n<INSTRUCTIONS>\n{text}\n</INSTRUCTIONS>" if text.strip() else ""


def _codex_home(env: dict[str, str]) -> Path:
    return Path(env.get("CODEX_HOME") or Path(env.get("HOME") or Path.home()) / ".codex")


def _user_config(env: dict[str, str]) -> dict[str, Any]:
    """Return the user's configuration; empty when there is none that Codex could read."""
    try:
        return tomllib.loads((_codex_home(env) / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _provider_keys(config: dict[str, Any]) -> set[str]:
    """Return the variables that hold providers' keys, which no command needs to see."""
    names = set(OPENAI_KEYS)
    for provider in config.get("model_providers", {}).values():
        names |= {provider.get("env_key"), *provider.get("env_http_headers", {}).values()} - {None}
    return names


def _toml(value: str | list[str]) -> str:
    """Return a TOML value: its strings are written as JSON's are."""
    return json.dumps(value, ensure_ascii=False)


def _version_warning(words: str) -> str | None:
    found = re.search(r"\b(\d+)\.(\d+)\.(\d+)", words)
    if found is None:
        return "the version of the Codex CLI is unknown"
    low, high = TESTED_VERSIONS
    if low <= tuple(int(part) for part in found.groups()) < high:
        return None
    tested = " up to, not including, ".join(".".join(map(str, bound)) for bound in TESTED_VERSIONS)
    return f"the Codex CLI has version {found[0]}; tested is {tested}"


async def _death(agent: process.Running, process_file: Path) -> str:
    status = await agent.process.wait()
    return f"Codex's process ended with status {status}: {process.stderr_tail(process_file)}"
