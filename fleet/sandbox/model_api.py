"""A stand-in for the model's API: `python -m fleet.sandbox.model_api --script FILE [--port P] [--ready-file FILE]`.

It answers `POST /v1/messages` as Claude Code expects it and `POST /v1/responses` as Codex does, and plays a script
(`fleet.sandbox.model_script`) instead of a model, so that the real CLIs run their real tools without a network. It
listens on 127.0.0.1 only and ends on SIGTERM or SIGINT.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import click
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fleet.sandbox import messages_api, responses_api
from fleet.sandbox.model_script import Rehearsal, Script, load


class ModelApi:
    """Answers requests from a script."""

    def __init__(self, script: Script) -> None:
        self._rehearsal = Rehearsal(script)

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/messages", self.messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
            ]
        )

    async def count_tokens(self, request: Request) -> Response:
        """Answer with about four characters per token."""
        return JSONResponse({"input_tokens": len(await request.body()) // 4})

    async def messages(self, request: Request) -> Response:
        """Answer as Anthropic does."""
        body = await request.json()
        # Side requests, such as one for a title, repeat the prompt but offer no tools.
        answer = await self._rehearsal.answer(body["messages"] if body.get("tools") else [])
        return messages_api.respond(body, answer)

    async def responses(self, request: Request) -> Response:
        """Answer as OpenAI does."""
        body = await request.json()
        return responses_api.respond(body, await self._rehearsal.answer(responses_api.messages_in(body["input"])))


class _Server(uvicorn.Server):
    """Announces that it listens."""

    def __init__(self, config: uvicorn.Config, url: str, ready_file: Path | None) -> None:
        super().__init__(config)
        self._url = url
        self._ready_file = ready_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready_file is not None:
            draft = self._ready_file.with_name(f"{self._ready_file.name}.{os.getpid()}")
            draft.write_text(json.dumps({"url": self._url, "pid": os.getpid()}))
            draft.replace(self._ready_file)
        print(f"listening on {self._url}", flush=True)


@click.command()
@click.option("--script", type=click.Path(path_type=Path), required=True, help="What the model says.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1; 0 is any free one.")
@click.option("--ready-file", type=click.Path(path_type=Path), help='Gets {"url", "pid"} when the API listens.')
def main(script: Path, port: int, ready_file: Path | None) -> None:
    """Run a stand-in for the model's API on this machine."""
    try:
        api = ModelApi(load(script))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    listener = socket.create_server(("127.0.0.1", port))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    # Only "critical": a severed stream is an exception on purpose.
    config = uvicorn.Config(
        api.app(), lifespan="off", log_level="critical", access_log=False, timeout_graceful_shutdown=0
    )
    _Server(config, url, ready_file).run([listener])


if __name__ == "__main__":
    main()
