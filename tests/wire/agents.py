"""A desk for a real CLI: a work folder, a home, a host that decides, and a stand-in for the model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil
import yaml

from fleet.events import (
    Agent,
    AgentDiedError,
    AgentEvent,
    Answer,
    Decision,
    Image,
    Permissions,
    PromptCancelledError,
    Question,
    ToolCall,
    TurnRequest,
)
from tests.support import wait_until

E = TypeVar("E")

#: Stands in what a turn said for the death of its agent.
DIED = "died"
#: What an agent must never see: the worker has it in its environment.
SECRET = "s3cr3t-of-the-worker"


class Host:
    """Allows what doesn't mention `no`, and answers with `answer` or not at all; `parks` raises as the fleet does."""

    def __init__(self, answer: Answer | None = None, *, parks: bool = False) -> None:
        self.answer = answer
        self.parks = parks
        self.permitted: list[ToolCall] = []
        self.asked: list[tuple[str, tuple[Question, ...]]] = []

    async def permit(self, call: ToolCall) -> Decision:
        self.permitted.append(call)
        if self.parks:
            raise RuntimeError("parked")
        return Decision("touch no" not in str(call.input), "not this one")

    async def ask(self, kind: str, questions: tuple[Question, ...]) -> Answer:
        self.asked.append((kind, questions))
        if self.parks:
            raise RuntimeError("parked")
        if self.answer is None:
            raise PromptCancelledError
        return self.answer


class Desk:
    """Where an agent's turns are played. A subclass names its adapter and its environment."""

    adapter: ClassVar[Callable[[], Agent]]

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.home = folder / "home"
        self.url = url
        for each in (self.work, self.home):
            each.mkdir(exist_ok=True)
        (self.work / "a.txt").write_text("one\n")

    def environment(self) -> dict[str, str]:
        """Return the agent's environment; HOME is `home`."""
        raise NotImplementedError

    def request(
        self,
        prompt: str,
        permissions: Permissions = "autonomous",
        session_id: str | None = None,
        executable: str = "",
        images: tuple[Image, ...] = (),
    ) -> TurnRequest:
        return TurnRequest(
            work_folder=self.work,
            prompt=prompt,
            turn=1,
            session_id=session_id,
            permissions=permissions,
            state_dir=self.folder / "state",
            process_file=self.folder / "state" / "process.json",
            env=self.environment(),
            executable=executable,
            images=images,
        )

    def play(
        self,
        prompt: str,
        *,
        host: Host | None = None,
        when: Callable[[AgentEvent], object] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Run a turn and return what it said; after a death DIED and its message.

        `when` sees each event; what it returns true for is the last one.
        """

        async def run() -> list[Any]:
            said: list[Any] = []
            turn = type(self).adapter().turn(self.request(prompt, **options), host or Host())
            try:
                async for event in turn:
                    said.append(event)
                    if when is not None and when(event):
                        break
            except AgentDiedError as error:
                said += [DIED, str(error)]
            await turn.aclose()
            return said

        return asyncio.run(asyncio.wait_for(run(), 60))

    def kill(self) -> None:
        """Kill the CLI itself."""
        recorded = json.loads((self.folder / "state" / "process.json").read_text())
        os.kill(recorded["agent"]["pid"], signal.SIGKILL)

    def sleeping(self) -> int:
        """Count the `sleep` commands that run."""
        return sum(each.name() == "sleep" for each in self.processes())

    def processes(self) -> list[psutil.Process]:
        """Return what lives in this folder."""
        found = []
        for each in psutil.process_iter(["environ", "status"]):
            environ = each.info["environ"] or {}
            if environ.get("HOME") == str(self.home) and each.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(each)
        return found


def claude_environment(home: Path, url: str) -> dict[str, str]:
    """Return an environment in which Claude Code asks `url` alone and writes nowhere but into `home`."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home),
        "CLAUDE_CONFIG_DIR": str(home / ".claude"),
        "CLAUDE_CODE_TMPDIR": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "rehearsed",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextmanager
def running_model(folder: Path, script: dict[str, Any]) -> Iterator[str]:
    """Run the model's stand-in with `script`, its files in `folder`, and return its URL."""
    file, ready = folder / "model.yaml", folder / "model.ready"
    file.write_text(yaml.safe_dump(script))
    command = [sys.executable, "-m", "fleet.sandbox.model_api", "--script", str(file), "--ready-file", str(ready)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            wait_until(ready.exists, 30, "the model's stand-in is not up")
            yield json.loads(ready.read_text())["url"]
        finally:
            server.kill()


def of(kind: type[E] | tuple[type[E], ...], events: Iterable[object]) -> list[E]:
    """Return the events of a kind."""
    return [event for event in events if isinstance(event, kind)]
