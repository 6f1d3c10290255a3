"""One running turn of Codex: what the app-server tells and asks becomes events, and questions to the fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from agents.codex_items import (
    call_in,
    command_line,
    is_transient,
    is_unanswered,
    result_in,
    retry_detail,
    said_in,
    tokens_in,
    words_of,
)
from agents.codex_rpc import INTERNAL_ERROR, METHOD_NOT_FOUND, AppServer, Json
from agents.relay import Relay
from fleet.events import (
    AgentEvent,
    Decision,
    Ended,
    Injected,
    PromptCancelledError,
    Question,
    SessionStarted,
    Status,
    ToolCall,
    ToolResult,
    TurnHost,
    Usage,
)

log = logging.getLogger(__name__)

#: Seconds for which Codex may look for a provider that does not answer at all. It would for ever; other failures it
#: counts. Resuming later is the fleet's business.
UNREACHABLE_S = 60.0

#: How the prompt, and words about a declined call, are known again when the server tells of them.
PROMPT_ID = "fleet-prompt"
REFUSAL_ID = "fleet-refusal"

#: What an open call's result says when the turn ends: its process ends, too.
STILL_RUNNING = "It was still running when the turn ended, and was ended with it."

#: Makes the answer to a request of the server from its parameters.
Handler = Callable[[Json], Awaitable[Json]]

#: How a tool call's question of an MCP server is told from the server's own questions.
MCP_TOOL_CALL = "mcp_tool_call"


class Turn:
    """One turn of the thread `thread_id`."""

    def __init__(self, server: AppServer, host: TurnHost, thread_id: str) -> None:
        self._server = server
        self._relay = Relay(host)
        self._thread_id = thread_id
        self._turn_id = ""
        self._over = False
        self._open: dict[str, ToolCall] = {}
        self._refusals: dict[str, str] = {}
        self._totals: dict[str, Usage] = {}
        self._inputs = 0
        self._retried = ""
        self._give_up_at: float | None = None
        self._asking: set[asyncio.Task[None]] = set()

    async def start(self, params: Json) -> None:
        """Send the prompt.

        Raises:
            RpcError, EOFError: see `AppServer.call`.
        """
        identity = {"threadId": self._thread_id, "clientUserMessageId": PROMPT_ID}
        started = await self._server.call("turn/start", {**params, **identity})
        self._turn_id = started["turn"]["id"]

    async def events(self) -> AsyncIterator[AgentEvent]:
        """Yield what happens until the turn has ended, `Ended` last.

        Raises:
            EOFError: the server ended.
            Exception: what the fleet raised instead of an answer.
        """
        while not self._over:
            try:
                async with asyncio.timeout_at(self._give_up_at):
                    message = await self._relay.unless_raised(self._server.receive())
            except TimeoutError:
                yield Ended(ok=False, error=self._retried, transient=True)
                return
            if "id" in message:
                self._asked(message["id"], message["method"], message["params"])
                continue
            for event in self._told(message["method"], message["params"]):
                yield event

    def stop(self) -> None:
        """Drop open questions, and interrupt what still runs, so that the thread's history has a clean end."""
        for task in self._asking:
            task.cancel()
        if self._turn_id and not self._over:
            self._server.send("turn/interrupt", {"threadId": self._thread_id, "turnId": self._turn_id})

    # What the server tells.

    def _told(self, method: str, params: Json) -> Iterator[AgentEvent]:
        own = params.get("threadId") == self._thread_id
        match method:
            case "item/started":
                self._progressed()
                yield from self._started(params["item"])
            case "item/completed":
                self._progressed()
                yield from self._completed(params["item"], own=own)
            case "item/commandExecution/terminalInteraction" if params["stdin"]:
                yield from self._typed(params)
            case "thread/tokenUsage/updated":
                old = own and params["turnId"] != self._turn_id  # resuming a thread repeats its last count
                yield from self._used(params["threadId"], params["tokenUsage"], old=old)
            case "error" if own and params["willRetry"]:
                yield from self._retries(params["error"])
            case "turn/completed" if own and params["turn"]["id"] == self._turn_id:
                yield from self._ended(params["turn"])
            case "warning" | "configWarning":
                log.info("Codex: %s", params.get("message") or params.get("summary"))

    def _progressed(self) -> None:
        self._retried, self._give_up_at = "", None

    def _started(self, item: Json) -> Iterator[AgentEvent]:
        # A web search starts without its query; its call is told with the result.
        if (call := call_in(item)) is not None and item["type"] != "webSearch":
            self._open[call.invocation_id] = call
            yield call

    def _completed(self, item: Json, *, own: bool) -> Iterator[AgentEvent]:
        """Yield what a completed item says; of a subagent's items only the calls: its words go to the agent."""
        call = call_in(item)
        if call is not None:
            if self._open.pop(call.invocation_id, None) is None:
                yield call
            yield result_in(item, self._refusals.pop(call.invocation_id, ""))
        elif own and item["type"] == "userMessage":
            yield from self._user_said(item)
        elif own and (said := said_in(item)) is not None:
            yield said

    def _typed(self, params: Json) -> Iterator[AgentEvent]:
        """Yield what the agent typed into a running command, which is no item of its own."""
        self._inputs += 1
        invocation_id = f"{params['itemId']}:stdin:{self._inputs}"
        yield ToolCall(invocation_id, "write_stdin", {"text": params["stdin"], "invocation_id": params["itemId"]})
        yield ToolResult(invocation_id, "")

    def _user_said(self, item: Json) -> Iterator[AgentEvent]:
        if item.get("clientId") == PROMPT_ID:
            yield SessionStarted(self._thread_id)
        elif item.get("clientId") == REFUSAL_ID:
            yield Injected("\n".join(part["text"] for part in item["content"]), item["id"])

    def _used(self, thread_id: str, usage: Json, *, old: bool) -> Iterator[AgentEvent]:
        """Yield what was used since the thread's last count. The server counts from the thread's beginning."""
        total = tokens_in(usage["total"])
        before = self._totals.get(thread_id) or _difference(total, tokens_in(usage["last"]))
        self._totals[thread_id] = total
        if total != before and not old:
            yield _difference(total, before)

    def _retries(self, error: Json) -> Iterator[AgentEvent]:
        if not is_unanswered(error):
            self._give_up_at = None
        elif self._give_up_at is None:
            self._give_up_at = asyncio.get_running_loop().time() + UNREACHABLE_S
        detail = retry_detail(error)
        if detail != self._retried:
            yield Status("api_retry", detail)
        self._retried = detail

    def _ended(self, turn: Json) -> Iterator[AgentEvent]:
        self._over = True
        for invocation_id in self._open:
            yield ToolResult(invocation_id, STILL_RUNNING, is_error=True, uid=f"{invocation_id}:result")
        error = turn.get("error")
        if turn["status"] == "completed":
            yield Ended(ok=True)
        elif error:
            yield Ended(ok=False, error=words_of(error), transient=is_transient(error))
        else:
            yield Ended(ok=False, error=f"Codex says that the turn is {turn['status']}")

    # What the server asks.

    def _asked(self, request_id: object, method: str, params: Json) -> None:
        """Answer a request of the server, which may take a person days: meanwhile the turn goes on."""
        handlers: dict[str, Handler] = {
            "item/commandExecution/requestApproval": self._may_run,
            "item/fileChange/requestApproval": self._may_change,
            "mcpServer/elicitation/request": self._may_call,
            "item/tool/requestUserInput": self._question,
        }
        if method not in handlers:
            self._server.refuse(request_id, METHOD_NOT_FOUND, f"{method} is not offered")
            return
        task = asyncio.create_task(self._answer(request_id, handlers[method], params))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _answer(self, request_id: object, handler: Handler, params: Json) -> None:
        try:
            self._server.answer(request_id, await handler(params))
        except PromptCancelledError:
            self._server.refuse(request_id, INTERNAL_ERROR, "Nobody will answer this.")
        except (KeyError, TypeError, ValueError):
            log.exception("a question of Codex is of an unknown form")
            self._server.refuse(request_id, INTERNAL_ERROR, "The question is of an unknown form.")

    async def _may_run(self, params: Json) -> Json:
        """Decide on a command. With an `approvalId` it is something else that the item's command is about to do."""
        invocation_id = params.get("approvalId") or params["itemId"]
        if network := params.get("networkApprovalContext"):
            return await self._decide(ToolCall(invocation_id, "network_access", network))
        call = self._open.get(params["itemId"])
        told = call.input if call is not None else {}
        command = command_line(params["command"]) if params.get("command") else told.get("command", "")
        asked = {"command": command, "cwd": params.get("cwd") or told.get("cwd")}
        return await self._decide(ToolCall(invocation_id, "shell", asked))

    async def _may_change(self, params: Json) -> Json:
        """Decide on a change of files. The request has no paths, the item has."""
        call = self._open.get(params["itemId"])
        told = call.input if call is not None else {"changes": []}
        more = {"grant_root": params["grantRoot"]} if params.get("grantRoot") else {}
        return await self._decide(ToolCall(params["itemId"], "file_change", {**told, **more}))

    async def _decide(self, call: ToolCall) -> Json:
        decision = await self._relay.permit(call)
        if not decision.allow:
            self._refused(call, decision)
        return {"decision": "accept" if decision.allow else "decline"}

    async def _may_call(self, params: Json) -> Json:
        """Decide on the call of an MCP tool. The request does not say which, so only one may fit."""
        meta = params.get("_meta") or {}
        prefix = f"mcp__{params['serverName']}__"
        fitting = [
            call
            for call in self._open.values()
            if call.name.startswith(prefix)
            and call.input == meta.get("tool_params")
            and f'"{call.name.removeprefix(prefix)}"' in params["message"]
        ]
        if meta.get("codex_approval_kind") != MCP_TOOL_CALL or len(fitting) != 1:
            return {"action": "decline"}
        decision = await self._relay.permit(fitting[0])
        if not decision.allow:
            self._refused(fitting[0], decision)
            return {"action": "decline"}
        return {"action": "accept", "content": {}}

    def _refused(self, call: ToolCall, decision: Decision) -> None:
        """Tell the agent why: the protocol's `decline` has no words."""
        self._refusals[call.invocation_id] = decision.message or "declined"
        if decision.message:
            shown = call.input.get("command") if call.name == "shell" else call.name
            text = f"The call `{shown}` was declined: {decision.message}"
            self._server.send(
                "turn/steer",
                {
                    "threadId": self._thread_id,
                    "expectedTurnId": self._turn_id,
                    "clientUserMessageId": REFUSAL_ID,
                    "input": [{"type": "text", "text": text}],
                },
            )

    async def _question(self, params: Json) -> Json:
        """Ask a person. Secrets are not asked for: answers stand in the thread."""
        asked = params["questions"]
        if any(each.get("isSecret") for each in asked):
            raise PromptCancelledError("a thread is no place for a secret")
        questions = tuple(
            Question(
                each["question"],
                each.get("header") or "",
                tuple((option["label"], option.get("description") or "") for option in each.get("options") or ()),
            )
            for each in asked
        )
        answer = await self._relay.ask("ask_user_question", questions)
        given = zip(asked, answer.answers, strict=True)
        return {"answers": {each["id"]: {"answers": list(words)} for each, words in given}}


def _difference(total: Usage, before: Usage) -> Usage:
    return Usage(
        total.input_tokens - before.input_tokens,
        total.input_tokens_cached - before.input_tokens_cached,
        total.output_tokens - before.output_tokens,
    )
