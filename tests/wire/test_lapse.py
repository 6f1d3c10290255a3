"""A Redis that was started again may have forgotten what the platform has stored."""

from __future__ import annotations

from pathlib import Path

from fleet.drain import drain
from fleet.items import status
from fleet.journal import Numbered, item_draft
from fleet.refs import ThreadRef, post_id
from tests.wire.stage import Sandbox, Stage, on_stage


async def _say(stage: Stage, ref: ThreadRef, cause: str) -> None:
    await stage.fleet.journal.append_once(ref, cause, item_draft(status(cause, "")))


def test_what_the_platform_stored_before_redis_forgot_it_is_not_posted_again(
    sandbox: Sandbox, redis_url: str, tmp_path: Path
):
    async def scene(stage: Stage) -> None:
        ref = stage.ref("forgotten")
        await stage.hand_over("forgotten")
        await stage.poll()
        keys = stage.fleet.store.thread(ref)
        await _say(stage, ref, "first")
        await drain(stage.fleet, ref)
        told = await stage.texts("forgotten")
        # An older Redis: the entry and its cause are as they were before it was posted, and one more had not been.
        await stage.fleet.store.redis.hset(keys.journal_meta, "run", "of-another-redis")
        await stage.fleet.store.redis.delete(keys.causes)
        await _say(stage, ref, "first")
        await _say(stage, ref, "second")
        await drain(stage.fleet, ref)
        posts = [item["metadata"].get("post_id") for item in await stage.items("forgotten")]
        assert posts.count(post_id(ref, "first", 0)) == posts.count(post_id(ref, "second", 0)) == 1
        assert len(await stage.texts("forgotten")) == len(told) + 1

    on_stage(sandbox, redis_url, tmp_path, scene)


def test_a_turn_numbers_its_items_anew_in_a_new_epoch(sandbox: Sandbox, redis_url: str, tmp_path: Path):
    async def scene(stage: Stage) -> None:
        ref = stage.ref("restored")
        await stage.hand_over("restored", "hello")
        await stage.poll()
        for _ in range(2):
            record = await stage.record("restored")
            lease = await stage.fleet.leases.take(record)
            assert lease is not None
            item = Numbered(1, f"of {record.epoch}", "{}")
            assert (await stage.fleet.journal.append(lease, 1, [item])).last == 1
            await stage.fleet.leases.release(lease)
            await stage.fleet.records.claim(record, "start", host="alpha", turn=0)
        assert len([post for post in await stage.fleet.journal.waiting(ref) if post.startswith("of ")]) == 2

    on_stage(sandbox, redis_url, tmp_path, scene)
