"""Attachments: the files that persons add to their messages, put into the work folder before the agent starts.

A `file` block of an item, `{"type": "file", "file": {"alias", "name", "content_type", "size"}}`, names a session file
(protocol §1, `download_session_file`). It becomes `INBOX/ITEM_ID/NAME` below the work folder, and the prompt names it
where the block stood. One that can't be fetched is named there too, with the reason, and fails nothing.

The block is untrusted, and so is the work folder: every folder on the way is opened relative to the one above it and
never through a symlink, and what has a file's name already is never opened for writing, but replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from fleet import artifact_walk
from fleet.aliases import is_alias, is_id
from fleet.artifact_walk import Outbox, OutboxError, UnreadableError
from fleet.events import Image
from fleet.items import clean
from fleet.platform.client import FILE_MAX_BYTES, PlatformClient, SessionRef
from fleet.platform.errors import AccessDeniedError, PlatformError, RefusedError, TransientError

Json = dict[str, Any]
#: Where a `file` block stands: its item's id, and its index among the item's blocks.
Place = tuple[str, int]

#: Files of one turn. Bounds what a message can put on the host's disk: 400 MiB.
MAX_FILES = 100
#: Downloads at once. Bounds the memory: each file is held whole until it is written.
PARALLEL_DOWNLOADS = 4
#: Seconds for one file with all its attempts: longer than a restart of the platform.
DOWNLOAD_MAX_S = 60.0
#: Seconds for all files of a turn, which does not start before.
FETCH_MAX_S = 300.0
#: Seconds before the second attempt of a download; doubled for each further one, up to the longest.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0

#: Bytes of a file's name: what Linux and macOS take.
NAME_MAX_BYTES = 255
#: Bytes behind a name's last dot that still are an extension, which a shortened name keeps.
EXTENSION_MAX_BYTES = 32
#: Characters of the platform's word for a refusal.
CODE_CHARS = 100
#: A name for what has none.
UNNAMED = "attachment"

#: Bytes of an image that is handed to the model itself; as base64 they are the 5 MiB that its API takes.
IMAGE_MAX_BYTES = 15 * 1024 * 1024 // 4
#: Bytes of all images of a turn: a request has about 32 MB, and earlier turns' images are part of it.
IMAGES_MAX_BYTES = 8 * 1024 * 1024
#: Images of a turn; with more than 20 the API takes only small ones.
MAX_IMAGES = 20

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_CONTENT_TYPE = re.compile(r"[A-Za-z0-9.+-]{1,64}/[A-Za-z0-9.+-]{1,64}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attachment:
    """One `file` block. `name` is safe, and no other attachment of its item has it; the rest is as it was claimed.

    `size` is in bytes. What the block does not say, or says in another shape, is empty or None.
    """

    place: Place
    alias: str
    name: str
    content_type: str = ""
    size: int | None = None

    @property
    def path(self) -> str:
        """Where it belongs, relative to the inbox."""
        return f"{self.place[0]}/{self.name}"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of a turn's attachments.

    `words` is what the prompt says where each block stood. `images` are those that the model may be handed itself, in
    order. `unavailable` has a clause for each file that could not be fetched.
    """

    words: dict[Place, str] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    unavailable: tuple[str, ...] = ()


async def fetch(
    client: PlatformClient, at: SessionRef, work_folder: Path, inbox: str, items: Iterable[Json]
) -> Fetched:
    """Put the attachments of `items` into the inbox. Repeating it downloads only what is not there in its size.

    `work_folder` is the real path as taken at activation, `inbox` a path relative to it. Never raises for what a
    person, the platform or the work folder does.
    """
    attachments = attachments_in(items)
    if not attachments:
        return Fetched()
    images: tuple[Image, ...] = ()
    try:
        folder = await asyncio.to_thread(_prepared, work_folder, inbox)
    except OutboxError as error:
        log.warning("the inbox %r can't be used: %s", inbox, error)
        results: list[_Arrived | str] = ["the inbox of this thread can't be used"] * len(attachments)
    else:
        results = await _Fetch(client, at, folder).run(attachments)
        images = await asyncio.to_thread(_images, folder, results)
    pairs = list(zip(attachments, results, strict=True))
    return Fetched(
        words={attachment.place: _words(attachment, result, inbox) for attachment, result in pairs},
        images=images,
        unavailable=tuple(f"{attachment.name}: {result}" for attachment, result in pairs if isinstance(result, str)),
    )


