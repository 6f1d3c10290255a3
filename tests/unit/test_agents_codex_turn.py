"""What a turn of Codex answers to the app-server's requests, and what it makes of its news."""

import asyncio

import pytest

from agents.codex_turn import REFUSAL_ID, Turn
from fleet.events import AgentEvent, Answer, Decision, Ended, Question, Text, ToolCall, ToolResult, Usage

THREAD = "thread"
POKE = {"type": "mcpToolCall", "id": "p", "server": "s", "tool": "poke", "arguments": {"x": 1}, "status": "inProgress"}
ELICITATION = {
    "threadId": THREAD,
    "serverName": "s",
    "message": 'Allow the s MCP server to run tool "poke"?',
    "_meta": {"codex_approval_kind": "mcp_tool_call", "tool_params": {"x": 1}},
}


class Server:
    """Tells what it was given, then that the turn is over; keeps what it was answered."""

    def __init__(self, *messages: dict) -> None:
        self.messages = list(messages)
        self.answers: dict[object, dict] = {}
        self.refusals: dict[object, str] = {}
        self.sent: list[tuple[str, dict]] = []

    async def call(self, method: str, params: dict) -> dict:
        return {"turn": {"id": "turn"}}

    def send(self, method: str, params: dict) -> None:
        self.sent.append((method, params))

    def answer(self, request_id: object, result: dict) -> None:
        self.answers[request_id] = result

    def refuse(self, request_id: object, code: int, message: str) -> None:
        self.refusals[request_id] = message

    async def receive(self) -> dict:
        for _ in range(3):  # lets a question that was just asked be answered
            await asyncio.sleep(0)
        if self.messages:
            return self.messages.pop(0)
        return told("turn/completed", turn={"id": "turn", "status": "completed", "error": None})


