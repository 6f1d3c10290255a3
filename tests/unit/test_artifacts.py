import asyncio
import errno
import json
import os
import socket
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fleet import artifact_walk, artifacts
from fleet.artifacts import FILE_MAX_BYTES, OBJECT_MAX_BYTES, Published, Skip, prepare_outbox, publish
from fleet.platform.client import SessionRef
from fleet.platform.errors import AccessDeniedError, NotExecutedError, OutcomeUnknownError, RefusedError

AT = SessionRef("revision", "session")
SOURCE = ".out/run1"


class FakePlatform:
    """Keeps what is uploaded. `failures` (alias → errors) are raised once each, `forever` (alias → error) always."""

    def __init__(self, failures=None, forever=None):
        self.objects = {}
        self.files = {}
        self.failures = failures or {}
        self.forever = forever or {}
        self.running = 0
        self.most_running = 0

    async def upload_object(self, at, alias, value):
        await self._accept(at, alias)
        self.objects[alias] = value

    async def upload_file(self, at, alias, name, content_type, data):
        await self._accept(at, alias)
        self.files[alias] = (name, content_type, data)

    async def _accept(self, at, alias):
        assert at == AT
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if self.failures.get(alias):
            raise self.failures[alias].pop(0)
        if alias in self.forever:
            raise self.forever[alias]


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder.resolve()


@pytest.fixture
def outbox(work):
    folder = work / SOURCE
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(autouse=True)
def no_descriptor_stays_open():
    before = len(names("/dev/fd"))
    yield
    assert len(names("/dev/fd")) == before


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(artifacts, "FIRST_PAUSE_S", 0.001)


def published(work, platform=None, *, prefix="p/", source=SOURCE, upload="object"):
    platform = platform or FakePlatform()
    return asyncio.run(publish(platform, AT, work, prefix, source, upload))


def names(folder):
    return [path.name for path in Path(folder).iterdir()]


def text_of(platform, alias):
    return platform.objects[alias]["message"]["content"][0]["text"]


# Preparing


def test_the_outbox_is_created_with_all_parents_and_ignores_itself(work):
    assert prepare_outbox(work, "a/b/c")
    assert (work / "a/b/c/.gitignore").read_text() == "*\n"
    assert names(work / "a/b/c") == [".gitignore"]


def test_preparing_again_changes_neither_files_nor_the_gitignore_of_the_user(work, outbox):
    (outbox / ".gitignore").write_text("mine")
    (outbox / "plan.md").write_text("plan")
    assert prepare_outbox(work, SOURCE)
    assert (outbox / ".gitignore").read_text() == "mine"
    assert (outbox / "plan.md").read_text() == "plan"


def test_a_gitignore_that_is_a_link_is_not_written_through(work, outbox, tmp_path):
    (outbox / ".gitignore").symlink_to(tmp_path / "target")
    assert prepare_outbox(work, SOURCE)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("source", ["..", "../x", "/etc", "a/../../x", "bad\0name", ".", "a/..", "", "x" * 300])
def test_a_source_that_is_not_below_the_work_folder_turns_publishing_off(work, tmp_path, source):
    assert not prepare_outbox(work, source)
    assert names(tmp_path) == ["work"]
    assert names(work) == []


def test_a_source_through_a_link_to_outside_turns_publishing_off(work, tmp_path):
    (tmp_path / "outside").mkdir()
    (work / "link").symlink_to(tmp_path / "outside")
    (work / "dangling").symlink_to(tmp_path / "missing")
    (work / "loop").symlink_to("loop")
    assert not any(prepare_outbox(work, source) for source in ("link", "link/run", "dangling", "loop", "loop/run"))
    assert names(tmp_path / "outside") == []
    assert not (tmp_path / "missing").exists()


def test_a_source_that_passes_through_a_file_turns_publishing_off(work):
    (work / "file").write_text("")
    assert not prepare_outbox(work, "file")
    assert not prepare_outbox(work, "file/run")


def test_a_link_that_stays_inside_the_work_folder_may_lead_to_the_outbox(work):
    (work / "build").mkdir()
    (work / "link").symlink_to("build")
    assert prepare_outbox(work, "link/run")
    (work / "build/run/a.txt").write_text("a")
    assert published(work, source="link/run").aliases == ("p/a.txt",)


