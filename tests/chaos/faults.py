"""The faults of a chaos run. Only processes below the test's own are ever sent a signal."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis
from kombu.exceptions import OperationalError

from fleet.refs import ThreadKeys, ThreadRef
from tests.chaos.stories import Story
from tests.fleet.harness import FleetUnderTest
from tests.wire.stage import Sandbox

HOSTS = ("alpha", "beta")
#: How often each fault is in a deck. A deck is shuffled and dealt to its end before the next one.
DECK: dict[str, int] = {
    "kill_turn": 3,
    "kill_guard": 2,
    "kill_agent": 2,
    "kill_turns_worker": 1,
    "kill_io_worker": 1,
    "kill_beat": 1,
    "kill_host": 1,
    "kill_redis": 1,
    "empty_redis": 1,
    "pause_redis": 1,
    "sleep_host": 1,
    "double_messages": 4,
    "drop_messages": 2,
}
#: Seconds between two faults, and between two changes of the platform's weather.
GAP_S, WEATHER_S = (1.0, 6.0), (4.0, 12.0)
#: Seconds for which processes are stopped: about the life of a lease (3 s), shorter and longer.
ASLEEP_S = (1.0, 6.0)
#: The platform's faults, their rates, and the lag of its lists in ms.
KINDS, RATES, LAG_MS = ("429", "500_before", "500_after", "cut_before", "cut_after"), (0.05, 0.2), (0, 2000)
#: How likely it is that the weather is an outage: every request fails.
OUTAGE = 0.15
#: Seconds for which a call of Redis may take here.
REDIS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault of the schedule: when, in seconds from the start, which, and the seed of its own choices."""

    at: float
    name: str
    seed: int


def schedule(seed: int, seconds: float) -> list[Strike]:
    """Return the faults of a run, weather included. The same seed gives the same ones; a longer run only more."""
    faults, weather = random.Random(f"faults {seed}"), random.Random(f"weather {seed}")
    strikes = [*_dealt(faults, seconds), *_turns_of_weather(weather, seconds)]
    return sorted(strikes, key=lambda strike: strike.at)


def _dealt(rng: random.Random, seconds: float) -> Iterator[Strike]:
    at, deck = rng.uniform(*GAP_S), list[str]()
    while at < seconds:
        if not deck:
            deck = list(Counter(DECK).elements())
            rng.shuffle(deck)
        yield Strike(at, deck.pop(), rng.getrandbits(32))
        at += rng.uniform(*GAP_S)


def _turns_of_weather(rng: random.Random, seconds: float) -> Iterator[Strike]:
    at = 0.0
    while at < seconds:
        yield Strike(at, "weather", rng.getrandbits(32))
        at += rng.uniform(*WEATHER_S)


