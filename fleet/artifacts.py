"""Publishing what an agent left in its outbox as objects or files of the session (protocol §4, Artifacts).

A file that can't be published is a skip with a reason, never a failed turn.
"""

from __future__ import annotations

import asyncio
import logging
import mimetypes
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fleet import artifact_walk
from fleet.aliases import is_alias
from fleet.artifact_walk import Found, Outbox, OutboxError, UnreadableError
from fleet.items import ARTIFACTS_SHOWN, PATH_BYTES, bounded
from fleet.platform.client import PlatformClient, SessionRef
from fleet.platform.errors import PlatformError, RefusedError, TransientError

#: Bytes of a file that is published as an object: the platform's 5 MiB less room for the object around the text.
OBJECT_MAX_BYTES = 5 * 1024 * 1024 - 64 * 1024
#: Bytes of a file that is published as a session file: the platform's own limit.
FILE_MAX_BYTES = 4 * 1024 * 1024
#: Files read and uploaded at once. Bounds the memory: each is held as text and as the JSON of its request.
PARALLEL_UPLOADS = 4
#: Seconds for one file with all its attempts: longer than a restart of the platform.
UPLOAD_MAX_S = 60.0
#: Seconds for one publication: the turn is closed only then, and a task must end well within an hour, after which Redis
#: would deliver it again.
PUBLISH_MAX_S = 600.0
#: Seconds before the second attempt of an upload; doubled for each further one, up to the longest.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0

Reason = Literal["binary", "too_large", "invalid_alias", "unreadable", "upload_failed", "unsupported_type"]
Upload = Literal["object", "file"]
_Request = Callable[[], Awaitable[None]]

#: The types that Python itself knows, without the host's tables, which would differ from host to host; and what agents
#: write that not every version of Python knows.
_TYPES = mimetypes.MimeTypes()
for _type, _suffix in (
    ("text/markdown", ".md"),
    ("application/yaml", ".yaml"),
    ("application/yaml", ".yml"),
    ("application/toml", ".toml"),
    ("application/jsonl", ".jsonl"),
):
    _TYPES.add_type(_type, _suffix)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Skip:
    """A file that was not published: its path relative to the outbox, made printable and bounded."""

    path: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Published:
    """The report of one publication.

    `aliases` and `skipped` are sorted by relative path and cut to `ARTIFACTS_SHOWN`; the counts are the true totals.
    `error` says why nothing or not everything was looked at.
    """

    aliases: tuple[str, ...] = ()
    skipped: tuple[Skip, ...] = ()
    published_count: int = 0
    skipped_count: int = 0
    error: str | None = None


def prepare_outbox(work_folder: Path, source: str) -> bool:
    """Make the outbox at activation, with a `.gitignore` of `*`; False when publishing must be off (`outbox_invalid`).

    An outbox and a `.gitignore` that are there already stay as they are. `work_folder` is a real path. Blocks.
    """
    try:
        artifact_walk.create(artifact_walk.locate(work_folder, source))
    except OutboxError as error:
        log.warning("no artifacts will be published: %s", error)
        return False
    return True


async def publish(
    client: PlatformClient, at: SessionRef, work_folder: Path, prefix: str, source: str, upload: Upload
) -> Published:
    """Upload every file of the outbox and report. Repeating it is harmless: same aliases, same contents.

    `work_folder` is the real path as taken at activation. An outbox that leads out of it by now, or that is gone, gives
    a report with an `error` and empty lists.
    """
    try:
        outbox, found = await asyncio.to_thread(_find, work_folder, source)
    except OutboxError as error:
        return Published(error=bounded(str(error), PATH_BYTES))
    return await _Publication(client, at, prefix, upload, outbox, found).run()


def _find(work_folder: Path, source: str) -> tuple[Outbox, Found]:
    outbox = artifact_walk.locate(work_folder, source)
    return outbox, artifact_walk.walk(outbox)


