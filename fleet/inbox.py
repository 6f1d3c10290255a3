"""The inbox of a thread: what persons have said and no finished turn was given yet.

Key `NS:{SESSION}:inbox:ALIAS` (hash): item id → the item as JSON, sealed; see `inbox_add.lua`. What does not open was
not put there by the fleet: it is taken out, and the thread's list is read again, which has whatever stood in its place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from typing import Any

from fleet.refs import ThreadRef
from fleet.signing import Seal, TamperedError
from fleet.store import Store

log = logging.getLogger(__name__)

Json = dict[str, Any]

#: Ids of persons' items that are remembered per thread: more than can stand within one overlap of the list.
SEEN_KEPT = 5000


def order(item: Json) -> tuple[float, str, str]:
    """Sort by the platform's own time, a number or an ISO string by version, and the id within one instant."""
    created = item.get("created_at")
    if isinstance(created, int | float):
        return (created, "", item["id"])
    return (0, str(created), item["id"])


class Inbox:
    """Fills and reads the inboxes of threads."""

    def __init__(self, store: Store, seal: Seal) -> None:
        self._store = store
        self._seal = seal

    async def add(self, ref: ThreadRef, item: Json) -> None:
        """Take a person's item in, once, if its thread is with us."""
        keys = self._store.thread(ref)
        sealed = self._seal.seal(_purpose(ref, item["id"]), json.dumps(item))
        await self._store.run("inbox_add", [keys.inbox, keys.seen, keys.record], [SEEN_KEPT, item["id"], sealed])

    async def waiting(self, ref: ThreadRef) -> list[Json]:
        """Return what waits in a thread's inbox, in the order in which it was said."""
        found = []
        for id_, sealed in (await self._store.hash(self._store.thread(ref).inbox)).items():
            try:
                found.append(json.loads(self._seal.open(_purpose(ref, id_), sealed)))
            except TamperedError as error:
                log.warning("%s: an item of the inbox is dropped: %s", ref, error)
                await self.drop(ref, [id_])
                await read_again(self._store, ref, id_)
        return sorted(found, key=order)

    async def forget(self, ref: ThreadRef, id_: str) -> None:
        """Forget that an item was ever seen."""
        keys = self._store.thread(ref)
        await self._store.redis.zrem(keys.seen, id_)
        await self.drop(ref, [id_])

    async def drop(self, ref: ThreadRef, ids: Collection[str]) -> None:
        """Take items out of a thread's inbox."""
        await self._store.redis.hdel(self._store.thread(ref).inbox, *ids)


async def read_again(store: Store, ref: ThreadRef, id_: str) -> None:
    """Forget that an item was seen, and let the thread's list be read again: what Redis had of it is not the truth."""
    keys = store.thread(ref)
    await store.redis.zrem(keys.seen, id_)
    await store.run("due_add", [keys.session.due, keys.session.due_at], [ref.alias, f"list {ref.alias}", 0])


def _purpose(ref: ThreadRef, id_: str) -> str:
    return f"inbox {ref} {id_}"
