"""What a person does with the threads of a section: hand over, say something, stop, and read along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.config import FleetConfig, SectionConfig
from fleet.credentials import api_key, person_key
from fleet.envelope import WORKER_ALIAS, State, parse, with_state, with_work_folder, worker_owner
from fleet.errors import ConfigError, FleetError
from fleet.events import Answer
from fleet.platform.client import Json, PlatformClient, SessionRef, Timestamp
from fleet.platform.errors import AccessDeniedError, RefusedError
from fleet.platform.paging import overlapped
from fleet.prompts import Prompt
from fleet.questions import QuestionWatch, answering
from fleet.reach import FIRST_ANSWER_S, platform_errors

#: Objects that are downloaded at once to tell threads from others.
READS_AT_ONCE = 8
#: Newest items among which an open question is looked for. While one is open its agent waits, so little follows it.
QUESTION_WITHIN = 200


@dataclass(frozen=True, slots=True)
class Newest:
    """A thread's value, its newest items, oldest first, and the question that is open there."""

    envelope: Json
    items: list[Json]
    question: Prompt | None


@dataclass(slots=True)
class Desk:
    """A section, open for a person. `is_person`: the key is a person's own, not the worker's."""

    platform: PlatformClient
    at: SessionRef
    prefix: str
    is_person: bool

    async def hand_over(self, alias: str, value: Json, message: str = "", *, start: bool = True) -> None:
        """Create a thread, say `message` in it, and set it to `pending`.

        Raises:
            FleetError: `thread_exists`; `argument_invalid` where the alias is not of this section, or nobody would
                hear the message.
        """
        if not alias.startswith(self.prefix) or alias == WORKER_ALIAS:
            raise FleetError("argument_invalid", f"the section serves aliases that begin with {self.prefix!r}")
        if message:
            await self._check_is_heard()
        if await self.value(alias) is not None:
            raise FleetError("thread_exists", f"{alias} exists")
        with platform_errors(self.platform.url):
            await self.platform.upload_object(self.at, alias, value)
            if message:
                await self.platform.post_item(self.at, alias, spoken(message))
            if start:
                await self.platform.upload_object(self.at, alias, with_state(value, "pending"))

    async def say(self, alias: str, message: str) -> None:
        """Post `message` into a thread.

        Raises:
            FleetError: `thread_unknown`; `argument_invalid` where nobody would hear it.
        """
        await self._check_is_heard()
        await self.thread(alias)
        with platform_errors(self.platform.url):
            await self.platform.post_item(self.at, alias, spoken(message))

    async def set_state(self, alias: str, state: State) -> None:
        """Write a thread's `instance.state`, the rest of its envelope untouched.

        Raises:
            FleetError: `thread_unknown`.
        """
        value = await self.thread(alias)
        with platform_errors(self.platform.url):
            await self.platform.upload_object(self.at, alias, with_state(value, state))

    async def move(self, alias: str, work_folder: str) -> None:
        """Hand a thread over again with another work folder, in one write.

        Raises:
            FleetError: `thread_unknown`.
        """
        value = with_state(with_work_folder(await self.thread(alias), work_folder), "pending")
        with platform_errors(self.platform.url):
            await self.platform.upload_object(self.at, alias, value)

    async def answer(self, alias: str, prompt: Prompt, answer: Answer) -> None:
        """Post `answer` to the open question `prompt` of a thread.

        Raises:
            FleetError: `thread_unknown`; `argument_invalid` where nobody would hear it, or the question is not open
                any more.
        """
        await self._check_is_heard()
        now = (await self.newest(alias)).question
        if now is None or now.id != prompt.id:
            raise FleetError("argument_invalid", f"the question in {alias} is not open any more")
        with platform_errors(self.platform.url):
            await self.platform.post_item(self.at, alias, answering(prompt.questions, answer))

    async def newest(self, alias: str) -> Newest:
        """Return a thread with its newest items and its open question.

        Raises:
            FleetError: `thread_unknown`.
        """
        value = await self.thread(alias)
        thread = parse(value)
        watch = QuestionWatch(await self.worker())
        with platform_errors(self.platform.url):
            items = (await self.platform.newest_items(self.at, alias, QUESTION_WITHIN))[::-1]
        watch.see(items)
        # With the end of a thread its question is cancelled, though that may not be said yet.
        is_live = thread is not None and thread.state in ("pending", "active")
        return Newest(value, items, watch.open if is_live else None)

    async def worker(self) -> str | None:
        """Return the id of the user who works on the section; None while nobody does."""
        return worker_owner(await self.value(WORKER_ALIAS))

    async def thread(self, alias: str) -> Json:
        """Return a thread's value.

        Raises:
            FleetError: `thread_unknown`.
        """
        value = await self.value(alias)
        if parse(value) is None:
            raise FleetError("thread_unknown", f"{alias} {'does not exist' if value is None else 'is no thread'}")
        assert isinstance(value, dict)  # noqa: S101 - what parses as a thread is a mapping
        return value

    async def value(self, alias: str) -> object:
        """Return an object's value; None when there is no such object."""
        with platform_errors(self.platform.url):
            try:
                return (await self.platform.download_object(self.at, alias)).get("value")
            except RefusedError as error:
                deleted = isinstance(error, AccessDeniedError) and await self.platform.is_open(self.at)
                if deleted or error.code == "not_found":
                    return None
                raise

    async def threads(self) -> list[tuple[str, Json]]:
        """Return alias and value of every thread of the section, by alias."""
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def read(alias: str) -> tuple[str, Json] | None:
            async with gate:
                value = await self.value(alias)
            thread = parse(value)
            return (alias, value) if thread and thread.is_ours and isinstance(value, dict) else None

        aliases: list[str] = []
        with platform_errors(self.platform.url):
            async for page in self.platform.objects(self.at, self.prefix):
                rows = [row for row in page if row.get("type") in (None, "thread")]
                aliases += [str(row["alias"]) for row in rows if row.get("alias") != WORKER_ALIAS]
        found = await asyncio.gather(*(read(alias) for alias in sorted(aliases)))
        return [each for each in found if each is not None]

    async def _check_is_heard(self) -> None:
        """Refuse to speak as the worker's own user: such items are echoes, no agent gets them (protocol §3)."""
        owner = await self.worker() if self.is_person else None
        with platform_errors(self.platform.url):
            is_worker = not self.is_person or (owner and owner == (await self.platform.me()).get("id"))
        if is_worker:
            raise FleetError(
                "person_key_missing", "the key is the worker's own, whose messages are echoes that no agent gets"
            )


