"""The fleet as Redis knows it: hosts, sections and threads, as plain values."""

from __future__ import annotations

import asyncio
from typing import Any

from fleet.config import FleetConfig, SectionConfig
from fleet.errors import ConfigError
from fleet.hosts import Hosts
from fleet.reach import redis_errors
from fleet.record import Record, Records
from fleet.refs import ThreadRef
from fleet.store import Store

Json = dict[str, Any]


def opened_store(config: FleetConfig) -> Store:
    """Return the way to the configured Redis.

    Raises:
        ConfigError: `config_invalid`, it is not known where Redis is.
    """
    if config.redis.url is None:
        raise ConfigError(
            "config_invalid",
            "neither FLEET_REDIS_URL nor redis.url says where Redis is, and no `fleet up` runs with this FLEET_HOME",
        )
    return Store(config.redis.url, config.redis.namespace)


async def gather(config: FleetConfig) -> Json:
    """Return `hosts`, `sections` and `threads`.

    Raises:
        FleetError: `redis_unreachable`, or `config_invalid` when it is not known where Redis is.
    """
    store = opened_store(config)
    try:
        async with redis_errors(str(config.redis.url)):
            sections = [await _section(store, section) for section in config.sections]
            sessions = dict.fromkeys(str(section["session"]) for section in sections if section["session"])
            threads = await asyncio.gather(*(_threads(store, session) for session in sessions))
            hosts = [
                {
                    "name": host.name,
                    "alive": host.alive,
                    "draining": host.draining,
                    "work_folders": list(host.work_folders),
                    "max_agents": host.max_agents,
                    "running": host.running,
                    "agents": list(host.agents),
                    "version": host.version,
                }
                for host in await Hosts(store).all()
            ]
    finally:
        await store.close()
    return {"hosts": hosts, "sections": sections, "threads": [thread for some in threads for thread in some]}


async def gather_thread(config: FleetConfig, ref: ThreadRef) -> Json | None:
    """Return one thread as `gather` does; None when the fleet has no record of it.

    Raises:
        FleetError: as `gather`.
    """
    store = opened_store(config)
    try:
        async with redis_errors(str(config.redis.url)):
            record = await Records(store).read(ref)
            return await _thread(store, record) if record.exists else None
    finally:
        await store.close()


async def under_way(store: Store, host: str) -> list[str]:
    """Return the aliases of the threads that need the host `host` just now: a turn runs, is published or closed."""
    running = await Hosts(store).running(host)
    sessions = set((await store.hash(store.key("sections"))).values())
    records = [record for session in sessions for record in await Records(store).all(session)]
    ending = [record.ref for record in records if record.host == host and record.step in ("publish", "close")]
    return sorted({ref.alias for ref in (*running, *ending)})


async def _section(store: Store, section: SectionConfig) -> Json:
    state = await store.hash(store.key("section-state", section.name))
    return {
        "name": section.name,
        "session": await store.redis.hget(store.key("sections"), section.name),
        "state": state.get("state", "waiting"),
        "reason": state.get("reason", "not polled yet"),
    }


async def _threads(store: Store, session: str) -> list[Json]:
    return [await _thread(store, record) for record in await Records(store).all(session)]


async def _thread(store: Store, record: Record) -> Json:
    return {
        "session": record.ref.session,
        "alias": record.ref.alias,
        "state": record.state,
        "host": record.host,
        "epoch": record.epoch,
        "turn": record.turn,
        "step": record.step,
        "journal": await store.journal_depth(record.ref),
        "agent": record.agent,
        "work_folder": record.work_folder,
        "stop": record.stop,
        "error": record.error,
    }
