"""A chaos run: a fleet of two hosts at work while faults strike, then fair weather, then a verdict on every thread."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from fleet.refs import SessionKeys, ThreadKeys, ThreadRef
from fleet.sandbox.redis_server import INHERITED, PreparedRedis, answers, prepare_redis
from fleet.supervisor import Child, Supervisor
from tests.chaos.faults import Faults, Strike, schedule
from tests.chaos.stories import SCRIPT, Story, Verdict, new_story
from tests.fleet.harness import HOLD_S, LEASE_S, FleetUnderTest, fleet_under_test
from tests.wire.stage import Sandbox

#: Threads that are at work at once.
AT_ONCE = 8
#: Seconds between two rounds of the test's own work, and of what its person does.
TICK_S, PERSON_S = 0.1, 1.0
#: Seconds within which all must be at rest once no fault strikes any more: restarts wait for up to 30 s.
REST_S = 150.0
#: Seconds for which nothing more may be said once all is at rest.
QUIET_S = 4.0
#: Attempts of a turn: here it is killed more often than a real one would be.
ATTEMPTS = 100


@dataclass
class Report:
    """What a run was, and what came of it. All violations are in words, with the thread's alias."""

    seed: int
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    kills: int = 0
    threads: int = 0
    turns: int = 0
    items: int = 0
    lost: int = 0
    doubled: int = 0
    clashes: int = 0
    rest_s: float = 0.0
    violations: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        """Add what was found in a thread."""
        for name in ("threads", "turns", "items", "lost", "doubled", "clashes"):
            setattr(self, name, getattr(self, name) + getattr(verdict, name))
        self.violations += verdict.violations

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {times}" for name, times in sorted(self.faults.items()))
        lines = [
            f"chaos: seed {self.seed}, {self.seconds:.0f} s of faults, at rest {self.rest_s:.0f} s after the last",
            f"faults thrown     {sum(self.faults.values())} ({faults})",
            f"kills survived    {self.kills}",
            f"items checked     {self.items} in {self.turns} turns of {self.threads} threads",
            f"lost              {self.lost}",
            f"doubled           {self.doubled}",
            f"clashes           {self.clashes}",
            f"other violations  {len(self.violations)}",
            *self.violations,
        ]
        return "\n".join(lines)


