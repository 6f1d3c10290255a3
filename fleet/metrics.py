"""What is counted about the work of a host, for Prometheus. docs/metrics.md explains each metric.

Counters are those of the process that does the work: the short-work worker of a host posts, polls and closes turns.
What is the case just now is read from Redis when somebody asks (`read_load`).

Labels are few and bounded: never a thread, a session, or a word that a user chose.

Key `NS:host:NAME:leases-lost` (string): leases that steps on host NAME have lost; written by the processes that lost
them, most of them pool processes, which have no endpoint of their own.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from redis.exceptions import RedisError

from fleet import __version__
from fleet.config import FleetConfig
from fleet.context import Fleet
from fleet.record import Record
from fleet.refs import ThreadRef

#: Threads of a session that one scrape looks at, of those with something outstanding.
THREADS_MAX = 500
#: Seconds between two attempts to tell a Redis that was away about a lost lease.
AGAIN_S = 5.0
#: Seconds: a turn takes from a moment to hours, waits for persons included.
TURN_BUCKETS_S = (1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 14400)
#: Seconds: from a platform next door to the patience of the drainer.
POST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

OUTCOMES = ("completed", "failed", "stopped", "crashed")
POLL_RESULTS = ("read", "retrying", "down")
#: Kind of token → its field of the statistics of a turn (protocol §4, `turn_end`).
TOKENS_OF = {"input": "input_tokens", "input_cached": "input_tokens_cached", "output": "output_tokens"}
#: Label value for what a newer release or an unchecked envelope may say.
OTHER = "other"

_leave_out_created: Any = disable_created_metrics  # prometheus_client gives it no types
_leave_out_created()  # a further series for each counter, which nobody reads

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

TURNS = Counter(
    "fleet_turns", "Turns that were closed, by how they ended.", ["host", "agent", "outcome"], registry=REGISTRY
)
TURN_SECONDS = Histogram(
    "fleet_turn_seconds",
    "Seconds from the first beginning of a turn to its end.",
    ["host", "agent"],
    registry=REGISTRY,
    buckets=TURN_BUCKETS_S,
)
CUT_OFF = Counter(
    "fleet_turn_attempts_cut_off",
    "Attempts of closed turns that were cut off by a crash.",
    ["host", "agent"],
    registry=REGISTRY,
)
TOKENS = Counter("fleet_tokens", "Tokens that closed turns have used.", ["host", "agent", "kind"], registry=REGISTRY)
POSTED = Counter("fleet_items_posted", "Items that the platform has stored.", ["host", "kind"], registry=REGISTRY)
REFUSED = Counter("fleet_items_refused", "Items that the platform refuses for good.", ["host"], registry=REGISTRY)
POST_SECONDS = Histogram(
    "fleet_post_seconds",
    "Seconds to carry out one entry of a journal, retries included.",
    ["host"],
    registry=REGISTRY,
    buckets=POST_BUCKETS_S,
)
POST_RETRIES = Counter(
    "fleet_post_retries", "Posts that failed or whose outcome was unknown.", ["host"], registry=REGISTRY
)
POLLS = Counter("fleet_polls", "Polls of a section, by what came of them.", ["host", "result"], registry=REGISTRY)
POLL_SECONDS = Histogram(
    "fleet_poll_seconds",
    "Seconds that one poll of a section took.",
    ["host"],
    registry=REGISTRY,
    buckets=POST_BUCKETS_S,
)


def begin_at_zero(config: FleetConfig, host: str) -> None:
    """Make every series that can be named now: a rate sees no increase in a series that begins with its first one."""
    for agent in config.agents:
        TURN_SECONDS.labels(host, agent)
        CUT_OFF.labels(host, agent)
        for outcome in OUTCOMES:
            TURNS.labels(host, agent, outcome)
        for kind in TOKENS_OF:
            TOKENS.labels(host, agent, kind)
    for kind in ("item", "audit"):
        POSTED.labels(host, kind)
    for result in POLL_RESULTS:
        POLLS.labels(host, result)
    for metric in (REFUSED, POST_SECONDS, POST_RETRIES, POLL_SECONDS):
        metric.labels(host)


def count_turn(fleet: Fleet, record: Record, attempts: int) -> None:
    """Count the turn of `record`, which is closed: its outcome, its time, its tokens, those `attempts` that count."""
    host = fleet.host
    agent = record.agent if record.agent in fleet.config.agents else OTHER
    outcome = "crashed" if record.fail_code == "AGENT_CRASHED" else record.turn_status
    TURNS.labels(host, agent, outcome if outcome in OUTCOMES else OTHER).inc()
    CUT_OFF.labels(host, agent).inc(max(0, attempts - 1))
    if "duration_ms" in record.stats:
        TURN_SECONDS.labels(host, agent).observe(record.stats["duration_ms"] / 1000)
    for kind, field in TOKENS_OF.items():
        TOKENS.labels(host, agent, kind).inc(record.stats.get(field, 0))


_telling: set[asyncio.Task[None]] = set()


def count_lost_lease(fleet: Fleet, record: Record) -> None:
    """Count a lease that a step of `record` here has lost, as soon as Redis, whose absence may be why, takes the count.

    One that ended with its epoch, because somebody started the thread again, was not lost.
    """
    telling = asyncio.create_task(_tell_of_lost_lease(fleet, record))
    _telling.add(telling)
    telling.add_done_callback(_telling.discard)


async def _tell_of_lost_lease(fleet: Fleet, record: Record) -> None:
    while True:
        try:
            if (await fleet.records.read(record.ref)).epoch == record.epoch:
                await fleet.store.redis.incr(_leases_lost(fleet))
            return
        except (RedisError, OSError):
            await asyncio.sleep(AGAIN_S)


def _leases_lost(fleet: Fleet) -> str:
    return fleet.store.key("host", fleet.host, "leases-lost")


@dataclass(frozen=True, slots=True)
class Load:
    """What is the case just now: of this host, and, from `threads_without_host` on, of the whole fleet.

    `poll_lag_s`: seconds since the served section that has waited longest was read; None before any was. `sections`:
    state (`attached`, `retrying` or `down`) → how many are in it.
    """

    turns_running: int
    turn_places: int
    turns_waiting: int
    journal_entries: int
    journal_longest: int
    leases_lost: int
    threads_without_host: int
    poll_lag_s: float | None
    sections: dict[str, int]


async def read_load(fleet: Fleet) -> Load:
    """Read from Redis what is the case, with a few round trips for each session.

    Raises:
        RedisError: Redis did not answer.
    """
    here = next((host for host in await fleet.hosts.all() if host.name == fleet.host), None)
    sessions = set((await fleet.store.hash(fleet.store.key("sections"))).values())
    threads = [thread for session in sessions for thread in await _outstanding(fleet, session)]
    ours = [thread for thread in threads if thread.host == fleet.host]
    poll_lag_s, sections = await _read_sections(fleet)
    return Load(
        turns_running=here.running if here else 0,
        turn_places=here.max_agents if here else 0,
        turns_waiting=sum(thread.step == "run" and not thread.held for thread in ours),
        journal_entries=sum(thread.journal for thread in ours),
        journal_longest=max((thread.journal for thread in ours), default=0),
        leases_lost=int(await fleet.store.redis.get(_leases_lost(fleet)) or 0),
        threads_without_host=sum(thread.step == "wait_host" for thread in threads),
        poll_lag_s=poll_lag_s,
        sections=sections,
    )


@dataclass(frozen=True, slots=True)
class _Outstanding:
    """A thread with something outstanding. `held`: somebody has its lease. `journal`: entries that wait there."""

    host: str
    step: str
    held: bool
    journal: int


async def _outstanding(fleet: Fleet, session: str) -> list[_Outstanding]:
    aliases = await fleet.store.scores(fleet.store.session(session).attention, limit=THREADS_MAX)
    async with fleet.store.redis.pipeline(transaction=False) as pipe:
        for alias in aliases:
            keys = fleet.store.thread(ThreadRef(session, alias))
            pipe.hmget(keys.record, ["host", "step"])
            pipe.exists(keys.lease)
            pipe.xlen(keys.journal)
        rows = await pipe.execute()
    return [
        _Outstanding(host or "", step or "", bool(held), journal)
        for (host, step), held, journal in zip(rows[::3], rows[1::3], rows[2::3], strict=True)
    ]


async def _read_sections(fleet: Fleet) -> tuple[float | None, dict[str, int]]:
    """Return the poll lag in seconds, and how many sections are in which state. One that stands down has no lag."""
    async with fleet.store.redis.pipeline(transaction=False) as pipe:
        for section in fleet.config.sections:
            pipe.hmget(fleet.store.key("section-state", section.name), ["state", "read_ms"])
        rows = await pipe.execute()
    served = ("attached", "retrying")
    states = Tally(state if state in served else "down" for state, _ in rows if state)
    read = [int(read_ms) for state, read_ms in rows if state in served and read_ms]
    lag_s = max(0, await fleet.store.now_ms() - min(read)) / 1000 if read else None
    return lag_s, {state: states[state] for state in (*served, "down")}


def load_metrics(host: str, load: Load | None) -> Iterator[Metric]:
    """Yield `load` as metrics. None: Redis did not tell, and that is the only thing to be said."""
    yield _gauge("fleet_build_info", "The release that runs here; always 1.", 1, host=host, version=__version__)
    yield _gauge("fleet_redis_up", "Whether Redis has answered this scrape.", load is not None, host=host)
    if load is None:
        return
    yield _gauge("fleet_turns_running", "Turns that run on the host.", load.turns_running, host=host)
    yield _gauge("fleet_turn_places", "Turns that may run on the host at once.", load.turn_places, host=host)
    yield _gauge("fleet_turns_waiting", "Turns that are due on the host and do not run.", load.turns_waiting, host=host)
    yield _gauge("fleet_journal_entries", "Entries that wait in journals.", load.journal_entries, host=host)
    yield _gauge("fleet_journal_longest_entries", "Entries in the longest journal.", load.journal_longest, host=host)
    lost = CounterMetricFamily("fleet_leases_lost", "Leases that steps on the host have lost.", labels=["host"])
    lost.add_metric([host], load.leases_lost)
    yield lost
    yield _gauge("fleet_threads_without_host", "Threads that wait for a host to come up.", load.threads_without_host)
    if load.poll_lag_s is not None:
        yield _gauge(
            "fleet_poll_lag_seconds", "Seconds since the section that waits longest was read.", load.poll_lag_s
        )
    sections = GaugeMetricFamily("fleet_sections", "Sections of the configuration, by state.", labels=["state"])
    for state, count in load.sections.items():
        sections.add_metric([state], count)
    yield sections


def _gauge(name: str, meaning: str, value: float, **labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, meaning, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
