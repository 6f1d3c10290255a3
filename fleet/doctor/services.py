"""Looks at what is elsewhere: Redis, the platform, the users behind the keys, the sections, the other hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from fleet import __version__
from fleet.attach import StandDownError, resolve, stand_down_of
from fleet.config import FleetConfig, SectionConfig
from fleet.doctor.findings import Finding, State, of_error
from fleet.doctor.ground import KEY, PERSONS_KEY, Ground
from fleet.envelope import WORKER_ALIAS, worker_owner
from fleet.errors import CATALOGUE, FleetError
from fleet.hosts import Host, Hosts
from fleet.operating import operated
from fleet.person import Desk
from fleet.platform.client import Json, PlatformClient
from fleet.platform.errors import RefusedError
from fleet.reach import FIRST_ANSWER_S, place, platform_errors, redis_errors
from fleet.status import opened_store

#: Seconds between two clocks from which on it is worth a word.
CLOCKS_APART_S = 5.0
#: The oldest Redis that the fleet is tested with.
OLDEST_REDIS = (6, 2)
#: Where a Redis is that is never asked.
NOWHERE = "unix:///nonexistent"

REMEDIES = {
    "revision_not_writable": "set revision_id to a draft or a managed revision",
    "revision_not_ready": "wait: the fleet looks again by itself",
    "revision_not_found": "correct org_id, blob_id and revision_id",
    "access_lost": "give the worker's user access, or correct the ids: what was deleted answers alike",
}


async def key_findings(ground: Ground, key: str) -> list[Finding]:
    """Ask who the worker and the person are. Keys are not shown."""
    try:
        user = await _user(ground, key)
    except FleetError as error:
        return [_key_refused(KEY, f"from {ground.key_source}", error)]
    found = [Finding(KEY, "ok", f"from {ground.key_source}, accepted: {_name(user)}")]
    if ground.persons_key is not None:
        found.append(await _person(ground, ground.persons_key, user))
    return found


async def _person(ground: Ground, key: str, worker: Json) -> Finding:
    try:
        user = await _user(ground, key)
    except FleetError as error:
        return _key_refused(PERSONS_KEY, "is there", error)
    if user.get("id") != worker.get("id"):
        return Finding(PERSONS_KEY, "ok", f"accepted: {_name(user)}")
    return Finding(
        PERSONS_KEY,
        "warning",
        f"is of the worker's own user, {_name(user)}, whose messages are echoes: no agent gets them",
        "set FLEET_PERSON_API_KEY or FLEET_PERSON_API_KEY_FILE to the key of another user",
    )


async def _user(ground: Ground, key: str) -> Json:
    url = ground.config.platform.url
    async with PlatformClient(url, key) as platform:
        with platform_errors(url):
            async with asyncio.timeout(FIRST_ANSWER_S):
                return await platform.me()


def _name(user: Json) -> str:
    return f"{user.get('name') or 'a user without a name'} ({user.get('id')})"


def _key_refused(subject: str, said: str, error: FleetError) -> Finding:
    if error.code == "key_refused":
        return Finding(subject, "problem", f"{said}; {error.detail}", error.remedy)
    return Finding(subject, "warning", f"{said}; could not be tried: {error.detail}", "see `platform`")


async def platform_findings(ground: Ground) -> list[Finding]:
    """Ask the platform for nothing, twice: the second answer comes on an open connection."""
    url = ground.config.platform.url
    try:
        async with httpx.AsyncClient(timeout=FIRST_ANSWER_S, trust_env=False) as http:
            await http.head(url)
            began, began_at = time.monotonic(), time.time()
            answer = await http.head(url)
            took_s = time.monotonic() - began
    except httpx.HTTPError as error:
        detail = f"{url} does not answer: {error or type(error).__name__}"
        return [Finding("platform", "problem", detail, CATALOGUE["platform_unreachable"].remedy)]
    said = f"{url}{' (the default)' if ground.has_default_platform else ''}, round trip {took_s * 1000:.0f} ms"
    if answer.is_server_error:
        return [Finding("platform", "problem", f"{said}, answers {answer.status_code}", "wait, or ask its operators")]
    return [Finding("platform", "ok", said), *_platform_clock(answer.headers.get("Date"), began_at + took_s / 2)]


def _platform_clock(date: str | None, ours_s: float) -> Iterator[Finding]:
    try:
        # The header has whole seconds, so the moment lies half of one behind it, give or take.
        theirs_s = parsedate_to_datetime(date or "").timestamp() + 0.5
    except ValueError:
        return
    yield clock("the platform's", ours_s - theirs_s)


def clock(whose: str, ahead_s: float) -> Finding:
    """Compare this machine's clock with another, which it is `ahead_s` seconds ahead of."""
    apart = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} {whose}; nothing depends on it"
    if abs(ahead_s) <= CLOCKS_APART_S:
        return Finding("clock", "ok", apart)
    return Finding("clock", "warning", f"{apart} but the times in logs", "set the clock, best by NTP")


