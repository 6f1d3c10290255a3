"""`python -m benchmarks.leaks`: does anything grow with the threads and turns that a fleet has served?

A fleet as `fleet up` runs it, with its own Redis and platform, serves threads in waves: each is handed over, has its
turns and is ended. Between two waves everything comes to rest, and then Redis and every process are measured. So what
is seen is what stays, not what is under way. The slope of each curve behind the first fifth, which is warming up, is
the verdict.

What stays on purpose is shown apart: an ended thread is remembered for seven days (`fleet.record.ENDED_TTL_MS`), ids
of events and of our own items for ten minutes (`fleet.sections`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import psutil
import yaml

from fleet.envelope import Artifacts, new_thread
from fleet.local import announced
from fleet.person import Desk, desk
from fleet.record import Records, Step
from fleet.refs import ThreadRef
from fleet.store import Store
from fleet.supervisor import ChildNotReadyError, Supervisor
from fleet.up import Plan, planned

#: Interval in ms at which the section is read: short, so that the machine is busy with turns and does not wait.
INTERVAL_MS = 400
#: Threads that are served at once for each place: what persons say must be there when a place is free.
THREADS_PER_PLACE = 4
#: One in so many threads is deleted by its person; the others are completed.
REMOVED_EVERY = 10
#: Seconds between two looks at a thread, and within which a turn must have come or all must be at rest.
LOOK_S, PATIENCE_S = 0.1, 300.0
#: Part of the turns that are warming up: caches, pools of connections and threads, the allocator's arenas.
WARM_UP = 0.2
#: Turns from which on the slopes are a verdict. Before that they are mostly warming up.
ENOUGH_TURNS = 5000
#: ms of life from which on a key counts as kept for an ended thread; leases live for seconds.
KEPT_MS = 3_600_000
#: Kinds of keys whose members are forgotten by their age.
BY_AGE = frozenset({"ours", "events"})
#: Keys of Redis that are looked at in one round trip.
KEYS_AT_ONCE = 500
MIB = 1024 * 1024

SCRIPT = """
turns:
  - events:
      - thinking: "What is asked for: {prompt}"
      - tool: {name: Bash, input: {command: npm test}, output: "ok"}
      - write: {path: out/report.md, text: "{prompt}", replace: true}
      - text: "Done with turn {turn}: {prompt}"
      - usage: {input_tokens: 100, input_tokens_cached: 60, output_tokens: 7}
"""


class StuckError(Exception):
    """Something that must happen did not; the message says what."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of keys of Redis, and the bytes that Redis counts for them."""

    keys: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.keys + other.keys, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class ProcessSize:
    """A process of the fleet; `rss` in bytes."""

    pid: int
    rss: int
    fds: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at rest, after `turns` turns, the last of them at `pace` turns per second.

    `used`: bytes that Redis has allocated. `kept`: keys of the `ended` threads. `by_age` and `other`: what is forgotten
    by its age and the rest, by kind, without leases and the like. `processes` by their part, `agents` the processes
    that are none of these parts. `disk`: bytes of the host's files of threads.
    """

    turns: int
    pace: float
    used: int
    ended: int
    kept: Size
    by_age: dict[str, Size]
    other: dict[str, Size]
    processes: dict[str, ProcessSize]
    agents: int
    disk: int

    @property
    def rest(self) -> int:
        """Bytes of Redis that are there whatever was served: all but what stays for a time on purpose."""
        return self.used - self.kept.bytes - total(self.by_age).bytes


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity that must not grow: how to read it from a sample, and by how much it may in 1,000 turns.

    `unit` is what the value is divided by to be shown.
    """

    name: str
    value: Callable[[Sample], float]
    limit: float
    unit: int = 1

    def slope(self, samples: Sequence[Sample]) -> float:
        """Return its growth per 1,000 turns."""
        line = statistics.linear_regression([s.turns for s in samples], [self.value(s) for s in samples])
        return line.slope * 1000


def total(sizes: dict[str, Size]) -> Size:
    """Return the sum of all kinds."""
    return sum(sizes.values(), Size())


