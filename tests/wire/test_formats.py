"""Workers of two releases side by side: what a newer one has written is left to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from fleet.errors import FleetError
from fleet.formats import FORMAT
from fleet.reconcile import reconcile
from tests.wire.stage import Stage

Play = Callable[..., Any]


def test_a_thread_that_a_newer_release_holds_is_left_to_it_and_holds_up_no_other(play: Play):
    async def scene(stage: Stage) -> None:
        store = stage.fleet.store
        for alias in ("newer", "ours"):
            await stage.hand_over(alias)
        await stage.poll()
        newer = store.thread(stage.ref("newer")).record
        assert await store.redis.hget(newer, "format") == str(FORMAT)
        await store.redis.hset(newer, mapping={"format": str(FORMAT + 1), "step": "a new one"})
        before = await store.hash(newer)

        said = await stage.say("newer", "go")
        await stage.say("ours", "go")
        with pytest.raises(FleetError, match="format_newer"):
            await stage.poll()
        while any(name != "run_turn" for name, _ in stage.nudges.waiting):
            with suppress(FleetError):
                await stage.settle()
        assert await store.hash(newer) == before
        assert (await stage.record("ours")).step == "run"
        assert [record.ref.alias for record in await stage.fleet.records.all(stage.at.session_id)] == ["ours"]

        session = store.session(stage.at.session_id)
        for key in (session.attention, session.due_at):
            await store.redis.zadd(key, {"newer": 0, "ours": 0})
        await reconcile(stage.fleet)
        assert ("ingest", stage.ref("newer")) in stage.nudges.waiting
        assert await stage.fleet.due_items(stage.ref("newer")) == [said]

    play(scene)