class Host:
    """Decides as it is told."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.permitted: list[ToolCall] = []
        self.asked: list[tuple[Question, ...]] = []

    async def permit(self, call: ToolCall) -> Decision:
        self.permitted.append(call)
        return self.decision

    async def ask(self, kind: str, questions: tuple[Question, ...]) -> Answer:
        self.asked.append(questions)
        return Answer(tuple(("yes",) for _ in questions))


def told(method: str, thread: str = THREAD, **params: object) -> dict:
    return {"method": method, "params": {"threadId": thread, **params}}


def asks(method: str, **params: object) -> dict:
    return {"id": 7, **told(method, **params)}


def play(host: Host, *messages: dict) -> tuple[Server, list[AgentEvent]]:
    async def run() -> tuple[Server, list[AgentEvent]]:
        server = Server(*messages)
        turn = Turn(server, host, THREAD)
        await turn.start({})
        events = [event async for event in turn.events()]
        turn.stop()
        return server, events

    return asyncio.run(run())


ALLOW = Decision(allow=True)
DENY = Decision(allow=False, message="not now")


@pytest.mark.parametrize(
    ("decision", "answer"), [(ALLOW, {"action": "accept", "content": {}}), (DENY, {"action": "decline"})]
)
def test_a_call_of_an_mcp_tool_is_decided_by_the_fleet(decision: Decision, answer: dict):
    host = Host(decision)
    server, _ = play(host, told("item/started", item=POKE), asks("mcpServer/elicitation/request", **ELICITATION))
    assert [(call.name, call.input) for call in host.permitted] == [("mcp__s__poke", {"x": 1})]
    assert server.answers[7] == answer


@pytest.mark.parametrize(
    ("started", "asked"),
    [
        ([], ELICITATION),
        ([POKE, {**POKE, "id": "q"}], ELICITATION),
        ([{**POKE, "arguments": {"x": 2}}], ELICITATION),
        ([{**POKE, "tool": "prod"}], ELICITATION),
        ([POKE], {**ELICITATION, "_meta": {"tool_params": {"x": 1}}}),
    ],
)
def test_a_call_that_cannot_be_told_for_certain_is_declined_unasked(started: list[dict], asked: dict):
    host = Host(ALLOW)
    calls = [told("item/started", item=item) for item in started]
    server, _ = play(host, *calls, asks("mcpServer/elicitation/request", **asked))
    assert server.answers[7] == {"action": "decline"}
    assert host.permitted == []


def test_an_unknown_request_is_refused():
    server, events = play(Host(ALLOW), asks("item/permissions/requestApproval", permissions={}))
    assert "not offered" in server.refusals[7]
    assert server.answers == {}
    assert events == [Ended(ok=True)]


def test_a_request_of_another_form_than_the_known_one_is_refused():
    server, events = play(Host(ALLOW), asks("item/fileChange/requestApproval"))
    assert server.answers == {}
    assert 7 in server.refusals
    assert events == [Ended(ok=True)]


def test_a_command_that_was_not_told_of_is_decided_by_what_the_request_says():
    host = Host(DENY)
    request = asks("item/commandExecution/requestApproval", itemId="c", command="/bin/bash -lc 'rm x'", cwd="/w")
    server, _ = play(host, request)
    assert host.permitted == [ToolCall("c", "shell", {"command": "rm x", "cwd": "/w"})]
    assert server.answers[7] == {"decision": "decline"}
    ((method, steer),) = server.sent
    assert (method, steer["clientUserMessageId"], steer["expectedTurnId"]) == ("turn/steer", REFUSAL_ID, "turn")
    assert steer["input"][0]["text"] == "The call `rm x` was declined: not now"


def test_a_host_of_the_network_is_decided_as_such():
    host = Host(ALLOW)
    network = {"host": "example.org", "protocol": "https"}
    play(host, asks("item/commandExecution/requestApproval", itemId="c", networkApprovalContext=network))
    assert host.permitted == [ToolCall("c", "network_access", network)]


def test_what_is_typed_into_a_command_is_decided_and_told_as_a_call_of_its_own():
    host = Host(DENY)
    command = {"type": "commandExecution", "id": "c", "command": "cat", "cwd": "/w", "status": "inProgress"}
    typing = {"itemId": "c", "approvalId": "s", "command": "write_stdin --session-id 1 'x'", "cwd": "/w"}
    _, events = play(
        host,
        told("item/started", item=command),
        asks("item/commandExecution/requestApproval", **typing),
        told("item/commandExecution/terminalInteraction", itemId="c", stdin="y\n"),
        told("item/commandExecution/terminalInteraction", itemId="c", stdin=""),
        told("item/completed", item={**command, "status": "completed", "exitCode": 0, "aggregatedOutput": "y\n"}),
    )
    assert host.permitted == [ToolCall("s", "shell", {"command": typing["command"], "cwd": "/w"})]
    assert [event.input for event in events if isinstance(event, ToolCall) and event.name == "write_stdin"] == [
        {"text": "y\n", "invocation_id": "c"}
    ]
    assert [event.output for event in events if isinstance(event, ToolResult)] == ["", "y\n"]


def test_a_folder_to_be_granted_is_a_part_of_the_call():
    host = Host(ALLOW)
    play(host, asks("item/fileChange/requestApproval", itemId="c", grantRoot="/etc"))
    assert host.permitted == [ToolCall("c", "file_change", {"changes": [], "grant_root": "/etc"})]


def test_a_secret_is_not_asked_for_in_a_thread():
    host = Host(ALLOW)
    question = {"id": "q", "question": "Password?", "isSecret": True}
    server, _ = play(host, asks("item/tool/requestUserInput", itemId="i", questions=[question]))
    assert host.asked == []
    assert 7 in server.refusals


def test_of_a_subagent_only_calls_are_told_and_its_tokens_count():
    said = {"type": "agentMessage", "id": "m", "text": "Hi"}
    usage = {"inputTokens": 5, "cachedInputTokens": 1, "outputTokens": 2}
    _, events = play(
        Host(ALLOW),
        told("item/started", "sub", item=POKE),
        told("item/completed", "sub", item=said),
        told("item/completed", "sub", item={**POKE, "status": "completed"}),
        told("thread/tokenUsage/updated", "sub", turnId="other", tokenUsage={"total": usage, "last": usage}),
        told("turn/completed", "sub", turn={"id": "other", "status": "completed"}),
        told("item/completed", item=said),
    )
    kinds = [type(event) for event in events]
    assert kinds == [ToolCall, ToolResult, Usage, Text, Ended]
    assert events[2] == Usage(5, 1, 2)


def test_a_web_search_is_told_when_its_query_is_known():
    search = {"type": "webSearch", "id": "w", "query": ""}
    _, events = play(
        Host(ALLOW),
        told("item/started", item=search),
        told("item/completed", item={**search, "query": "turtles"}),
    )
    assert isinstance(events[0], ToolCall)
    assert events[0].input["query"] == "turtles"
    assert isinstance(events[1], ToolResult)
