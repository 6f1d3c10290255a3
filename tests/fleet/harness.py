"""A whole fleet for tests: real Redis, real HTTP, beat and the workers of two hosts as processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from celery import Celery

from fleet import machine
from fleet.config import FleetConfig, load_config
from fleet.envelope import new_thread, with_state
from fleet.hosts import Hosts
from fleet.platform.client import PlatformClient, SessionRef
from fleet.record import Record, Records
from fleet.refs import ThreadRef
from fleet.sandbox.platform_server import RunningPlatform, running_platform
from fleet.sandbox.redis_server import PreparedRedis, RunningRedis
from fleet.store import Store
from fleet.supervisor import Child, Supervisor
from tests.support import wait_until

Json = dict[str, Any]

#: Poll interval of the fleet under test in ms.
INTERVAL_MS = 300
#: Life of a lease in the fleet under test in seconds.
LEASE_S = 3.0
#: Seconds for which an agent's process waits for an answer.
HOLD_S = 2.0
#: Seconds within which anything that a test waits for must have come; generous, for a machine of two busy cores.
PATIENCE_S = 45

SCRIPT = """
turns:
  - match: "hello"
    events:
      - thinking: "A greeting."
      - text: "You said: {prompt}"
      - tool: {name: Bash, input: {command: npm test}, output: "ok\\n1 passed"}
      - usage: {input_tokens: 100, input_tokens_cached: 60, output_tokens: 7}
  - match: "session"
    events: [{text: "session {session_id} turn {turn}"}]
  - match: "long"
    events:
      - text: "begun"
      - repeat: {times: 600, events: [{sleep: 0.1}]}
      - text: "over"
  - match: "brief pause"
    events: [{text: "pausing"}, {sleep: 1.5}, {text: "paused for {prompt}"}]
  - match: "publish"
    events:
      - write: {path: out/plan.md, text: "the plan"}
      - write: {path: out/raw.bin, base64: "/w=="}
  - match: "die"
    events: [{text: "before"}, {exit: 137}, {text: "after"}]
  - match: "keep dying"
    events: [{exit: 137}, {exit: 137}, {exit: 137}, {exit: 137}]
  - match: "give up"
    events: [{text: "trying"}, {fail: "no way"}]
  - match: "flaky model"
    events: [{text: "one"}, {api_error: overloaded}, {text: "two"}]
  - match: "ask me"
    events:
      - ask:
          kind: ask_user_question
          questions:
            - question: "Which?"
              header: Choice
              options: [{label: Red, description: ""}, {label: Blue, description: ""}]
      - text: "chose {answer}"
  - match: "permission"
    events:
      - text: "may I?"
      - tool: {name: Bash, input: {command: make deploy}, output: "deployed"}
      - text: "went on"
  - match: "step by step"
    events:
      - repeat: {times: 40, events: [{text: "step {i}"}, {sleep: 0.1}]}
  - match: "push it"
    events:
      - tool: {name: Read, input: {file_path: notes.txt}, output: "notes"}
      - tool: {name: Bash, input: {command: "cd sub && git push"}, output: "pushed"}
      - tool: {name: Write, input: {file_path: ../outside.txt, content: x}, output: "written"}
      - text: "done"
  - match: "many"
    events: [{repeat: {times: 200, events: [{text: "line {i}"}]}}]