@dataclass
class Faults:
    """Strikes a fleet. `now` is in seconds from the start of the run; `done` counts what was done."""

    fleet: FleetUnderTest
    sandbox: Sandbox
    redis_url: str = field(repr=False)
    redis_folder: Path
    done: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    redis_asleep: bool = False
    outage: bool = False
    _weather: dict[str, Any] = field(default_factory=dict)
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _places: list[tuple[str, int, int]] = field(default_factory=list)

    def strike(self, strike: Strike, now: float, stories: Sequence[Story]) -> bool:
        """Do at `now` what a strike says to the fleet and its threads. Returns False where it has no victim."""
        rng = random.Random(strike.seed)
        name, _, kind = strike.name.partition("_")
        match name, kind:
            case "kill", _:
                hit = self._kill(self._victims(kind, rng))
            case "weather", _:
                hit = self._change_weather(rng)
            case "empty", _:
                hit = not self.redis_asleep and self._on_redis(lambda client: client.flushall())
            case "pause", _:
                self.redis_asleep = hit = self._sleep(now, self._redis(), rng)
                self._later.append((now + ASLEEP_S[1], self._redis_woke))
            case "sleep", _:
                hit = self._sleep(now, self._host(rng.choice(HOSTS)), rng)
            case "double", _:
                hit = bool(stories) and self._double(rng, [story.alias for story in stories])
            case "drop", _:
                hit = self._drop(now)
            case _:
                raise ValueError(strike.name)
        if hit:
            self.done[strike.name] += 1
        return hit

    def run_later(self, now: float) -> None:
        """Do what is due: wake up what sleeps."""
        due = [action for at, action in self._later if at <= now]
        self._later = [(at, action) for at, action in self._later if at > now]
        for action in due:
            action()

    def fair_weather(self, *, for_good: bool = False) -> None:
        """Let every request of persons and of the report succeed: for the moment, or from now on with current lists."""
        lag = {"list_lag_ms": 0} if for_good else {}
        self.sandbox.conditions(faults=[], **lag)

    def weather_again(self, seed: int) -> None:
        """Bring the weather back after a fair moment."""
        self.sandbox.conditions(**self._weather, seed=seed)

    def agents(self) -> list[psutil.Process]:
        """Return the guards and agents that run just now."""
        return [process for host in HOSTS for main in self._mains(f"turns@{host}") for process in _guarded(main)]

    def _victims(self, kind: str, rng: random.Random) -> list[psutil.Process]:
        host = rng.choice(HOSTS)
        match kind:
            case "turn":
                pool = [child for host in HOSTS for main in self._mains(f"turns@{host}") for child in _children(main)]
                busy = [process for process in pool if any(_is_guard(child) for child in _children(process))]
                return [rng.choice(busy or pool)] if pool else []
            case "guard" | "agent":
                found = [process for process in self.agents() if _is_guard(process) == (kind == "guard")]
                return [rng.choice(found)] if found else []
            case "turns_worker" | "io_worker":
                return self._mains(f"{kind.partition('_')[0]}@{host}")
            case "beat":
                return self._mains("beat")
            case "host":
                return self._host(host)
            case "redis":
                return self._redis()
            case _:
                raise ValueError(kind)

    def _kill(self, victims: list[psutil.Process]) -> bool:
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.kill()
                self.kills += 1
        return bool(victims)

    def _sleep(self, at: float, victims: list[psutil.Process], rng: random.Random) -> bool:
        """Stop processes, and let them go on some seconds later."""
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        self._later.append((at + rng.uniform(*ASLEEP_S), lambda: _wake(victims)))
        return bool(victims)

    def _redis_woke(self) -> None:
        self.redis_asleep = False

    def _change_weather(self, rng: random.Random) -> bool:
        self.outage = rng.random() < OUTAGE
        kinds = rng.sample(KINDS, rng.randint(1, len(KINDS)))
        faults = [{"kind": kind, "rate": 1.0 if self.outage else rng.uniform(*RATES) / len(kinds)} for kind in kinds]
        self._weather = {"faults": faults, "list_lag_ms": rng.uniform(*LAG_MS)}
        self.sandbox.conditions(**self._weather, seed=rng.getrandbits(32))
        return True

    def _double(self, rng: random.Random, aliases: list[str]) -> bool:
        """Send every task message there is about a thread, for where it is and for where it was, several times each."""
        session, host = self.fleet.platform.session_id, rng.choice(HOSTS)
        alias = rng.choice(aliases)

        def send(client: redis.Redis) -> None:
            key = ThreadKeys.of(self.fleet.config.redis.namespace, ThreadRef(session, alias)).record
            epoch, turn, of = client.hmget(key, "epoch", "turn", "host")
            owner = of.decode() if of else host
            self._places.append((alias, int(epoch or 1), int(turn or 1)))
            places = [self._places[-1], *(place for place in self._places if place[0] == alias)]
            copies = rng.randint(2, 10)
            for name in ("activate", "ingest", "post_items"):
                self.fleet.send(f"fleet.{name}", session, alias, copies=copies)
            for _, epoch, turn in rng.sample(places, min(len(places), 2)):
                self.fleet.send("fleet.start_thread", session, alias, epoch, queue=f"host.{owner}", copies=copies)
                for name in ("publish_artifacts", "close_turn"):
                    self.fleet.send(f"fleet.{name}", session, alias, epoch, turn, queue=f"host.{owner}", copies=copies)
                turns = f"host.{owner}.turns"
                self.fleet.send("fleet.run_turn", session, alias, epoch, turn, queue=turns, copies=copies)

        return not self.redis_asleep and self._on_redis(send)

    def _drop(self, at: float) -> bool:
        """Let messages pile up while no worker takes one, then take them all away."""
        mains = [main for host in HOSTS for kind in ("io", "turns") for main in self._mains(f"{kind}@{host}")]
        for process in mains:
            with suppress(psutil.NoSuchProcess):
                process.suspend()

        def take_away() -> None:
            prefix = f"{self.fleet.config.redis.namespace}:celery:"
            queues = ["fleet", *(f"host.{host}{part}" for host in HOSTS for part in ("", ".turns"))]
            if not self.redis_asleep:
                self._on_redis(lambda client: client.delete(*(prefix + queue for queue in queues)))
            _wake(mains)

        self._later.append((at + 1.0, take_away))
        return bool(mains)

    def _on_redis(self, work: Callable[[redis.Redis], object]) -> bool:
        with (
            suppress(redis.RedisError, OperationalError),
            redis.Redis.from_url(self.redis_url, socket_timeout=REDIS_TIMEOUT_S) as client,
        ):
            work(client)
            return True
        return False

    def _mains(self, name: str) -> list[psutil.Process]:
        """Return the fleet's own processes with the word `name` in their command."""
        ours = [process for process in _children(psutil.Process()) if self.fleet.is_of(process)]
        return [process for process in ours if name in _words(process)]

    def _host(self, name: str) -> list[psutil.Process]:
        mains = [*self._mains(f"io@{name}"), *self._mains(f"turns@{name}")]
        return [*mains, *(process for main in mains for process in _children(main, recursive=True))]

    def _redis(self) -> list[psutil.Process]:
        """Return the Redis server, known by its folder: it changes its command's words."""
        return [process for process in _children(psutil.Process()) if _cwd(process) == self.redis_folder]


def _wake(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def _guarded(main: psutil.Process) -> list[psutil.Process]:
    """Return the guards below a turns worker, and what runs below them."""
    guards = [process for process in _children(main, recursive=True) if _is_guard(process)]
    return [*guards, *(agent for guard in guards for agent in _children(guard, recursive=True))]


def _is_guard(process: psutil.Process) -> bool:
    return any(word.endswith("guard.py") for word in _words(process))


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _cwd(process: psutil.Process) -> Path | None:
    try:
        return Path(process.cwd())
    except psutil.Error:
        return None