def attachments_in(items: Iterable[Json]) -> list[Attachment]:
    """Return the `file` blocks of persons' items, in order."""
    found = []
    for item in items:
        taken: set[str] = set()
        content = item.get("content")
        for index, block in enumerate(content if isinstance(content, list) else []):
            if isinstance(block, dict) and block.get("type") == "file":
                file = block.get("file")
                found.append(_attachment((item["id"], index), file if isinstance(file, dict) else {}, taken))
    return found


def safe_name(text: str) -> str:
    """Return a file's name made of what somebody claims it is: one harmless segment of 1 to 255 bytes."""
    base = re.split(r"[/\\]", unicodedata.normalize("NFC", clean(text)))[-1]
    printable = "".join(char for char in base if char.isprintable())
    return _numbered(printable.lstrip(".- ").rstrip(". ") or UNNAMED, 1)


def image_type(content: bytes) -> str | None:
    """Return the type of an image that models take, by its first bytes; None for anything else."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC if content.startswith(magic)), None)


def _attachment(place: Place, file: Json, taken: set[str]) -> Attachment:
    """Return an attachment with a name that is not in `taken`, and put it there."""
    alias, name, content_type, size = (file.get(key) for key in ("alias", "name", "content_type", "size"))
    alias = alias if isinstance(alias, str) else ""
    wanted = safe_name(name if isinstance(name, str) and name else alias)
    # Some file systems take names that differ only in case for one.
    unique = next(each for n in count(1) if (each := _numbered(wanted, n)).casefold() not in taken)
    taken.add(unique.casefold())
    known_size = size if isinstance(size, int) and not isinstance(size, bool) else None
    return Attachment(place, alias, unique, _content_type(content_type), known_size)


def _content_type(claimed: object) -> str:
    return claimed if isinstance(claimed, str) and _CONTENT_TYPE.fullmatch(claimed) else ""


def _numbered(name: str, number: int) -> str:
    """Return `name` with a number before its extension, 1 being none, in at most `NAME_MAX_BYTES`."""
    suffix = PurePosixPath(name).suffix
    if len(suffix.encode()) > EXTENSION_MAX_BYTES:
        suffix = ""
    tail = (f"-{number}" if number > 1 else "") + suffix
    stem = name.removesuffix(suffix).encode()[: NAME_MAX_BYTES - len(tail.encode())]
    return stem.decode(errors="ignore") + tail


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A file that is in the inbox, under `path`. `is_image`: by its content."""

    path: str
    size: int
    content_type: str
    is_image: bool


class _UnavailableError(Exception):
    """An attachment can't be fetched; `reason` is for the person and the agent."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class _Fetch:
    """The downloads of one turn."""

    def __init__(self, client: PlatformClient, at: SessionRef, inbox: Outbox) -> None:
        self._client = client
        self._at = at
        self._inbox = inbox
        self._gate = asyncio.Semaphore(PARALLEL_DOWNLOADS)
        self._deadline = asyncio.get_running_loop().time() + FETCH_MAX_S

    async def run(self, attachments: Sequence[Attachment]) -> list[_Arrived | str]:
        """Return for each attachment the file, or the reason why there is none."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._result(each)) for each in attachments[:MAX_FILES]]
        left_out = [f"a turn has at most {MAX_FILES} files"] * (len(attachments) - len(tasks))
        return [*(task.result() for task in tasks), *left_out]

    async def _result(self, attachment: Attachment) -> _Arrived | str:
        async with self._gate:
            try:
                return await self._arrive(attachment)
            except _UnavailableError as error:
                return error.reason

    async def _arrive(self, attachment: Attachment) -> _Arrived:
        if not is_id(attachment.place[0]):
            raise _UnavailableError("the id of its message is no name for a folder")
        if not is_alias(attachment.alias):
            raise _UnavailableError("its alias is not valid")
        claimed = attachment.content_type
        content = await asyncio.to_thread(_kept, self._inbox, attachment)
        if content is None:
            content, described = await self._download(attachment.alias)
            claimed = claimed or _content_type(described.get("content_type"))
            await asyncio.to_thread(_write, self._inbox, attachment, content)
        sniffed = image_type(content)
        return _Arrived(attachment.path, len(content), sniffed or claimed, sniffed is not None)

    async def _download(self, alias: str) -> tuple[bytes, Json]:
        """Ask, again and again while the failures are transient."""
        pause = FIRST_PAUSE_S
        try:
            async with asyncio.timeout_at(min(asyncio.get_running_loop().time() + DOWNLOAD_MAX_S, self._deadline)):
                while True:
                    with suppress(TransientError):
                        return await self._client.download_file(self._at, alias)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)
        except TimeoutError:
            raise _UnavailableError("the platform did not answer in time") from None
        except PlatformError as error:
            log.warning("attachment %s was not downloaded: %s", alias, error)
            raise _UnavailableError(_reason(error)) from error