# Publishing


def test_files_of_all_levels_are_published_in_the_order_of_their_path_bytes(work, outbox):
    for path in ("b/z.txt", "b.txt", "b-1.txt", "a/deep/er.md", "Z"):
        (outbox / path).parent.mkdir(parents=True, exist_ok=True)
        (outbox / path).write_text(path)
    platform = FakePlatform()
    report = published(work, platform, prefix="projects/p1/")
    aliases = tuple(f"projects/p1/{path}" for path in ("Z", "a/deep/er.md", "b-1.txt", "b.txt", "b/z.txt"))
    assert report == Published(aliases, (), 5, 0, None)
    assert text_of(platform, "projects/p1/b/z.txt") == "b/z.txt"


def test_an_object_is_an_assistant_message_with_the_file_as_text_and_metadata(work, outbox):
    (outbox / "docs").mkdir()
    (outbox / "docs/plan.md").write_bytes("Grüße\r\n".encode())
    platform = FakePlatform()
    published(work, platform)
    artifact = platform.objects["p/docs/plan.md"]["message"]["metadata"]["artifact"]
    published_at = artifact.pop("published_at")
    assert platform.objects["p/docs/plan.md"] == {
        "type": "message",
        "message": {
            "role": "assistant",
            "content": [{"type": "text", "text": "Grüße\r\n"}],
            "metadata": {"artifact": {"filename": "plan.md", "content_type": "text/markdown", "size": 9}},
        },
    }
    assert abs(datetime.fromisoformat(published_at) - datetime.now(UTC)) < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("Makefile", "text/plain"),
        ("x.json", "application/json"),
        ("x.yml", "application/yaml"),
        ("x.md.gz", "text/plain"),
    ],
)
def test_the_content_type_of_text_comes_from_the_name_and_is_plain_otherwise(work, outbox, name, content_type):
    (outbox / name).write_text("x")
    platform = FakePlatform()
    published(work, platform)
    assert platform.objects[f"p/{name}"]["message"]["metadata"]["artifact"]["content_type"] == content_type


def test_the_workers_own_gitignore_is_not_published_and_counts_nowhere(work):
    prepare_outbox(work, SOURCE)
    assert published(work) == Published()
    assert published(work, prefix="no alias/") == Published()


def test_a_gitignore_that_is_not_the_workers_is_an_artifact(work, outbox):
    (outbox / ".gitignore").write_text("*.log\n")
    (outbox / "app").mkdir()
    (outbox / "app/.gitignore").write_text("*\n")
    assert published(work).aliases == ("p/.gitignore", "p/app/.gitignore")


def test_publishing_changes_nothing_in_the_outbox(work, outbox):
    (outbox / "a.txt").write_text("a")
    published(work)
    assert names(outbox) == ["a.txt"]
    assert (outbox / "a.txt").read_text() == "a"


def test_each_reason_names_the_file_that_was_skipped(work, outbox):
    (outbox / "binary.bin").write_bytes(b"\xff\x00")
    (outbox / "has space.txt").write_text("x")
    (outbox / "large.txt").write_bytes(b"x" * (OBJECT_MAX_BYTES + 1))
    (outbox / "refused.txt").write_text("x")
    (outbox / "tab\there").write_text("x")
    platform = FakePlatform(forever={"p/refused.txt": RefusedError("session_not_open", "")})
    report = published(work, platform)
    assert report.skipped == (
        Skip("binary.bin", "binary"),
        Skip("has space.txt", "invalid_alias"),
        Skip("large.txt", "too_large"),
        Skip("refused.txt", "upload_failed"),
        Skip("tab�here", "invalid_alias"),
    )
    assert (report.published_count, report.skipped_count, report.error) == (0, 5, None)


def test_a_file_of_exactly_the_largest_size_is_published(work, outbox):
    (outbox / "large.txt").write_bytes(b"x" * OBJECT_MAX_BYTES)
    assert published(work).aliases == ("p/large.txt",)


def test_a_prefix_that_makes_the_alias_too_long_skips_only_the_files_it_is_too_long_for(work, outbox):
    (outbox / "a").write_text("")
    (outbox / "long-name").write_text("")
    report = published(work, prefix="x" * 250 + "/")
    assert report.aliases == ("x" * 250 + "/a",)
    assert report.skipped == (Skip("long-name", "invalid_alias"),)


