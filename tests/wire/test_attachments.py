"""Attachments against the embedded platform: real uploads, and work folders that are not to be trusted."""

from __future__ import annotations

import asyncio
import gzip
import os
import stat
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fleet import attachments, attempt, turn
from fleet.attachments import Fetched, fetch
from fleet.envelope import new_thread, with_state
from fleet.events import Agent, AgentDiedError, AgentEvent, Ended, Image, SessionStarted, TurnHost, TurnRequest
from fleet.platform.client import FILE_MAX_BYTES, PlatformClient, SessionRef
from fleet.platform.errors import PlatformError, RefusedError
from fleet.sandbox.platform_server import RunningPlatform
from tests.wire.stage import Sandbox, Stage

INBOX = ".blobhub/inbox"
PNG = b"\x89PNG\r\n\x1a\n" + b"." * 3992
MIB = 1024 * 1024

Json = dict[str, Any]
T = TypeVar("T")


class Callers:
    """The worker and a person, each with a connection that many tests use."""

    def __init__(self, platform: RunningPlatform, runner: asyncio.Runner) -> None:
        self.worker = PlatformClient(platform.url, platform.worker_key)
        self.person = PlatformClient(platform.url, platform.person_key)
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, 30))


@dataclass
class Desk:
    """A work folder, a session, and a person who uploads files into it."""

    sandbox: Sandbox
    callers: Callers
    at: SessionRef
    work: Path

    @property
    def inbox(self) -> Path:
        return self.work / INBOX

    def upload(self, alias: str, data: bytes, content_type: str = "application/octet-stream") -> Json:
        """Upload a file and return the block that a person would post with it."""
        name = alias.rpartition("/")[2]
        self.callers.run(self.callers.person.upload_file(self.at, alias, name, content_type, data))
        described = {"alias": alias, "name": name, "content_type": content_type, "size": len(data)}
        return {"type": "file", "file": described}

    def fetch(self, *blocks: Json, item_id: str = "item-1", inbox: str = INBOX) -> Fetched:
        items = [{"id": item_id, "content": list(blocks)}]
        return self.callers.run(fetch(self.callers.worker, self.at, self.work, inbox, items))


@pytest.fixture(scope="module")
def callers(shared_platform: RunningPlatform) -> Iterator[Callers]:
    with asyncio.Runner() as runner:
        callers = Callers(shared_platform, runner)
        yield callers
        callers.run(callers.worker.close())
        callers.run(callers.person.close())


@pytest.fixture
def desk(sandbox: Sandbox, callers: Callers, tmp_path: Path) -> Desk:
    work = tmp_path.resolve() / "work"
    work.mkdir()
    return Desk(sandbox, callers, SessionRef(sandbox.platform.revision_id, sandbox.session()), work)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "item-1").mkdir(parents=True)
    (folder / "item-1" / "a.txt").write_text("untouched")
    return folder


def words(fetched: Fetched) -> list[str]:
    return list(fetched.words.values())


def untouched(outside: Path) -> bool:
    files = [path for path in outside.rglob("*") if path.is_file()]
    return [path.read_text() for path in files] == ["untouched"]


def test_a_file_arrives_whole_private_and_hidden_from_git(desk: Desk):
    data = bytes(range(256)) * 50
    fetched = desk.fetch(desk.upload("up/data.bin", data))
    assert fetched == Fetched(
        {("item-1", 0): "[attached file: .blobhub/inbox/item-1/data.bin (application/octet-stream, 13 KB)]"}
    )
    file = desk.inbox / "item-1" / "data.bin"
    assert file.read_bytes() == data
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (desk.inbox / ".gitignore").read_text() == "*\n"


def test_an_image_is_handed_over_as_what_it_is_not_as_what_it_claims_to_be(desk: Desk):
    image = desk.upload("shot.txt", PNG, "text/plain")
    liar = desk.upload("liar.png", b"<html>", "image/png")
    fetched = desk.fetch({"type": "text", "text": "look"}, image, liar)
    path = desk.inbox / "item-1" / "shot.txt"
    assert fetched.images == (Image(path, "image/png", PNG),)
    assert fetched.words == {
        ("item-1", 1): "[attached file: .blobhub/inbox/item-1/shot.txt (image/png, 4 KB)]",
        ("item-1", 2): "[attached file: .blobhub/inbox/item-1/liar.png (image/png, 6 bytes)]",
    }


def test_images_beyond_what_a_model_takes_stay_files(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attachments, "IMAGE_MAX_BYTES", len(PNG))
    monkeypatch.setattr(attachments, "IMAGES_MAX_BYTES", 2 * len(PNG) + 100)
    large = desk.upload("large.png", PNG + b".")
    blocks = [desk.upload(f"{n}.png", PNG) for n in range(3)]
    small = desk.upload("small.png", PNG[:100])
    fetched = desk.fetch(large, *blocks, small)
    assert [image.path.name for image in fetched.images] == ["0.png", "1.png", "small.png"]
    assert fetched.unavailable == ()