"""


class Person:
    """Somebody who works with the embedded platform under a key."""

    def __init__(self, platform: RunningPlatform, key: str) -> None:
        self._at = SessionRef(platform.revision_id, platform.session_id)
        self._loop = asyncio.new_event_loop()
        self._client = PlatformClient(platform.url, key)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.close()

    def put(self, alias: str, value: Any) -> None:
        self._run(self._client.upload_object(self._at, alias, value))

    def value(self, alias: str) -> Json:
        value: Json = self._run(self._client.download_object(self._at, alias))["value"]
        return value

    def hand_over(self, alias: str, folder: Path | str, text: str = "", **agent: str) -> None:
        """Write a thread, say something in it, and set it to pending."""
        value = new_thread(str(folder), "scripted", "autonomous")
        value["thread"]["metadata"]["agent"] |= agent
        self.put(alias, value)
        if text:
            self.say(alias, text)
        self.set_state(alias, "pending")

    def say(self, alias: str, text: str, **metadata: Any) -> None:
        item = {"content": [{"type": "text", "text": text}], "metadata": metadata}
        self._run(self._client.post_item(self._at, alias, item))

    def post(self, alias: str, item: Json) -> None:
        self._run(self._client.post_item(self._at, alias, item))

    def set_state(self, alias: str, state: Any) -> None:
        self.put(alias, with_state(self.value(alias), state))

    def state(self, alias: str) -> str | None:
        return self.value(alias)["thread"]["metadata"].get("instance", {}).get("state")

    def remove(self, alias: str) -> None:
        self._run(self._client.delete_object(self._at, alias))

    def items(self, alias: str) -> list[Json]:
        async def read() -> list[Json]:
            return [item async for page in self._client.items(self._at, alias) for item in page]

        found: list[Json] = self._run(read())
        return found

    def aliases(self, prefix: str) -> list[str]:
        async def read() -> list[str]:
            return [row["alias"] async for page in self._client.objects(self._at, prefix) for row in page]

        found: list[str] = self._run(read())
        return found


def kind(item: Json) -> str:
    """The `metadata.type` of an item; persons' items have none."""
    return str((item.get("metadata") or {}).get("type", "person"))


def brief(item: Json) -> str:
    """The text that people read of an item."""
    return str(item["content"][0]["text"])


