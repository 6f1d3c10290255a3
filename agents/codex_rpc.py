"""The line protocol of `codex app-server`: JSON-RPC without its `jsonrpc` field, one message per line, both ways."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import suppress
from typing import Any

from agents.process import Running, read_lines

Json = dict[str, Any]

#: JSON-RPC's code for a method that the other side does not offer.
METHOD_NOT_FOUND = -32601

#: JSON-RPC's code for whatever else went wrong.
INTERNAL_ERROR = -32603


class RpcError(Exception):
    """The server refused a request; the message is the server's."""


class AppServer:
    """One connection to a running app-server. Only one task at a time may receive."""

    def __init__(self, agent: Running) -> None:
        self._agent = agent
        self._lines = read_lines(agent.stdout)
        self._early: deque[Json] = deque()
        self._requests = 0

    async def call(self, method: str, params: Json) -> Json:
        """Send a request and return its result. What arrives before it is received later.

        Raises:
            RpcError: the server refuses.
            EOFError: the server ended.
        """
        request_id = self.send(method, params)
        while True:
            message = await self._read()
            if message.get("id") != request_id or "method" in message:
                self._early.append(message)
            elif "error" in message:
                raise RpcError(str(message["error"].get("message", message["error"])))
            else:
                result: Json = message["result"]
                return result

    async def receive(self) -> Json:
        """Return the next notification or request of the server.

        Being cancelled while it waits ends the connection's reading side for good.

        Raises:
            EOFError: the server ended.
        """
        while True:
            message = self._early.popleft() if self._early else await self._read()
            if "method" in message:
                return message

    def send(self, method: str, params: Json) -> int:
        """Send a request without waiting for its result, and return its id."""
        self._requests += 1
        self._write({"id": self._requests, "method": method, "params": params})
        return self._requests

    def notify(self, method: str) -> None:
        """Send a notification."""
        self._write({"method": method})

    def answer(self, request_id: object, result: Json) -> None:
        """Answer a request of the server."""
        self._write({"id": request_id, "result": result})

    def refuse(self, request_id: object, code: int, message: str) -> None:
        """Answer a request of the server with an error."""
        self._write({"id": request_id, "error": {"code": code, "message": message}})

    async def close(self, timeout_s: float) -> None:
        """Tell the server that nothing more comes, and wait until it has ended, `timeout_s` at most."""
        self._agent.stdin.close()
        try:
            async with asyncio.timeout(timeout_s):
                while await self._agent.stdout.read(1 << 16):
                    pass
        except TimeoutError:
            return

    async def _read(self) -> Json:
        async for line in self._lines:
            with suppress(ValueError):  # a wrapper around the CLI may print what it likes
                message = json.loads(line)
                if isinstance(message, dict):
                    return message
        raise EOFError("the app-server closed its output")

    def _write(self, message: Json) -> None:
        # Nobody reads from a dead server: its end shows when it is read from.
        line = json.dumps(message, ensure_ascii=False)
        self._agent.stdin.write(line.encode("utf-8", "replace") + b"\n")  # the server takes no lone surrogates