class Crowd:
    """Persons who hand threads over, several at once, and lead each to its end."""

    def __init__(self, plan: Plan, desk: Desk, store: Store, folders: Sequence[Path]) -> None:
        self.turns = 0
        self._desk = desk
        self._records = Records(store)
        self._folders: asyncio.Queue[Path] = asyncio.Queue()
        for folder in folders:
            self._folders.put_nowait(folder)
        self._numbers = count(1)

    async def wave(self, turns: Sequence[int]) -> float:
        """Serve a thread for each number in `turns`, with that many turns; return the turns per second."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, of_thread in zip(self._numbers, turns, strict=False):
                group.create_task(self._lead(number, of_thread))
        return sum(turns) / (time.monotonic() - began)

    async def _lead(self, number: int, turns: int) -> None:
        alias = f"leaks/{number:05}"
        folder = await self._folders.get()
        value = new_thread(str(folder), "scripted", "autonomous", Artifacts(f"{alias}/artifacts/", "out"))
        await self._desk.hand_over(alias, value, f"message 1 to {alias}")
        for turn in range(1, turns + 1):
            if turn > 1:
                await self._desk.say(alias, f"message {turn} to {alias}")
            await self._until(alias, turn, "idle")
            self.turns += 1
        if number % REMOVED_EVERY:
            await self._desk.set_state(alias, "completed")
        else:
            await self._desk.platform.delete_object(self._desk.at, alias)
        await self._until(alias, turns, "end")
        self._folders.put_nowait(folder)

    async def _until(self, alias: str, turn: int, step: Step) -> None:
        ref = ThreadRef(self._desk.at.session_id, alias)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            record = await self._records.read(ref)
            if (record.turn, record.step) == (turn, step):
                return
            if time.monotonic() > deadline:
                raise StuckError(f"{alias} is not {step} in turn {turn} within {PATIENCE_S:.0f} s: {record}")
            await asyncio.sleep(LOOK_S)


class Scales:
    """Measures a fleet at rest."""

    def __init__(self, plan: Plan, store: Store, session: str) -> None:
        self._store = store
        self._keys = store.session(session)
        self._jobs = plan.home / "hosts"

    async def at_rest(self) -> None:
        """Wait until nothing is outstanding: no thread to look at, nothing due, no message in a queue."""
        deadline = time.monotonic() + PATIENCE_S
        outstanding = (self._keys.attention, self._keys.due_at, self._keys.due)
        while await self._store.redis.exists(*outstanding):
            if time.monotonic() > deadline:
                due = await self._store.hash(self._keys.due)
                raise StuckError(f"the fleet does not come to rest within {PATIENCE_S:.0f} s; due: {sorted(due)[:10]}")
            await asyncio.sleep(LOOK_S)

    async def sample(self, turns: int, pace: float) -> Sample:
        """Measure everything."""
        kept, by_age, other, ended = await self._weigh_keys()
        info: dict[str, Any] = await self._store.redis.info("memory")
        processes, agents = weigh_processes()
        return Sample(
            turns=turns,
            pace=pace,
            used=info["used_memory"],
            ended=ended,
            kept=kept,
            by_age=by_age,
            other=other,
            processes=processes,
            agents=agents,
            disk=sum(file.stat().st_size for file in self._jobs.rglob("*") if file.is_file()),
        )

    async def _weigh_keys(self) -> tuple[Size, dict[str, Size], dict[str, Size], int]:
        """Return what is kept of ended threads, what is forgotten by age, the rest by kind, and how many have ended."""
        kept, ended = Size(), 0
        by_age: dict[str, Size] = {}
        other: dict[str, Size] = {}
        keys = [str(key) async for key in self._store.redis.scan_iter(count=KEYS_AT_ONCE)]
        for first in range(0, len(keys), KEYS_AT_ONCE):
            some = keys[first : first + KEYS_AT_ONCE]
            async with self._store.redis.pipeline(transaction=False) as pipe:
                for key in some:
                    pipe.pttl(key)
                    pipe.memory_usage(key, samples=0)
                answers = await pipe.execute()
            for key, life, size in zip(some, answers[::2], answers[1::2], strict=True):
                kind = self._kind(key)
                weight = Size(1, size or 0)
                if life >= KEPT_MS or kind == "threads":
                    kept += weight
                    ended += kind == "record"
                elif life < 0:
                    group = by_age if kind in BY_AGE else other
                    group[kind] = group.get(kind, Size()) + weight
        return kept, by_age, other, ended

    def _kind(self, key: str) -> str:
        """Return what a key is: the name that `fleet.refs` gives it, or the part of the namespace."""
        own = key.removeprefix(f"{self._keys.prefix}:")
        return own.split(":")[0] if own != key else ":".join(key.split(":")[1:3])


def weigh_processes() -> tuple[dict[str, ProcessSize], int]:
    """Return the processes of the fleet by their part, and how many others there are below this one."""
    found: dict[str, ProcessSize] = {}
    others = 0
    for child in psutil.Process().children():
        part = _part(child)
        found[part] = _weigh(child)
        below = sorted(child.children(recursive=True), key=lambda process: process.pid)
        places = [process for process in below if part == "turns" and _part(process) == "turns"]
        found |= {f"place {number}": _weigh(place) for number, place in enumerate(places, 1)}
        others += len(below) - len(places)
    return found, others


def _part(process: psutil.Process) -> str:
    """Return which part of the fleet a process is, by its command."""
    command = " ".join(process.cmdline())
    known = {"redis-server": "redis", "platform_server": "platform", " beat ": "beat", "turns@": "turns", "io@": "io"}
    return next((part for word, part in known.items() if word in command), command)


def _weigh(process: psutil.Process) -> ProcessSize:
    with process.oneshot():
        return ProcessSize(process.pid, process.memory_info().rss, process.num_fds(), process.num_threads())


def curves(sample: Sample) -> Iterator[Curve]:
    """Yield what must not grow. The limits are above the noise of an allocator, and far below one leak in each turn."""
    yield Curve("Redis, keys", lambda s: total(s.other).keys, 0.5)
    yield Curve("Redis, KiB", lambda s: s.rest, 100 * 1024, 1024)
    for part in sample.processes:
        if part not in ("redis", "platform"):  # the one is measured from inside, the other is no part of the product
            yield Curve(f"{part}, RSS MiB", _of(part, attrgetter("rss")), MIB, MIB)
            yield Curve(f"{part}, fds", _of(part, attrgetter("fds")), 0.5)
            yield Curve(f"{part}, threads", _of(part, attrgetter("threads")), 0.5)
    yield Curve("agents' processes", lambda s: s.agents, 0.0)


def _of(part: str, quantity: Callable[[ProcessSize], float]) -> Callable[[Sample], float]:
    return lambda sample: quantity(sample.processes[part])


def row(sample: Sample) -> str:
    """Return a sample as a line of the curve."""
    sizes = sample.processes
    places = [size for part, size in sizes.items() if part.startswith("place")]
    rss = [sizes["io"].rss, sizes["turns"].rss, max(place.rss for place in places), sizes["beat"].rss]
    files = [sizes["io"].fds, sizes["turns"].fds, max(place.fds for place in places), sizes["beat"].fds]
    threads = [sizes["io"].threads, sizes["turns"].threads, max(place.threads for place in places)]
    kept, by_age, other = sample.kept, total(sample.by_age), total(sample.other)
    return (
        f"{sample.turns:6} {sample.pace:6.1f} {sample.used / MIB:7.2f}"
        f" {sample.ended:6} {kept.bytes / MIB:7.2f} {by_age.bytes / MIB:7.2f} {sample.rest / MIB:6.2f} {other.keys:4}"
        f"  {_joined(f'{size / MIB:.1f}' for size in rss):23} {_joined(map(str, files)):13}"
        f" {_joined(map(str, threads)):10} {sample.agents:6} {sample.disk / MIB:7.1f}"
    )


def _joined(values: Iterable[str]) -> str:
    return "/".join(values)


HEAD = (
    "              Redis, MiB                                    io/turns/largest place/beat\n"
    " turns  per s    used  ended    kept  by age   rest keys  RSS, MiB                fds           threads"
    "    agents disk,MiB"
)


def verdict(samples: Sequence[Sample], turns: int) -> list[str]:
    """Return the lines of the verdict; those of what has grown begin with GROWS."""
    last = samples[-1]
    settled = [sample for sample in samples if sample.turns >= WARM_UP * turns]
    lines = [
        f"an ended thread is kept as {last.kept.keys / last.ended:.1f} keys and {last.kept.bytes / last.ended:.0f}"
        " bytes of Redis, for 7 days",
        f"per 1,000 turns, between {settled[0].turns} and {last.turns}:",
    ]
    for curve in curves(samples[0]):
        slope, limit = curve.slope(settled) / curve.unit, curve.limit / curve.unit
        mark = "GROWS" if slope > limit else "flat "
        lines.append(
            f"  {mark} {curve.name:22} {slope:+9.3f}   (limit {limit:g}; now {curve.value(last) / curve.unit:g})"
        )
    for part, size in last.processes.items():
        if size.pid != samples[0].processes[part].pid:
            lines.append(f"  GROWS {part}: was started anew, so its curve says nothing")
    if turns < ENOUGH_TURNS:
        lines.append(f"no verdict: {turns} turns are mostly warming up, {ENOUGH_TURNS} are enough")
    return lines


@contextmanager
def running(base: Path, places: int) -> Iterator[tuple[Plan, Supervisor, list[Path]]]:
    """Run a fleet of one host with `places` in `base`; yield it, and work folders for the threads served at once."""
    folders = [base / "repos" / str(number) for number in range(places * THREADS_PER_PLACE)]
    for folder in folders:
        folder.mkdir(parents=True)
    script = base / "script.yaml"
    script.write_text(SCRIPT)
    config = base / "fleet.yaml"
    settings = {
        "polling": {"interval_idle_ms": INTERVAL_MS, "interval_active_ms": INTERVAL_MS},
        "hosts": {"bench": {"work_folders": [str(base / "repos")], "max_agents": places}},
        "agents": {"scripted": {"script": str(script)}},
    }
    config.write_text(yaml.safe_dump(settings))
    elsewhere = ("FLEET_", "BLOBHUB_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(elsewhere)}
    environ["FLEET_HOME"] = str(base / "home")
    with (
        planned(config, environ) as plan,
        Supervisor(plan.groups, plan.logs) as supervisor,
        announced(plan.home, plan.up),
    ):
        yield plan, supervisor, folders


async def measure(
    plan: Plan, supervisor: Supervisor, folders: Sequence[Path], turns: Sequence[int], waves: int
) -> list[Sample]:
    """Serve a thread for each of `turns`, in `waves`, and return the samples between them, each printed as it comes."""
    store = Store(str(plan.config.redis.url), plan.config.redis.namespace)
    person = {"FLEET_PERSON_API_KEY_FILE": str(plan.up.person_key_file)}
    samples: list[Sample] = []
    looking_after = asyncio.create_task(_look_after(supervisor))
    try:
        async with desk(plan.config, person) as open_desk:
            crowd = Crowd(plan, open_desk, store, folders)
            scales = Scales(plan, store, open_desk.at.session_id)
            for wave in range(waves):
                pace = await crowd.wave(turns[len(turns) * wave // waves : len(turns) * (wave + 1) // waves])
                await scales.at_rest()
                samples.append(await scales.sample(crowd.turns, pace))
                print(row(samples[-1]), flush=True)
    finally:
        looking_after.cancel()
        await store.close()
    return samples


async def _look_after(supervisor: Supervisor) -> None:
    """Do what `fleet up` does for its processes."""
    while True:
        supervisor.check()
        await asyncio.sleep(LOOK_S)


def shared_out(turns: int, threads: int) -> list[int]:
    """Return how many turns each thread has, as even as can be."""
    return [turns * (number + 1) // threads - turns * number // threads for number in range(threads)]


@click.command()
@click.option("--threads", type=click.IntRange(1), default=2000, show_default=True, help="Threads that are served.")
@click.option("--turns", type=click.IntRange(1), default=10_000, show_default=True, help="Turns of all threads.")
@click.option("--places", type=click.IntRange(1, 16), default=3, show_default=True, help="Turns that run at once.")
@click.option("--samples", type=click.IntRange(3), default=20, show_default=True, help="Rows of the curve.")
def main(threads: int, turns: int, places: int, samples: int) -> None:
    """Print the curve of a fleet's Redis, memory, file descriptors and threads, and whether any of them grows.

    The status is 1 when one does, in a run that is long enough for a verdict.
    """
    if not samples <= threads <= turns:
        raise click.UsageError("there must be no fewer turns than threads, and no fewer threads than samples")
    base = Path(tempfile.mkdtemp(prefix="fleet-leaks-"))
    try:
        with running(base, places) as fleet:
            print(HEAD)
            found = asyncio.run(measure(*fleet, shared_out(turns, threads), samples))
    except* (ChildNotReadyError, StuckError) as errors:
        raise click.ClickException(f"{errors.exceptions[0]}\nlogs and state: {base}") from errors
    shutil.rmtree(base)
    lines = verdict(found, turns)
    print("", *lines, sep="\n")
    if turns >= ENOUGH_TURNS and any("GROWS" in line for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