def _reason(error: PlatformError) -> str:
    match error:
        case AccessDeniedError():
            return "there is no such file, or it may not be read"
        case RefusedError(code="not_found"):
            return "there is no such file"
        case RefusedError(code="file_too_large"):
            return "it is larger than 4 MiB"
        case RefusedError(code=code):
            return f"the platform refuses it: {code[:CODE_CHARS]}"
        case _:
            return "the platform's answer can't be understood"


def _prepared(work_folder: Path, inbox: str) -> Outbox:
    """Make the inbox, which ignores itself, and return it.

    Raises:
        OutboxError: it leads out of the work folder, or through a symlink, or can't be made.
    """
    parts = PurePosixPath(inbox).parts
    folder = artifact_walk.locate(work_folder, inbox)
    if ".." in parts or folder.parts != parts:
        raise OutboxError("the inbox is no path below the work folder without symlinks")
    artifact_walk.create(folder)
    return folder


def _kept(inbox: Outbox, attachment: Attachment) -> bytes | None:
    """Return what an earlier attempt of the turn has fetched; None when it has not, or when it has another size."""
    if attachment.size is None:
        return None
    try:
        content = artifact_walk.read(inbox, attachment.path, FILE_MAX_BYTES)
    except UnreadableError:
        return None
    return content if len(content) == attachment.size else None


def _write(inbox: Outbox, attachment: Attachment, content: bytes) -> None:
    """Write a new file, in place of whatever has its name.

    Raises:
        _UnavailableError: the disk is full, or the name belongs to a folder, or the way to it is none.
    """
    item_id, name = attachment.place[0], attachment.name
    try:
        with artifact_walk.opened_folder(inbox, (item_id,), create=True) as folder:
            _remove(name, folder)
            try:
                # "x": never through what is there, not even a dangling symlink.
                with open(name, "xb", opener=lambda name, flags: os.open(name, flags, 0o600, dir_fd=folder)) as file:
                    file.write(content)
            except OSError:
                _remove(name, folder)
                raise
    except OSError as error:
        raise _UnavailableError(f"it can't be written: {error.strerror}") from error


def _remove(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _images(inbox: Outbox, results: Iterable[_Arrived | str]) -> tuple[Image, ...]:
    """Return the images that are within the model's limits, read anew so that no more than those are in memory."""
    images: list[Image] = []
    room = IMAGES_MAX_BYTES
    for each in results:
        if isinstance(each, str) or not each.is_image or len(images) == MAX_IMAGES:
            continue
        with suppress(UnreadableError):
            content = artifact_walk.read(inbox, each.path, min(IMAGE_MAX_BYTES, room))
            if kind := image_type(content):
                images.append(Image(Path(inbox.base, *inbox.parts, each.path), kind, content))
                room -= len(content)
    return tuple(images)


def _words(attachment: Attachment, result: _Arrived | str, inbox: str) -> str:
    """Return what the prompt says where the block stood."""
    if isinstance(result, str):
        return f"[attached file {attachment.name} could not be fetched: {result}]"
    about = ", ".join(filter(None, (result.content_type, _shown_size(result.size))))
    return f"[attached file: {PurePosixPath(inbox, result.path)} ({about})]"


def _shown_size(size: int) -> str:
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1000:.0f} KB" if size < 1_000_000 else f"{size / 1_000_000:.1f} MB"