class Run:
    """One run. It is driven by a single thread, the one that starts the processes."""

    def __init__(
        self, fleet: FleetUnderTest, faults: Faults, supervisors: tuple[Supervisor, ...], report: Report
    ) -> None:
        self.fleet = fleet
        self.faults = faults
        self.report = report
        self.stories: list[Story] = []
        self._supervisors = supervisors
        self._rng = random.Random(f"stories {report.seed}")
        self._numbers = itertools.count(1)
        self._began = time.monotonic()
        self._person_due = 0.0

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def going_on(self) -> list[Story]:
        """The stories that are not told to their end."""
        return [story for story in self.stories if not story.told]

    def play(self) -> None:
        """Let the faults strike, then wait for the rest."""
        strikes = schedule(self.report.seed, self.report.seconds)
        missed: list[Strike] = []
        while self.now < self.report.seconds:
            due = [*missed, *(strike for strike in strikes if strike.at <= self.now)]
            strikes = [strike for strike in strikes if strike not in due]
            # What finds no victim, such as an agent between two turns, lies in wait for one.
            missed = [strike for strike in due if not self.faults.strike(strike, self.now, self.going_on)]
            self._tick(begin=True)
        self.faults.run_later(float("inf"))
        self.faults.fair_weather(for_good=True)
        self.faults.outage = False
        ended = self.now
        while self.now < ended + REST_S and (self.going_on or self._unrest()):
            self._tick(begin=False)
        self.report.rest_s = self.now - ended
        if not self.going_on and not self._unrest():
            self._wait(QUIET_S)

    def judge(self) -> None:
        """Compare all that was said with all that must have been."""
        for story in self.stories:
            self.report.add(story.verdict(self.fleet.person.items(story.alias), self.fleet.platform.worker_user_id))
        posts = Counter(item["metadata"].get("post_id") for item in self.fleet.worker.items("worker"))
        if twice := [post for post, times in posts.items() if times > 1]:
            self.report.doubled += len(twice)
            self.report.violations.append(f"worker: posted more than once: {twice}")
        self.report.violations += self._unrest()
        self.report.violations += [
            f"{story.alias}: its story has no end: {self._where(story)}" for story in self.going_on
        ]
        self.report.violations += [f"an agent is left: {process}" for process in self.faults.agents()]
        self.report.faults = dict(self.faults.done)
        self.report.kills = self.faults.kills

    def _tick(self, *, begin: bool) -> None:
        self.faults.run_later(self.now)
        if self.now >= self._person_due and not self.faults.outage:
            self.faults.fair_weather()
            self._persons(begin=begin)
            if begin:
                self.faults.weather_again(self._rng.getrandbits(32))
            self._person_due = self.now + PERSON_S
        self._wait(TICK_S)

    def _persons(self, *, begin: bool) -> None:
        for story in self.going_on:
            story.go_on(self.fleet.person, self.fleet.platform.worker_user_id, self.now, self._rng)
        if begin and len(self.going_on) < AT_ONCE:
            number = next(self._numbers)
            root = self.fleet.alpha if number % 2 else self.fleet.beta
            self.stories.append(new_story(number, self.fleet.folder(f"story-{number}", root), self._rng))
            self.stories[-1].open(self.fleet.person)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            for supervisor in self._supervisors:
                supervisor.check()
            if time.monotonic() >= until:
                return
            time.sleep(min(TICK_S, seconds))

    def _unrest(self) -> list[str]:
        """Return what is not at rest in Redis, in words."""
        namespace, session = self.fleet.config.redis.namespace, self.fleet.platform.session_id
        try:
            with redis.Redis.from_url(self.faults.redis_url, decode_responses=True, socket_timeout=2) as client:
                found = [f"due: {due}" for due in client.hkeys(SessionKeys.of(namespace, session).due)]
                for story in self.stories:
                    keys = ThreadKeys.of(namespace, ThreadRef(session, story.alias))
                    step, entries = client.hget(keys.record, "step"), client.xlen(keys.journal)
                    if (step, entries, client.hlen(keys.inbox)) != ("idle", 0, 0):
                        found.append(f"{story.alias}: not at rest: step {step}, {entries} entries in the journal")
                return found
        except redis.RedisError as error:
            return [f"Redis does not answer: {error}"]

    def _where(self, story: Story) -> str:
        items = self.fleet.person.items(story.alias)
        return f"{self.fleet.record(story.alias)} {[item['content'][0]['text'] for item in items[-5:]]}"


def chaos(base: Path, seed: int, seconds: float) -> Report:
    """Run a fleet in `base` for `seconds` of faults. Its processes are gone when this returns; its files stay."""
    report = Report(seed, seconds)
    (base / "chaos.yaml").write_text(SCRIPT)
    agent = {"script": str(base / "chaos.yaml"), "permissions": "approval", "hold_s": HOLD_S}
    turns = {"lease_s": LEASE_S, "shutdown_grace_s": 1, "attempts": ATTEMPTS}
    with (
        _redis(base) as (prepared, redis_supervisor),
        fleet_under_test(base, prepared, agents={"scripted": agent}, turns=turns) as fleet,
    ):
        sandbox = Sandbox(fleet.platform)
        faults = Faults(fleet, sandbox, prepared.url, base / "redis")
        run = Run(fleet, faults, (redis_supervisor, fleet.supervisor), report)
        try:
            run.play()
            run.judge()
        finally:
            faults.run_later(float("inf"))
            sandbox.close()
    report.violations += [f"a process is left: {process}" for process in _left(base)]
    return report


@contextmanager
def _redis(base: Path) -> Iterator[tuple[PreparedRedis, Supervisor]]:
    """Run a Redis that keeps port, password and data when it is started again."""
    prepared = prepare_redis(base / "redis")
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    child = Child("redis", prepared.argv, inherited, ready=lambda: answers(prepared.url), pass_fds=(prepared.lock_fd,))
    try:
        with Supervisor([child], base / "logs") as supervisor:
            yield prepared, supervisor
    finally:
        os.close(prepared.lock_fd)


def _left(base: Path) -> list[psutil.Process]:
    """Return the processes that work below `base`."""
    found = []
    for process in psutil.process_iter():
        try:
            home = process.environ().get("FLEET_HOME", "/")
            if Path(process.cwd()).is_relative_to(base) or Path(home).is_relative_to(base):
                found.append(process)
        except psutil.Error:
            continue
    return psutil.wait_procs(found, timeout=5)[1]