def test_what_the_block_does_not_say_the_platform_does(desk: Desk):
    desk.upload("notes.md", b"hello", "text/markdown")
    fetched = desk.fetch({"type": "file", "file": {"alias": "notes.md"}})
    assert words(fetched) == ["[attached file: .blobhub/inbox/item-1/notes.md (text/markdown, 5 bytes)]"]


def test_what_cannot_be_fetched_is_named_and_hinders_nothing_else(desk: Desk):
    missing = {"type": "file", "file": {"alias": "missing.txt"}}
    invalid = {"type": "file", "file": {"alias": "../secret", "name": "s.txt"}}
    fetched = desk.fetch(missing, desk.upload("a.txt", b"a"), invalid)
    assert fetched.unavailable == (
        "missing.txt: there is no such file",
        "s.txt: its alias is not valid",
    )
    assert fetched.words[("item-1", 0)] == ("[attached file missing.txt could not be fetched: there is no such file]")
    assert (desk.inbox / "item-1" / "a.txt").read_bytes() == b"a"


@pytest.mark.parametrize("item_id", ["../x", "..", "a/b", "", "x" * 300])
def test_an_item_id_that_is_no_name_makes_no_folder(desk: Desk, item_id: str):
    fetched = desk.fetch(desk.upload("a.txt", b"a"), item_id=item_id)
    assert fetched.unavailable == ("a.txt: the id of its message is no name for a folder",)
    assert [path.name for path in desk.inbox.iterdir()] == [".gitignore"]


def test_a_later_attempt_fetches_only_what_is_not_there_whole(desk: Desk):
    blocks = [desk.upload("a.png", PNG), desk.upload("b.txt", b"bb")]
    first = desk.fetch(*blocks)
    (desk.inbox / "item-1" / "b.txt").write_bytes(b"b")
    desk.sandbox.reset_requests()
    assert desk.fetch(*blocks) == first
    assert desk.sandbox.requests()["download_session_file"] == 1
    assert (desk.inbox / "item-1" / "b.txt").read_bytes() == b"bb"


def test_a_platform_that_fails_for_a_moment_is_asked_again(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attachments, "FIRST_PAUSE_S", 0.01)
    block = desk.upload("a.txt", b"a")
    kinds = ("429", "500_before", "cut_before")
    desk.sandbox.conditions(faults=[{"match": "download_session_file", "kind": kind, "times": 1} for kind in kinds])
    assert desk.fetch(block).unavailable == ()


def test_a_platform_that_keeps_failing_is_given_up(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attachments, "DOWNLOAD_MAX_S", 0.4)
    block = desk.upload("a.txt", b"a")
    desk.sandbox.conditions(faults=[{"match": "download_session_file", "kind": "500_before"}])
    assert desk.fetch(block).unavailable == ("a.txt: the platform did not answer in time",)
    desk.sandbox.conditions(faults=[{"match": "download_session_file", "kind": "delay", "delay_ms": 20_000.0}])
    assert desk.fetch(block).unavailable == ("a.txt: the platform did not answer in time",)


def test_a_turn_takes_a_bounded_number_of_files(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attachments, "MAX_FILES", 2)
    fetched = desk.fetch(*[desk.upload(f"{n}.txt", b"x") for n in range(3)])
    assert fetched.unavailable == ("2.txt: a turn has at most 2 files",)


def test_the_largest_file_of_the_platform_arrives(desk: Desk):
    data = os.urandom(4 * MIB)
    assert words(desk.fetch(desk.upload("large.bin", data)))[0].endswith("(application/octet-stream, 4.2 MB)]")
    assert (desk.inbox / "item-1" / "large.bin").read_bytes() == data


@pytest.mark.parametrize(
    "inbox", ["/etc", "..", "../x", "a/../b", ".", "", "link", "link/in", "file", "nul\0", "x" * 300]
)
def test_an_inbox_that_is_no_path_of_its_own_in_the_work_folder_is_not_used(desk: Desk, outside: Path, inbox: str):
    (desk.work / "link").symlink_to(outside)
    (desk.work / "file").write_text("")
    fetched = desk.fetch(desk.upload("a.txt", b"a"), inbox=inbox)
    assert fetched.unavailable == ("a.txt: the inbox of this thread can't be used",)
    assert untouched(outside)
    assert sorted(path.name for path in desk.work.iterdir()) == ["file", "link"]


def test_a_link_to_another_place_in_the_work_folder_is_not_followed_either(desk: Desk):
    (desk.work / "src").mkdir()
    (desk.work / "link").symlink_to("src")
    assert desk.fetch(desk.upload("a.txt", b"a"), inbox="link/in").unavailable
    assert list((desk.work / "src").iterdir()) == []