def test_session_files_carry_binary_content_with_name_and_type(work, outbox):
    (outbox / "img").mkdir()
    (outbox / "img/a.png").write_bytes(b"\x89PNG\xff")
    (outbox / "blob").write_bytes(b"\xff")
    platform = FakePlatform()
    assert published(work, platform, upload="file").aliases == ("p/blob", "p/img/a.png")
    assert platform.files["p/img/a.png"] == ("a.png", "image/png", b"\x89PNG\xff")
    assert platform.files["p/blob"] == ("blob", "application/octet-stream", b"\xff")


def test_session_files_are_skipped_above_their_own_limit_and_when_the_platform_does_not_take_their_type(work, outbox):
    (outbox / "large").write_bytes(b"x" * (FILE_MAX_BYTES + 1))
    (outbox / "x.exe").write_bytes(b"MZ")
    platform = FakePlatform(forever={"p/x.exe": RefusedError("unsupported_file_type", "")})
    report = published(work, platform, upload="file")
    assert report.skipped == (Skip("large", "too_large"), Skip("x.exe", "unsupported_type"))


def test_lists_are_cut_at_a_hundred_and_the_counts_stay_true(work, outbox):
    for number in range(120):
        (outbox / f"good{number:03}").write_text("")
        (outbox / f"bad {number:03}").write_text("")
    report = published(work)
    assert report.aliases == tuple(f"p/good{number:03}" for number in range(100))
    assert [skip.path for skip in report.skipped] == [f"bad {number:03}" for number in range(100)]
    assert (report.published_count, report.skipped_count) == (120, 120)


def test_a_long_path_is_reported_by_its_head_and_its_tail(work, outbox):
    folder = outbox / ("日" * 80) / ("本" * 80)
    folder.mkdir(parents=True)
    (folder / "report.txt").write_text("x")
    (skip,) = published(work).skipped
    assert len(json.dumps(skip.path)) <= 256
    assert skip.path.startswith("日日")
    assert skip.path.endswith("/report.txt")


# Uploading


def test_an_upload_is_repeated_after_transient_failures(work, outbox):
    (outbox / "a.txt").write_text("a")
    platform = FakePlatform({"p/a.txt": [NotExecutedError("429"), OutcomeUnknownError("502"), OutcomeUnknownError("")]})
    assert published(work, platform).aliases == ("p/a.txt",)
    assert text_of(platform, "p/a.txt") == "a"


def test_an_upload_that_fails_for_good_does_not_hold_up_the_others(work, outbox, monkeypatch):
    monkeypatch.setattr(artifacts, "UPLOAD_MAX_S", 0.05)
    for name in ("a", "b", "c"):
        (outbox / name).write_text(name)
    platform = FakePlatform(forever={"p/a": OutcomeUnknownError("503"), "p/b": AccessDeniedError("forbidden", "")})
    report = published(work, platform)
    assert report == Published(("p/c",), (Skip("a", "upload_failed"), Skip("b", "upload_failed")), 1, 2, None)


def test_a_publication_ends_in_bounded_time_and_counts_what_it_did_not_upload(work, outbox, monkeypatch):
    monkeypatch.setattr(artifacts, "PUBLISH_MAX_S", 0.1)
    files = [f"{number:02}" for number in range(20)]
    for name in files:
        (outbox / name).touch()
    platform = FakePlatform(forever={f"p/{name}": OutcomeUnknownError("503") for name in files})
    report = published(work, platform)
    assert report.skipped == tuple(Skip(name, "upload_failed") for name in files)
    assert "publishing took more than" in report.error


def test_only_a_few_files_are_in_memory_at_once(work, outbox):
    for number in range(20):
        (outbox / str(number)).write_text("")
    platform = FakePlatform()
    published(work, platform)
    assert 1 < platform.most_running <= artifacts.PARALLEL_UPLOADS


# Hostile folders