@dataclass
class FleetUnderTest:
    """A fleet that is up, and the eyes and hands of its tests."""

    base: Path
    config: FleetConfig
    environ: dict[str, str] = field(repr=False)
    platform: RunningPlatform
    person: Person
    worker: Person
    supervisor: Supervisor = field(init=False)

    @property
    def alpha(self) -> Path:
        return self.base / "alpha"

    @property
    def beta(self) -> Path:
        return self.base / "beta"

    def folder(self, name: str, root: Path | None = None) -> Path:
        """Make a work folder below a host's root."""
        folder = (root or self.alpha) / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def record(self, alias: str) -> Record:
        async def read() -> Record:
            store = Store(str(self.config.redis.url), self.config.redis.namespace)
            try:
                return await Records(store).read(ThreadRef(self.platform.session_id, alias))
            finally:
                await store.close()

        return asyncio.run(read())

    def said(self, alias: str) -> list[Json]:
        """What the fleet has posted into a thread."""
        return [item for item in self.person.items(alias) if item["user_id"] == self.platform.worker_user_id]

    def turn_ends(self, alias: str) -> list[Json]:
        return [item for item in self.said(alias) if kind(item) == "turn_end"]

    def await_turns(self, alias: str, count: int = 1) -> list[Json]:
        """Wait until `count` turns have ended; return what was said."""
        wait_until(
            lambda: len(self.turn_ends(alias)) >= count,
            PATIENCE_S,
            lambda: f"{alias}: not {count} turns: {[brief(i) for i in self.said(alias)]} {self.record(alias)}",
        )
        return self.said(alias)

    def await_state(self, alias: str, state: str) -> None:
        wait_until(lambda: self.person.state(alias) == state, PATIENCE_S, f"{alias} is not {state}")

    def await_said(self, alias: str, text: str) -> Json:
        """Wait for an item whose brief contains `text`."""
        return wait_until(
            lambda: next((item for item in self.said(alias) if text in brief(item)), None),
            PATIENCE_S,
            f"{alias} does not say {text!r}",
        )

    def audits(self, alias: str) -> list[str]:
        """Types of the audit items about a thread, in order."""
        return [
            kind(item)
            for item in self.person.items("worker")
            if (item["metadata"].get("thread") or {}).get("alias") == alias
        ]

    def call(self, task: str, *args: object, **kwargs: object) -> None:
        """`celery call`, as an operator would."""
        arguments = ["--args", json.dumps(args), "--kwargs", json.dumps(kwargs)]
        command = [sys.executable, "-m", "celery", "-A", "fleet", "call", task, *arguments]
        subprocess.run(command, env=self.environ, check=True, capture_output=True, timeout=60)

    def send(self, task: str, *args: object, queue: str = "fleet", copies: int = 1) -> None:
        """Send a task message from this process, `copies` times."""
        app = Celery(broker=self.config.redis.url)
        app.conf.broker_transport_options = {"global_keyprefix": f"{self.config.redis.namespace}:celery:"}
        with app:
            for _ in range(copies):
                app.send_task(task, args=args, queue=queue, ignore_result=True)

    def agents_alive(self, folder: Path) -> list[int]:
        """Processes of scripted agents that work in `folder`."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "cwd").readlink() == folder.resolve():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def is_of(self, process: psutil.Process) -> bool:
        """Whether a process belongs to this fleet."""
        try:
            return Path(process.environ().get("FLEET_HOME", "/")).is_relative_to(self.base)
        except psutil.Error:
            return False

    def host_children(self, host: str) -> list[Child]:
        home = self.base / "home" / "hosts" / host
        home.mkdir(parents=True, exist_ok=True)
        env = {**self.environ, "FLEET_HOME": str(home)}
        return machine.host_children(self.config, env, host)

    @contextmanager
    def also(self, *children: Child) -> Iterator[None]:
        """Run further processes for the time of a test."""
        with Supervisor(children, self.base / "home" / "logs"):
            yield

    def await_host(self, name: str) -> None:
        async def alive() -> bool:
            store = Store(str(self.config.redis.url), self.config.redis.namespace)
            try:
                return any(host.alive for host in await Hosts(store).all() if host.name == name)
            finally:
                await store.close()

        wait_until(lambda: asyncio.run(alive()), PATIENCE_S, f"{name} is not up")


def write_config(base: Path, platform: RunningPlatform, **more: Any) -> Path:
    """Write `fleet.yaml` and the script; hosts: alpha, beta (also a root below alpha's), and gamma, who is not up."""
    script = base / "script.yaml"
    script.write_text(SCRIPT)
    for name in ("alpha/inner", "beta", "gamma"):
        (base / name).mkdir(parents=True, exist_ok=True)
    session = {
        "org_id": platform.org_id,
        "blob_id": platform.blob_id,
        "revision_id": platform.revision_id,
        "session_id": platform.session_id,
    }
    config = {
        "polling": {"interval_idle_ms": INTERVAL_MS, "interval_active_ms": INTERVAL_MS},
        "turns": {"lease_s": LEASE_S, "shutdown_grace_s": 1},
        "hosts": {
            "alpha": {"work_folders": [str(base / "alpha")]},
            "beta": {"work_folders": [str(base / "beta"), str(base / "alpha" / "inner")]},
            "gamma": {"work_folders": [str(base / "gamma")]},
        },
        "agents": {"scripted": {"script": str(script), "permissions": "autonomous", "hold_s": HOLD_S}},
        "sections": [{"name": "demo", "session": session}],
    }
    file = base / "fleet.yaml"
    file.write_text(yaml.safe_dump(config | more))
    return file


@contextmanager
def fleet_under_test(base: Path, redis: RunningRedis | PreparedRedis, **more: Any) -> Iterator[FleetUnderTest]:
    """Run platform, beat, and the workers of alpha and beta."""
    with running_platform(base / "platform") as platform:
        file = write_config(base, platform, **more)
        environ = {
            **os.environ,
            "FLEET_REDIS_URL": redis.url,
            "BLOBHUB_API_URL": platform.url,
            "BLOBHUB_API_KEY": platform.worker_key,
        }
        config = load_config(file, environ)
        home = base / "home"
        home.mkdir()
        environ = {
            **environ,
            "FLEET_CONFIG": str(file),
            "FLEET_HOME": str(home),
            "FLEET_HOST": "alpha",
        }
        person, worker = Person(platform, platform.person_key), Person(platform, platform.worker_key)
        fleet = FleetUnderTest(base, config, environ, platform, person, worker)
        hosts = [fleet.host_children("alpha"), fleet.host_children("beta")]
        children = [[machine.beat_child(environ, home), *(child for host in hosts for child in host)]]
        try:
            with Supervisor(children, home / "logs") as fleet.supervisor:
                yield fleet
        finally:
            person.close()
            worker.close()
