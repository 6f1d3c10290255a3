"""An agent's process that rearranges its outbox while it is published can't make the worker read anything outside."""

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from fleet import artifact_walk
from fleet.artifacts import publish
from fleet.platform.client import SessionRef

PUBLICATIONS = 200
DEADLINE_S = 10.0
#: So many that a worker that only counts names is caught: it takes about one of a thousand such links for a file.
READS = 5_000
SECRET = "outside"
INSIDE = "inside"

#: Exchanges the two paths of its arguments as fast as it can. RENAME_EXCHANGE (2) leaves no moment without either; -100
#: is AT_FDCWD.
EXCHANGE = """
import ctypes, os, sys
exchange = ctypes.CDLL(None, use_errno=True).renameat2
here, there = map(os.fsencode, sys.argv[1:])
print("ready", flush=True)
while True:
    if exchange(-100, here, -100, there, 2):
        raise OSError(ctypes.get_errno(), "renameat2")
"""

#: Gives the file of its first argument the name of its second, and takes it away again, as fast as it can.
LINK = """
import os, sys
target, name = sys.argv[1:]
print("ready", flush=True)
while True:
    os.link(target, name)
    os.unlink(name)
"""


class Listener:
    """A platform that remembers which texts it was sent."""

    def __init__(self):
        self.texts = Counter()

    async def upload_object(self, at, alias, value):
        self.texts[value["message"]["content"][0]["text"]] += 1


@contextmanager
def running(program, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
        assert process.poll() is None, process.stderr.read().decode()
    finally:
        process.kill()
        process.communicate()


def fill(folder, text):
    (folder / "folder").mkdir(parents=True)
    (folder / "file").write_text(text)
    (folder / "folder/file").write_text(text)


@pytest.fixture
def work(tmp_path):
    """A work folder with an outbox, and room beside it for what will be exchanged with its parts."""
    folder = tmp_path.resolve() / "work"
    fill(folder / ".out/run", INSIDE)
    (folder / "spare").mkdir()
    return folder


@pytest.fixture
def outside(tmp_path):
    """A folder whose tree has the names of the work folder's, with another content."""
    folder = tmp_path / "outside"
    fill(folder / ".out/run", SECRET)
    return folder


def publish_until(condition, work, listener):
    """Publish `PUBLICATIONS` times, and further until the race was seen to go both ways."""

    async def repeat():
        reports = []
        deadline = time.monotonic() + DEADLINE_S
        while len(reports) < PUBLICATIONS or not condition(reports):
            assert time.monotonic() < deadline, "the race never went both ways"
            reports.append(await publish(listener, SessionRef("r", "s"), work, "p/", ".out/run", "object"))
        return reports

    return asyncio.run(repeat())


def both_ways(reports):
    """Tell whether the race was lost in some publications and won in others."""
    return len({(report.published_count, report.skipped_count, report.error) for report in reports}) > 1


@pytest.mark.parametrize("part", [".out", ".out/run", ".out/run/folder", ".out/run/file"])
def test_a_part_of_the_path_that_is_exchanged_with_a_link_to_outside_is_never_followed(work, outside, part):
    (work / "spare/link").symlink_to(outside / part)
    listener = Listener()
    with running(EXCHANGE, work / part, work / "spare/link"):
        publish_until(both_ways, work, listener)
    assert listener.texts.keys() == {INSIDE}


def test_a_fifo_that_is_exchanged_with_a_file_never_holds_up_the_publication(work):
    os.mkfifo(work / "spare/fifo")
    listener = Listener()
    with running(EXCHANGE, work / ".out/run/file", work / "spare/fifo"):
        publish_until(both_ways, work, listener)
    assert listener.texts.keys() == {INSIDE}


def test_a_hard_link_to_outside_that_comes_and_goes_is_never_read(work, outside):
    outbox = artifact_walk.locate(work, ".out/run")
    causes = Counter()
    with running(LINK, outside / ".out/run/file", work / ".out/run/linked"):
        for _ in range(READS):
            with pytest.raises(artifact_walk.UnreadableError) as refusal:
                artifact_walk.read(outbox, "linked", max_bytes=1000)
            causes[type(refusal.value.__cause__)] += 1
    assert causes.keys() == {FileNotFoundError, type(None)}
