"""What is left of a thread when it has ended: everything expires or goes, and nothing in Redis names it for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fleet import finish, inbound, lifecycle
from fleet.envelope import with_state
from fleet.events import Question
from fleet.hostfiles import LOGS_KEPT, HostFiles, LogWriter
from fleet.hosts import Hosts
from fleet.journal import Numbered
from fleet.prompts import new_prompt
from fleet.reconcile import reconcile
from fleet.record import ENDED_TTL_MS
from fleet.refs import ThreadRef
from fleet.store import Store
from tests.wire.stage import Stage

Play = Callable[..., Any]

#: ms by which the keys of a thread that ended at one time may differ: the time the test takes to look.
SLACK_MS = 60_000
#: Keys with a life of their own, of seconds.
LEASES = frozenset({"lease", "drain"})
#: Every way in which a thread ends.
ENDS = ("completed", "failed", "removed")


async def has_worked(stage: Stage) -> None:
    """Bring thread `t` to a turn that has said something, with an inbox and an open question."""
    await stage.hand_over("t", "one", "two")
    await stage.poll()
    lease = await stage.fleet.leases.take(await stage.record("t"))
    assert lease is not None
    item = {"content": [{"type": "text", "text": "said"}], "metadata": {"type": "text", "post_id": "p1"}}
    await stage.fleet.journal.append(lease, 1, [Numbered(1, "p1", json.dumps(item))])
    prompt = new_prompt("text", (Question("Which?", "Choice", (), False),), "")
    assert await stage.fleet.prompts.open(stage.ref("t"), prompt, lease.token)
    await stage.fleet.records.transition(lease.record, "turn_ran", token=lease.token, release=True, said=1)
    await stage.fleet.nudges.post_items(stage.ref("t"))
    await stage.settle()


async def end(stage: Stage, way: str) -> None:
    """Let thread `t` end because its user wants it or an item was refused, and what is under way come to its end."""
    record = await stage.record("t")
    if way == "failed":
        await lifecycle.fail(stage.fleet, record, "THREAD_POST_FAILED", "refused")
    elif way == "removed":
        await stage.person.delete_object(stage.at, "t")
        await stage.poll()
    else:
        value = (await stage.person.download_object(stage.at, "t"))["value"]
        await stage.person.upload_object(stage.at, "t", with_state(value, "completed"))
        await stage.poll()
    await finish.publish_artifacts(stage.fleet, record.ref, record.epoch, record.turn)
    await finish.close_turn(stage.fleet, record.ref, record.epoch, record.turn)
    await stage.settle()
    assert (await stage.record("t")).outcome == way


async def lives(stage: Stage) -> dict[str, int]:
    """Return the keys of thread `t` by name, and for how many ms each lives: -1 for ever."""
    prefix = stage.fleet.store.session(stage.at.session_id).prefix
    keys = [key async for key in stage.fleet.store.redis.scan_iter(f"{prefix}:*:t")]
    return {key.split(":")[-2]: await stage.fleet.store.redis.pttl(key) for key in keys}


async def expire(stage: Stage) -> None:
    """Let the time pass after which the keys of thread `t` are gone."""
    await stage.fleet.store.redis.delete(*stage.fleet.store.thread(stage.ref("t")).kept)
    await stage.fleet.store.redis.delete(stage.fleet.store.thread(stage.ref("t")).record)


async def start_again(stage: Stage) -> None:
    value = (await stage.person.download_object(stage.at, "t"))["value"]
    await stage.person.upload_object(stage.at, "t", with_state(value, "pending"))
    await stage.poll()


async def compare_whole(stage: Stage) -> None:
    """Poll as after `polling.resync_s`, and reconcile all that was put off, as if its time had come."""
    keys = stage.fleet.store.session(stage.at.session_id)
    await stage.fleet.store.redis.hdel(keys.section("one"), "resync_at")
    await stage.poll()
    for key in (keys.attention, keys.due_at):
        for alias in await stage.fleet.store.scores(key):
            await stage.fleet.store.redis.zadd(key, {alias: 1})
    for name in await stage.fleet.store.hash(keys.due):
        if name.startswith("list "):
            await stage.fleet.store.redis.hset(keys.due, name, "1")
    await reconcile(stage.fleet)
    await stage.settle()


async def mentions(stage: Stage, alias: str) -> list[str]:
    """Return the keys and members of this Redis that name a thread by its alias, as a word of its own."""
    found = []
    async for key in stage.fleet.store.redis.scan_iter():
        if ":events:" in key:
            continue  # forgotten by their age, `fleet.sections.EVENTS_KEPT_MS`
        words = [word async for name in _names(stage.fleet.store, key) for word in name.split()]
        found += [key] if alias in (*key.split(":"), *words) else []
    return found


async def _names(store: Store, key: str) -> AsyncIterator[str]:
    """Yield what a key holds, without the values of hashes."""
    match await store.redis.type(key):
        case "hash":
            names = await store.redis.hkeys(key)
        case "set":
            names = await store.redis.smembers(key)
        case "zset":
            names = await store.redis.zrange(key, 0, -1)
        case _:
            names = []
    for name in names:
        yield name


@pytest.mark.parametrize("way", ENDS)
def test_of_an_ended_thread_every_key_expires_with_its_record_or_is_gone(play: Play, way: str):
    async def scene(stage: Stage) -> None:
        await has_worked(stage)
        alive = await lives(stage)
        assert {"record", "journal-meta", "causes", "inbox", "seen", "prompt"} <= alive.keys()
        assert {name for name, life in alive.items() if life >= 0} <= LEASES
        await end(stage, way)
        left = await lives(stage)
        assert {"record", "causes"} <= left.keys()
        assert not left.keys() & {"journal", "journal-meta", *LEASES}
        assert all(ENDED_TTL_MS - SLACK_MS < life <= ENDED_TTL_MS for life in left.values()), left

    play(scene)


@pytest.mark.parametrize("way", ["completed", "failed"])
def test_a_thread_that_starts_anew_has_no_key_that_expires(play: Play, way: str):
    async def scene(stage: Stage) -> None:
        await has_worked(stage)
        await end(stage, way)
        await stage.say("t", "three")
        await start_again(stage)
        assert (await stage.record("t")).step == "run"
        again = await lives(stage)
        assert {"record", "causes", "inbox", "seen"} <= again.keys()
        assert {name for name, life in again.items() if life >= 0} <= LEASES
        assert "three" in await stage.inbox("t")

    play(scene)


@pytest.mark.parametrize("way", ENDS)
def test_when_the_keys_of_an_ended_thread_have_expired_nothing_names_it(play: Play, way: str):
    async def scene(stage: Stage) -> None:
        await has_worked(stage)
        keys = stage.fleet.store.session(stage.at.session_id)
        await stage.fleet.store.redis.zadd(keys.attention, {"t": 1})
        await reconcile(stage.fleet)  # it stands still, as any thread may for a while
        assert await mentions(stage, "t")
        await end(stage, way)
        await compare_whole(stage)
        await expire(stage)
        await compare_whole(stage)
        assert await mentions(stage, "t") == []

    play(scene)


def test_what_an_ended_thread_has_still_to_say_does_not_expire(play: Play):
    async def scene(stage: Stage) -> None:
        await has_worked(stage)
        record = await stage.record("t")
        await stage.fleet.records.request_stop(record, "completed")
        await finish.publish_artifacts(stage.fleet, record.ref, record.epoch, record.turn)
        await finish.close_turn(stage.fleet, record.ref, record.epoch, record.turn)
        waiting = await lives(stage)
        assert waiting["record"] > 0
        assert (waiting["journal"], waiting["journal-meta"]) == (-1, -1)
        await stage.settle()
        assert [text.split()[0] for text in await stage.texts("t")] == ["said", "Turn"]
        assert not (await lives(stage)).keys() & {"journal", "journal-meta"}

    play(scene)


def test_a_first_turn_is_heard_after_all_of_an_earlier_life_has_expired(play: Play):
    async def scene(stage: Stage) -> None:
        await has_worked(stage)
        await end(stage, "completed")
        await expire(stage)
        HostFiles(stage.fleet.environment.home, stage.ref("t")).checkpoint.unlink(missing_ok=True)
        await start_again(stage)
        record = await stage.record("t")
        assert (record.step, record.turn) == ("run", 1)
        lease = await stage.fleet.leases.take(record)
        assert lease is not None
        assert (await stage.fleet.journal.append(lease, 1, [Numbered(1, "new", "{}")])).depth == 1

    play(scene)


def test_an_ended_thread_takes_nothing_in_but_hears_it_when_it_starts_again(play: Play):
    async def scene(stage: Stage) -> None:
        await has_worked(stage)
        before = await stage.record("t")
        await end(stage, "removed")
        await stage.hand_over("t")
        await stage.say("t", "said while it was ending")
        item = (await stage.items("t"))[-1]
        await stage.fleet.inbox.add(before.ref, item)
        await inbound.catch_up(stage.fleet, stage.at, await stage.record("t"))
        assert await stage.inbox("t") == []
        assert not (await lives(stage)).keys() & {"inbox", "seen"}
        await stage.poll()
        assert "said while it was ending" in await stage.inbox("t")

    play(scene)


def test_a_thread_that_moves_on_does_not_count_as_standing_still(play: Play):
    async def scene(stage: Stage) -> None:
        await stage.hand_over("t", "hello")
        await stage.poll()
        keys = stage.fleet.store.session(stage.at.session_id)
        await stage.fleet.store.redis.zadd(keys.attention, {"t": 1})
        await reconcile(stage.fleet)
        assert await stage.fleet.store.redis.hget(keys.standing, "t") == "1"
        record = await stage.record("t")
        assert await stage.fleet.records.transition(record, "turn_ran")
        assert not await stage.fleet.store.redis.hexists(keys.standing, "t")

    play(scene)


def test_places_in_a_folder_and_the_line_for_them_expire(redis_url: str):
    async def work() -> None:
        store = Store(redis_url, "test")
        hosts = Hosts(store)
        first, second = ThreadRef("s", "first"), ThreadRef("s", "second")
        try:
            assert await hosts.turn_runs("alpha", "/repo", first, 5000, 1)
            assert not await hosts.turn_runs("alpha", "/repo", second, 5000, 1)
            assert 0 < await store.redis.pttl(store.key("host", "alpha", "folder", "/repo")) <= 5000
            assert await store.redis.pttl(store.key("host", "alpha", "line", "/repo")) > 5000
        finally:
            await store.close()

    asyncio.run(work())


def test_a_threads_log_is_bounded_and_keeps_the_newest_lines(tmp_path: Path):
    files = HostFiles(tmp_path, ThreadRef("s", "t"))
    item = {"content": [], "metadata": {"post_id": "p"}}
    said = [json.dumps({"epoch": 1, "turn": 1, "n": n, "uid": None, "item": item}) for n in range(1, 201)]
    max_bytes = 1000
    with LogWriter(files, max_bytes) as log:
        for line in said:
            log.write(line)
    kept = [entry["n"] for entry in files.said()]
    assert kept == list(range(kept[0], len(said) + 1))
    sizes = [path.stat().st_size for path in files.log.parent.iterdir()]
    assert len(sizes) == LOGS_KEPT + 1
    assert max(sizes) <= max_bytes + max(map(len, said))