def test_a_linked_item_folder_leads_nowhere(desk: Desk, outside: Path):
    desk.inbox.mkdir(parents=True)
    (desk.inbox / "item-1").symlink_to(outside / "item-1")
    fetched = desk.fetch(desk.upload("a.txt", b"a"))
    assert fetched.unavailable == ("a.txt: it can't be written: Not a directory",)
    assert untouched(outside)


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "fifo"])
def test_what_has_a_files_name_is_replaced_and_never_written_through(desk: Desk, outside: Path, kind: str):
    folder = desk.inbox / "item-1"
    folder.mkdir(parents=True)
    match kind:
        case "link":
            (folder / "a.txt").symlink_to(outside / "item-1" / "a.txt")
        case "dangling link":
            (folder / "a.txt").symlink_to(outside / "made")
        case "hard link":
            (folder / "a.txt").hardlink_to(outside / "item-1" / "a.txt")
        case "fifo":
            os.mkfifo(folder / "a.txt")
    assert desk.fetch(desk.upload("a.txt", b"untouche?")).unavailable == ()
    assert (folder / "a.txt").read_bytes() == b"untouche?"
    assert (folder / "a.txt").lstat().st_nlink == 1
    assert untouched(outside)


def test_a_folder_that_has_a_files_name_stays(desk: Desk):
    (desk.inbox / "item-1" / "a.txt").mkdir(parents=True)
    fetched = desk.fetch(desk.upload("a.txt", b"a"))
    assert fetched.unavailable == ("a.txt: it can't be written: Is a directory",)
    assert (desk.inbox / "item-1" / "a.txt").is_dir()


class Dying:
    """An agent that dies in its first turn before it has taken the prompt, as a runtime that has no other."""

    def __init__(self) -> None:
        self.requests: list[TurnRequest] = []

    def load(self, agent_type: str) -> Agent:
        return self

    def end_leftovers(self, process_file: Path, grace_s: float) -> int:
        return 0

    async def turn(self, request: TurnRequest, host: TurnHost) -> AsyncGenerator[AgentEvent, None]:
        self.requests.append(request)
        if len(self.requests) == 1:
            raise AgentDiedError("at once")
        yield SessionStarted("session")
        yield Ended(ok=len(self.requests) == 3, error="overloaded", transient=True)

    def recorded(self, request: TurnRequest) -> list[AgentEvent]:
        return []


def test_a_turn_hands_over_its_attachments_with_its_prompt_and_tells_once_what_is_missing(
    play: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attempt, "RETRY_PAUSE_S", 0.01)
    agent = Dying()

    async def scene(stage: Stage) -> None:
        await stage.person.upload_file(stage.at, "up/shot.png", "shot.png", "image/png", PNG)
        value = new_thread(str(stage.folder), "scripted", "autonomous")
        value["thread"]["metadata"]["attachments"] = {"inbox": "in"}
        await stage.person.upload_object(stage.at, "t", value)
        shot, lost = ({"type": "file", "file": {"alias": alias}} for alias in ("up/shot.png", "up/lost.txt"))
        content = [{"type": "text", "text": "Look:"}, shot, lost]
        said = await stage.person.post_item(stage.at, "t", {"content": content, "metadata": {}})
        await stage.person.upload_object(stage.at, "t", with_state(value, "pending"))
        await stage.poll()
        for _ in range(2):
            epoch = (await stage.record("t")).epoch
            await turn.run_turn(stage.fleet, agent, stage.ref("t"), epoch, 1, asyncio.Event())
        await stage.settle()

        path = f"in/{said['id']}/shot.png"
        prompt = f"Look:\n\n[attached file: {path} (image/png, 4 KB)]\n\n"
        prompt += "[attached file lost.txt could not be fetched: there is no such file]"
        assert [request.prompt for request in agent.requests] == [prompt, prompt, attempt.CONTINUE]
        image = Image(stage.folder / path, "image/png", PNG)
        assert [request.images for request in agent.requests] == [(image,), (image,), ()]
        told = [text for text in await stage.texts("t") if text.startswith("Attachment unavailable")]
        assert told == ["Attachment unavailable: lost.txt: there is no such file"]

    play(scene)


def download_from(answer: Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]) -> tuple[bytes, Json]:
    """Download a file from a server that reads a request and then does as `answer` says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            await answer(writer)
        writer.close()

    async def run() -> tuple[bytes, Json]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with PlatformClient(f"http://127.0.0.1:{port}", "key") as client:
                return await client.download_file(SessionRef("r", "s"), "a")

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_an_answer_without_an_end_is_left_at_the_bound():
    sent = 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(64 * 1024))
            await writer.drain()
            sent += 64 * 1024

    with pytest.raises(RefusedError, match="file_too_large"):
        download_from(answer)
    assert sent < 4 * FILE_MAX_BYTES


def test_an_answer_that_is_packed_unasked_is_not_unpacked():
    async def answer(writer: asyncio.StreamWriter) -> None:
        body = gzip.compress(bytes(64 * MIB), 1)
        envelope = b'{"status": "success", "object": {}}'
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nX-Response-Body: %b\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (envelope, len(body)) + body)
        await writer.drain()

    with pytest.raises(PlatformError, match="something else than its bytes"):
        download_from(answer)