def test_an_outbox_that_became_a_link_to_outside_publishes_nothing_and_says_so(work, outbox, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    outbox.rmdir()
    outbox.symlink_to(tmp_path / "outside")
    report = published(work)
    assert report == Published(error="the outbox does not resolve to a place inside the work folder")


def test_a_work_folder_that_became_a_link_publishes_nothing_and_says_so(work, outbox, tmp_path):
    work.rename(tmp_path / "moved")
    work.symlink_to(tmp_path / "moved")
    report = published(work)
    assert report.error
    assert report.aliases == ()


@pytest.mark.parametrize("replacement", ["nothing", "file"])
def test_an_outbox_that_is_no_folder_any_more_is_an_error(work, outbox, replacement):
    outbox.rmdir()
    if replacement == "file":
        outbox.write_text("x")
    report = published(work)
    assert report.error.startswith("the outbox can't be opened")
    assert (report.aliases, report.skipped) == ((), ())


def test_links_and_special_files_are_passed_over(work, outbox, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("secret")
    (outbox / "good").write_text("good")
    (outbox / "to-file").symlink_to(tmp_path / "secret")
    (outbox / "to-folder").symlink_to(tmp_path)
    (outbox / "to-good").symlink_to("good")
    os.mkfifo(outbox / "fifo")
    monkeypatch.chdir(outbox)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind("socket")
    assert published(work) == Published(("p/good",), (), 1, 0, None)


def test_a_file_with_a_second_name_is_not_read(work, outbox, tmp_path):
    (tmp_path / "secret").write_text("secret")
    os.link(tmp_path / "secret", outbox / "linked")
    assert published(work).skipped == (Skip("linked", "unreadable"),)


def test_a_link_is_not_even_opened(work, outbox):
    (outbox / "a").symlink_to("b")
    (outbox / "b").write_text("b")
    with pytest.raises(artifact_walk.UnreadableError) as refusal:
        artifact_walk.read(artifact_walk.locate(work, SOURCE), "a", 100)
    assert refusal.value.__cause__.errno == errno.ELOOP


@pytest.mark.parametrize("swap", ["link", "fifo", "folder", "nothing", "hard link"])
def test_a_file_that_became_something_else_after_the_walk_is_unreadable(work, outbox, tmp_path, swap):
    (tmp_path / "secret").write_text("secret")
    located = artifact_walk.locate(work, SOURCE)
    match swap:
        case "link":
            (outbox / "a").symlink_to(tmp_path / "secret")
        case "fifo":
            os.mkfifo(outbox / "a")
        case "folder":
            (outbox / "a").mkdir()
        case "hard link":
            os.link(tmp_path / "secret", outbox / "a")
    with pytest.raises(artifact_walk.UnreadableError) as refusal:
        artifact_walk.read(located, "a", 100)
    assert refusal.value.reason == "unreadable"


def nothing():
    pass


@pytest.fixture
def read_while(work, monkeypatch):
    """Read a file of the outbox while something happens before and after its descriptor is judged."""

    def read(name, before=nothing, after=nothing, max_bytes=100):
        fstat = os.fstat

        def interrupted(descriptor):
            before()
            status = fstat(descriptor)
            after()
            return status

        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", interrupted)
            return artifact_walk.read(artifact_walk.locate(work, SOURCE), name, max_bytes)

    return read


def test_a_hard_link_that_is_taken_away_while_it_is_opened_does_not_pass_as_a_file_with_one_name(
    outbox, tmp_path, read_while
):
    (tmp_path / "secret").write_text("secret")
    os.link(tmp_path / "secret", outbox / "a")
    with pytest.raises(artifact_walk.UnreadableError):
        read_while("a", before=(outbox / "a").unlink)


def test_a_hard_link_that_was_taken_away_and_came_back_does_not_pass_either(outbox, tmp_path, read_while):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    os.link(secret, outbox / "a")

    def come_back():
        # The clock that stamps files must have moved on, as it has in a real race.
        time.sleep(artifact_walk.SETTLE_S)
        secret.rename(outbox / "a")

    with pytest.raises(artifact_walk.UnreadableError):
        read_while("a", before=(outbox / "a").unlink, after=come_back)


def test_a_file_that_is_replaced_while_it_is_read_is_unreadable(work, outbox, read_while):
    (outbox / "a").write_text("old")
    (work / "new").write_text("new")
    with pytest.raises(artifact_walk.UnreadableError):
        read_while("a", after=lambda: (work / "new").replace(outbox / "a"))


def test_a_log_that_is_still_being_written_is_published_as_it_was_read(outbox, read_while):
    (outbox / "log").write_text("one")
    assert read_while("log", after=lambda: (outbox / "log").write_text("one two")) == b"one two"


def test_a_file_that_grows_while_it_is_read_is_too_large_and_not_read_to_its_end(outbox, read_while):
    (outbox / "log").write_text("one")
    with pytest.raises(artifact_walk.UnreadableError) as refusal:
        read_while("log", after=lambda: os.truncate(outbox / "log", 1 << 40))
    assert refusal.value.reason == "too_large"


@pytest.fixture
def refuse_to_open(monkeypatch):
    """Deny access to a name, also where the tests run as root."""
    opened = os.open

    def refuse(name):
        def refusing(path, *arguments, **options):
            if path == name:
                raise PermissionError(errno.EACCES, "Permission denied")
            return opened(path, *arguments, **options)

        monkeypatch.setattr(os, "open", refusing)

    return refuse


def test_a_file_that_can_not_be_opened_is_unreadable(work, outbox, refuse_to_open):
    (outbox / "a").write_text("")
    (outbox / "b").write_text("")
    refuse_to_open("a")
    report = published(work)
    assert (report.aliases, report.skipped) == (("p/b",), (Skip("a", "unreadable"),))


def test_a_folder_that_can_not_be_listed_is_reported_by_its_name(work, outbox, refuse_to_open):
    (outbox / "closed").mkdir()
    (outbox / "closed/a").write_text("")
    refuse_to_open("closed")
    assert published(work) == Published((), (Skip("closed", "unreadable"),), 0, 1, None)


def test_names_that_are_not_utf8_are_skipped_with_a_path_that_json_can_carry(work, outbox):
    (outbox / os.fsdecode(b"caf\xe9\x1b[2J")).touch()
    (skip,) = published(work).skipped
    assert skip == Skip("caf��[2J", "invalid_alias")


def test_a_huge_sparse_file_is_not_read(work, outbox):
    (outbox / "sparse").touch()
    os.truncate(outbox / "sparse", 1 << 40)
    assert published(work).skipped == (Skip("sparse", "too_large"),)


def test_too_many_entries_end_the_walk_and_what_was_found_is_published(work, outbox, monkeypatch):
    monkeypatch.setattr(artifact_walk, "MAX_ENTRIES", 5)
    for number in range(8):
        (outbox / str(number)).write_text("")
    report = published(work)
    assert report.published_count == 5
    assert report.error == "the outbox has more than 5 entries; the others were left out"


def test_exactly_the_allowed_number_of_entries_is_no_error(work, outbox, monkeypatch):
    monkeypatch.setattr(artifact_walk, "MAX_ENTRIES", 5)
    for number in range(5):
        (outbox / str(number)).write_text("")
    assert published(work).error is None


def test_folders_too_deep_for_an_alias_are_left_out_with_an_error(work, outbox, monkeypatch):
    monkeypatch.setattr(artifact_walk, "MAX_DEPTH", 3)
    (outbox / "a/b/c").mkdir(parents=True)
    (outbox / "a/b/file").write_text("")
    (outbox / "a/b/c/file").write_text("")
    report = published(work)
    assert report.aliases == ("p/a/b/file",)
    assert report.error == "folders 3 levels down were left out"


def test_a_tree_deeper_than_the_longest_path_is_walked(work, outbox):
    name = "d" * 200
    folder = os.open(outbox, os.O_RDONLY)
    for _ in range(40):
        os.mkdir(name, dir_fd=folder)
        above, folder = folder, os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(above)
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    report = published(work)
    assert (report.skipped_count, report.error) == (1, None)
    assert report.skipped[0].path.endswith("/bottom")


def test_a_walk_that_takes_too_long_ends_with_an_error(work, outbox, monkeypatch):
    monkeypatch.setattr(artifact_walk, "WALK_MAX_S", -1.0)
    (outbox / "a").write_text("")
    assert published(work).error.startswith("listing the outbox took more than")


def test_a_cancelled_publication_ends_at_once(work, outbox):
    (outbox / "a").write_text("")

    async def cancelled():
        platform = FakePlatform(forever={"p/a": OutcomeUnknownError("503")})
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(publish(platform, AT, work, "p/", SOURCE, "object"), 0.1)

    asyncio.run(cancelled())