@dataclass(slots=True)
class Tail:
    """Reads a thread's items as they come, each once, though lists lag and are strict (protocol §1)."""

    desk: Desk
    alias: str
    _seen: set[str] = field(default_factory=set)
    _newest: Timestamp | None = None

    async def new(self) -> list[Json]:
        """Return the items that came since the last call, oldest first.

        Raises:
            PlatformError: the platform does not answer, or refuses.
        """
        since = None if self._newest is None else overlapped(self._newest)
        found: list[Json] = []
        async for page in self.desk.platform.items(self.desk.at, self.alias, since):
            found += [item for item in page if str(item["id"]) not in self._seen]
        self._seen.update(str(item["id"]) for item in found)
        if found:
            self._newest = found[-1]["created_at"]
        return found


def spoken(text: str) -> Json:
    """Return the item of a person's words."""
    return {"content": [{"type": "text", "text": text}], "metadata": {}}


@asynccontextmanager
async def desk(config: FleetConfig, environ: Mapping[str, str], section: str | None = None) -> AsyncIterator[Desk]:
    """Open a section, by its name or its session's id; the only one when it is not named.

    Raises:
        FleetError: `session_unknown`, `key_missing`, `key_refused` or `platform_unreachable`.
    """
    chosen = chosen_section(config, section)
    own = person_key(environ)
    key = own or api_key(environ, Path.home())
    async with PlatformClient(config.platform.url, key) as platform:
        yield Desk(platform, await _located(platform, chosen), chosen.session.session_prefix, is_person=own is not None)


def chosen_section(config: FleetConfig, name: str | None) -> SectionConfig:
    """Return the section called `name`, or whose session has that id; the only one for None.

    Raises:
        FleetError: `session_unknown`.
    """
    if name is None and len(config.sections) == 1:
        return config.sections[0]
    if not config.sections:
        raise ConfigError("session_unknown", "no section is configured, and no `fleet up` runs with this FLEET_HOME")
    names = ", ".join(each.name for each in config.sections)
    if name is None:
        raise ConfigError("session_unknown", f"--section is needed; configured: {names}")
    for each in config.sections:
        if name in (each.name, each.session.session_id):
            return each
    raise ConfigError("session_unknown", f"{name!r} is no section; configured: {names}")


async def _located(platform: PlatformClient, section: SectionConfig) -> SessionRef:
    where = section.session
    with platform_errors(platform.url):
        try:
            async with asyncio.timeout(FIRST_ANSWER_S):
                revision = await platform.revision(where.org_id, where.blob_id, where.revision_id)
                session = await platform.session(str(revision["id"]), where.session_id)
        except AccessDeniedError:
            raise
        except RefusedError as error:
            raise FleetError("session_unknown", f"section {section.name}: the platform answers {error}") from error
    return SessionRef(str(revision["id"]), str(session["id"]))


def thread_value(value: Json, **agent: Any) -> Json:
    """Return a thread's `value` with more keys in its agent block; empty ones are left out."""
    metadata = value["thread"]["metadata"]
    block = metadata["agent"] | {name: setting for name, setting in agent.items() if setting}
    return {**value, "thread": {**value["thread"], "metadata": {**metadata, "agent": block}}}
