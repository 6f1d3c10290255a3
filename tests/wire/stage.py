"""The domain without Celery: real Redis, real HTTP, and nudges that are collected and given by hand."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from fleet import activation, drain, inbound, sections, start
from fleet.config import Environment, FleetConfig
from fleet.context import Fleet
from fleet.envelope import new_thread, with_state
from fleet.hosts import Host
from fleet.platform.client import PlatformClient, SessionRef
from fleet.record import Record
from fleet.redaction import Redactor
from fleet.refs import ThreadRef
from fleet.sandbox.platform_server import RunningPlatform
from fleet.signing import Seal
from fleet.store import Store

T = TypeVar("T")
Json = dict[str, Any]

#: Rounds of nudges after which a scene must have come to rest.
ROUNDS = 20


@dataclass
class CollectedNudges:
    """`fleet.context.Nudges` that keeps each nudge once, as (name, argument)."""

    waiting: dict[tuple[str, Any], None] = field(default_factory=dict)

    def _keep(self, name: str, argument: Any) -> None:
        self.waiting[name, argument] = None

    async def poll_sessions(self, names: list[str]) -> None:
        self._keep("poll_sessions", tuple(names))

    async def activate(self, ref: ThreadRef) -> None:
        self._keep("activate", ref)

    async def ingest(self, ref: ThreadRef) -> None:
        self._keep("ingest", ref)

    async def start_thread(self, record: Record) -> None:
        self._keep("start_thread", (record.ref, record.epoch))

    async def run_turn(self, record: Record) -> None:
        self._keep("run_turn", (record.ref, record.epoch, record.turn))

    async def finish_turn(self, record: Record) -> None:
        self._keep("finish_turn", (record.ref, record.epoch, record.turn))

    async def post_items(self, ref: ThreadRef) -> None:
        self._keep("post_items", ref)


@dataclass
class Stage:
    """One section with a fresh session, a host `alpha`, and a person. Turns are not run here."""

    fleet: Fleet
    nudges: CollectedNudges
    at: SessionRef
    person: PlatformClient
    worker_user: str
    folder: Path

    def ref(self, alias: str) -> ThreadRef:
        return ThreadRef(self.at.session_id, alias)

    async def poll(self) -> None:
        """Poll the section once, and give every nudge but those of turns until none is left."""
        await sections.poll_section(self.fleet, self.fleet.config.sections[0])
        await self.settle()

    async def settle(self) -> None:
        for _ in range(ROUNDS):
            due = [nudge for nudge in self.nudges.waiting if nudge[0] not in ("run_turn", "finish_turn")]
            if not due:
                return
            for name, argument in due:
                del self.nudges.waiting[name, argument]
                await self._give(name, argument)
        raise AssertionError(f"the scene does not come to rest: {list(self.nudges.waiting)}")

    async def _give(self, name: str, argument: Any) -> None:
        match name:
            case "activate":
                await activation.activate(self.fleet, argument)
            case "ingest":
                await inbound.ingest(self.fleet, argument)
            case "start_thread":
                await start.start_thread(self.fleet, *argument)
            case "post_items":
                await drain.drain(self.fleet, argument)

    async def hand_over(self, alias: str, *texts: str) -> None:
        value = new_thread(str(self.folder), "scripted", "autonomous")
        await self.person.upload_object(self.at, alias, value)
        for text in texts:
            await self.say(alias, text)
        await self.person.upload_object(self.at, alias, with_state(value, "pending"))

    async def say(self, alias: str, text: str, **metadata: Any) -> str:
        item = {"content": [{"type": "text", "text": text}], "metadata": metadata}
        return str((await self.person.post_item(self.at, alias, item))["id"])

    async def items(self, alias: str) -> list[Json]:
        return [item async for page in self.person.items(self.at, alias) for item in page]

    async def texts(self, alias: str) -> list[str]:
        """What the fleet said in a thread, as people read it."""
        own = [item for item in await self.items(alias) if item["user_id"] == self.worker_user]
        return [item["content"][0]["text"] for item in own]

    async def inbox(self, alias: str) -> list[str]:
        return [item["content"][0]["text"] for item in await self.fleet.inbox.waiting(self.ref(alias))]

    async def record(self, alias: str) -> Record:
        return await self.fleet.records.read(self.ref(alias))


class Sandbox:
    """The embedded platform's own endpoints."""

    def __init__(self, platform: RunningPlatform) -> None:
        self.platform = platform
        self._http = httpx.Client(base_url=platform.url, headers={"X-API-Key": platform.person_key})

    def conditions(self, **changes: Any) -> None:
        self._http.post("/sandbox/conditions", json=changes).raise_for_status()

    def session(self) -> str:
        body = {"revision_id": self.platform.revision_id, "session_id": uuid.uuid4().hex}
        answer = self._http.post("/sandbox/sessions", json=body).raise_for_status().json()
        return str(answer["session"]["id"])

    def set_session(self, session: str, status: str) -> None:
        self._http.post(f"/sandbox/sessions/{session}/status", json={"status": status}).raise_for_status()

    def set_revision(self, **changes: str) -> None:
        self._http.post(f"/sandbox/revisions/{self.platform.revision_id}", json=changes).raise_for_status()

    def reset_requests(self) -> None:
        self._http.delete("/sandbox/requests").raise_for_status()

    def requests(self) -> dict[str, int]:
        counts: dict[str, int] = self._http.get("/sandbox/requests").raise_for_status().json()["requests"]
        return counts

    def close(self) -> None:
        self._http.close()


def on_stage(
    sandbox: Sandbox,
    redis_url: str,
    base: Path,
    scene: Callable[[Stage], Awaitable[T]],
    prefix: str = "",
    signing_key: str | None = None,
) -> T:
    """Play `scene` with a fleet of one host, `alpha`, that serves a session of its own."""
    platform = sandbox.platform
    session = sandbox.session()
    folder = base / "repos" / "one"
    folder.mkdir(parents=True, exist_ok=True)
    where = {
        "org_id": platform.org_id,
        "blob_id": platform.blob_id,
        "revision_id": platform.revision_id,
        "session_id": session,
        "session_prefix": prefix,
    }
    values = {
        "platform": {"url": platform.url},
        "redis": {"url": redis_url},
        "hosts": {"alpha": {"work_folders": [str(base / "repos")]}},
        "agents": {"scripted": {"script": str(base / "script.yaml")}},
        "sections": [{"name": "one", "session": where}],
    }

    async def play() -> T:
        nudges = CollectedNudges()
        fleet = Fleet(
            FleetConfig.model_validate(values, context={"folder": base}),
            Environment(home=base / "home", host="alpha"),
            Store(redis_url, "stage"),
            PlatformClient(platform.url, platform.worker_key),
            nudges,
            frozenset({"scripted"}),
            frozenset({"scripted"}),
            Redactor(["the-key-of-a-provider"]),
            Seal(signing_key),
        )
        roots = (str(base / "repos"),)
        await fleet.hosts.beat(Host("alpha", roots, roots, 4, ("scripted",), "1"))
        async with PlatformClient(platform.url, platform.person_key) as person:
            at = SessionRef(platform.revision_id, session)
            try:
                return await scene(Stage(fleet, nudges, at, person, platform.worker_user_id, folder))
            finally:
                await fleet.close()

    return asyncio.run(play())