class _SkippedError(Exception):
    """The file is not published."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(reason)


class _Publication:
    """One run over the files that were found."""

    def __init__(
        self, client: PlatformClient, at: SessionRef, prefix: str, upload: Upload, outbox: Outbox, found: Found
    ) -> None:
        self._client = client
        self._at = at
        self._prefix = prefix
        self._kind = upload
        self._outbox = outbox
        self._found = found
        self._published: list[str] = []
        self._skipped: dict[str, Reason] = dict.fromkeys(found.unreadable, "unreadable")
        self._published_at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        self._deadline = asyncio.get_running_loop().time() + PUBLISH_MAX_S

    async def run(self) -> Published:
        paths = iter(self._found.files)

        async def publish_next() -> None:
            for path in paths:
                await self._publish(path)

        async with asyncio.TaskGroup() as group:
            for _ in range(PARALLEL_UPLOADS):
                group.create_task(publish_next())
        return self._report()

    def _report(self) -> Published:
        published = sorted(self._published, key=os.fsencode)
        skipped = sorted(self._skipped.items(), key=lambda skip: os.fsencode(skip[0]))
        errors = [self._found.error] if self._found.error else []
        if self._is_late():
            errors.append(f"publishing took more than {PUBLISH_MAX_S:g} s; the files that remained were not uploaded")
        return Published(
            aliases=tuple(self._prefix + path for path in published[:ARTIFACTS_SHOWN]),
            skipped=tuple(Skip(_printable(path), reason) for path, reason in skipped[:ARTIFACTS_SHOWN]),
            published_count=len(published),
            skipped_count=len(skipped),
            error=bounded("; ".join(errors), PATH_BYTES) if errors else None,
        )

    async def _publish(self, path: str) -> None:
        try:
            content = await self._read(path)
            await self._upload(path, self._request(path, content))
        except _SkippedError as skip:
            self._skipped[path] = skip.reason
        else:
            self._published.append(path)

    async def _read(self, path: str) -> bytes:
        if not is_alias(self._prefix + path):
            raise _SkippedError("invalid_alias")
        if self._is_late():
            raise _SkippedError("upload_failed")
        max_bytes = OBJECT_MAX_BYTES if self._kind == "object" else FILE_MAX_BYTES
        try:
            return await asyncio.to_thread(artifact_walk.read, self._outbox, path, max_bytes)
        except UnreadableError as error:
            raise _SkippedError(error.reason) from error

    def _request(self, path: str, content: bytes) -> _Request:
        alias = self._prefix + path
        name = path.rpartition("/")[2]
        if self._kind == "file":
            content_type = _content_type(name, "application/octet-stream")
            return partial(self._client.upload_file, self._at, alias, name, content_type, content)
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise _SkippedError("binary") from error
        artifact = {
            "filename": name,
            "content_type": _content_type(name, "text/plain"),
            "size": len(content),
            "published_at": self._published_at,
        }
        return partial(self._client.upload_object, self._at, alias, _message(text, artifact))

    async def _upload(self, path: str, request: _Request) -> None:
        """Send, again and again while the failures are transient: the write is idempotent, also when it was stored."""
        pause = FIRST_PAUSE_S
        cause: PlatformError | None = None
        try:
            async with asyncio.timeout_at(min(asyncio.get_running_loop().time() + UPLOAD_MAX_S, self._deadline)):
                while True:
                    try:
                        return await request()
                    except TransientError as error:
                        cause = error
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        except TimeoutError:
            log.warning("artifact %s was not uploaded in time: %s", self._prefix + path, cause or "no answer")
        except PlatformError as error:
            if isinstance(error, RefusedError) and error.code == "unsupported_file_type":
                raise _SkippedError("unsupported_type") from error
            log.warning("artifact %s was not uploaded: %s", self._prefix + path, error)
        raise _SkippedError("upload_failed")

    def _is_late(self) -> bool:
        return asyncio.get_running_loop().time() >= self._deadline


def _message(text: str, artifact: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {
        "type": "message",
        "message": {"role": "assistant", "content": content, "metadata": {"artifact": artifact}},
    }


def _content_type(name: str, otherwise: str) -> str:
    kind, encoding = _TYPES.guess_type(name)
    # For `notes.txt.gz` the guess is the type of what is compressed, not of the bytes at hand.
    return kind if kind and not encoding else otherwise


def _printable(path: str) -> str:
    """Return `path` bounded, with U+FFFD for what is not UTF-8 and for what would move a terminal's cursor."""
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in path)
    return bounded(text, PATH_BYTES)