async def redis_findings(ground: Ground) -> list[Finding]:
    """Ask Redis how it is set up, and which hosts are alive.

    Raises:
        FleetError: `redis_unreachable`.
    """
    url = str(ground.config.redis.url)
    store = opened_store(ground.config)
    try:
        async with redis_errors(url):
            info: Mapping[str, Any] = await store.redis.info()
            began = time.monotonic()
            theirs_ms = await store.now_ms()
            took_s = time.monotonic() - began
            ahead_s = time.time() - took_s / 2 - theirs_ms / 1000
            hosts = await Hosts(store).all()
    finally:
        await store.close()
    version = str(info.get("redis_version", "?"))
    said = f"{place(url)}, version {version}, round trip {took_s * 1000:.1f} ms"
    return [
        _redis_version(version, said),
        *_redis_settings(info),
        clock("Redis's", ahead_s),
        *host_findings(ground, hosts),
    ]


def _redis_version(version: str, said: str) -> Finding:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers >= OLDEST_REDIS:
        return Finding("Redis", "ok", said)
    oldest = ".".join(map(str, OLDEST_REDIS))
    return Finding(
        "Redis", "warning", f"{said}; older than any that the fleet is tested with", f"use {oldest} or newer"
    )


def _redis_settings(info: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what Redis does with its data; what it does not tell is not found wrong."""
    subject = "Redis persistence"
    if not info.get("aof_enabled", 1):
        detail = "the append-only file is off: with a restart Redis forgets what the fleet was about to do"
        yield Finding(subject, "warning", detail, "set `appendonly yes`")
    elif info.get("aof_last_write_status", "ok") != "ok":
        yield Finding(subject, "problem", "the append-only file can't be written", "look at the disk of Redis")
    else:
        yield Finding(subject, "ok", "the append-only file is on")
    subject, policy = "Redis memory", info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        yield Finding(subject, "ok", "nothing is evicted")
    else:
        limited = bool(info.get("maxmemory"))
        when = "when memory is short" if limited else "once maxmemory is set"
        detail = f"maxmemory-policy is {policy}: {when}, Redis throws away what the fleet relies on"
        yield Finding(subject, "problem" if limited else "warning", detail, "set `maxmemory-policy noeviction`")


def host_findings(ground: Ground, hosts: list[Host]) -> Iterator[Finding]:
    """Yield, for each host of the configuration and each other one that runs, whether it is there."""
    known = {host.name: host for host in hosts}
    for name in ground.config.hosts:
        host = known.get(name)
        if host is None or not host.alive:
            remedy = f"start it: `fleet host {name}`"
            yield Finding(f"host {name}", "warning", "is away" if host else "has never been there", remedy)
        elif host.version != __version__:
            yield Finding(
                f"host {name}", "warning", f"runs version {host.version}, here is {__version__}", "update one"
            )
        else:
            yield Finding(f"host {name}", "ok", f"is up, runs {host.running} of {host.max_agents} turns")
    for host in hosts:
        if host.alive and host.name not in ground.config.hosts:
            detail = "runs, and is not in this configuration"
            yield Finding(f"host {host.name}", "warning", detail, "give all machines the same configuration")


async def section_findings(ground: Ground, section: SectionConfig) -> list[Finding]:
    """Ask the platform whether a section can be served, by this worker. Nothing is written."""
    subject = f"section {section.name}"
    try:
        async with operated(_somewhere(ground.config), ground.environ) as fleet:
            with platform_errors(fleet.platform.url):
                async with asyncio.timeout(FIRST_ANSWER_S):
                    at = await resolve(fleet, section)
                    value = await Desk(fleet.platform, at, "", is_person=False).value(WORKER_ALIAS)
                    worker = await fleet.user_id()
    except StandDownError as error:
        return [_stands_down(subject, error)]
    except FleetError as error:
        refused = error.__cause__
        if isinstance(refused, RefusedError):
            return [_stands_down(subject, stand_down_of(refused))]
        return [of_error(subject, error, "warning")]
    return [_served_by(subject, value, worker)]


def _somewhere(config: FleetConfig) -> FleetConfig:
    """Return `config` with a Redis, which is not asked here and may not be there before `fleet up`."""
    return config.model_copy(update={"redis": config.redis.model_copy(update={"url": config.redis.url or NOWHERE})})


def _stands_down(subject: str, error: StandDownError) -> Finding:
    state: State = "warning" if error.state == "revision_not_ready" else "problem"
    remedy = REMEDIES.get(error.state, "correct the ids, open the session, or take the section out")
    return Finding(subject, state, str(error), remedy)


def _served_by(subject: str, value: object, worker: str) -> Finding:
    if value is None:
        return Finding(subject, "ok", "open; has no object `worker` yet, which the fleet will write")
    owner = worker_owner(value)
    if owner == worker:
        return Finding(subject, "ok", "open; its object `worker` is ours")
    if owner is None:
        detail = "its object `worker` names no user [SECTION_WORKER_OBJECT_MALFORMED]"
        return Finding(subject, "problem", detail, "look what it is; delete it if nobody needs it")
    detail = f"belongs to the worker of user {owner} [SESSION_OWNED_BY_DIFFERENT_USER]"
    return Finding(subject, "problem", detail, "use that user's key, or delete its object `worker`")
