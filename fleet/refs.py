"""Names of threads and of the Redis keys that belong to them.

Every key of a session carries the hash tag `{SESSION}`, so that one script may touch a session's keys on any Redis
topology. What each key holds stands at the head of the Lua file or module that owns it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ThreadRef:
    """A thread: the id of its session and its alias there."""

    session: str
    alias: str

    def __str__(self) -> str:
        return f"{self.session}/{self.alias}"


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The keys of one session."""

    prefix: str

    @classmethod
    def of(cls, namespace: str, session: str) -> SessionKeys:
        """Return the keys of `session` in `namespace`."""
        return cls(f"{namespace}:{{{session}}}")

    @property
    def session(self) -> str:
        """Hash: where the session lives and whether it is served (`fleet.attach`)."""
        return f"{self.prefix}:session"

    def section(self, name: str) -> str:
        """Hash: how far a section of the session was read (`fleet.sections`)."""
        return f"{self.prefix}:section:{name}"

    def lock(self, name: str) -> str:
        """String with expiry: token of who polls a section just now."""
        return f"{self.prefix}:lock:{name}"

    def events(self, name: str) -> str:
        """Sorted set: ids of events that a section has seen → Redis time in ms."""
        return f"{self.prefix}:events:{name}"

    @property
    def due(self) -> str:
        """Hash: what was noticed and is not handled yet (`section_commit.lua`)."""
        return f"{self.prefix}:due"

    @property
    def due_at(self) -> str:
        """Sorted set: alias with something due → Redis time in ms when to nudge its handling again."""
        return f"{self.prefix}:due-at"

    @property
    def attention(self) -> str:
        """Sorted set: alias of a thread with something outstanding → Redis time in ms when to look again."""
        return f"{self.prefix}:attention"

    @property
    def standing(self) -> str:
        """Hash: alias → how often in a row reconcile found it standing still, `due ALIAS` → likewise; its writer."""
        return f"{self.prefix}:standing"

    @property
    def ours(self) -> str:
        """Sorted set: ids of items that we stored or know to be ours → Redis time in ms."""
        return f"{self.prefix}:ours"

    @property
    def threads(self) -> str:
        """Set: aliases of the threads that have a record."""
        return f"{self.prefix}:threads"

    @property
    def kinds(self) -> str:
        """Hash: alias → `other` (no thread) or `foreign` (a thread that is not ours), for objects that need no look.

        Written by the comparison, struck off when a thread turns out to be ours.
        """
        return f"{self.prefix}:kinds"


@dataclass(frozen=True, slots=True)
class ThreadKeys:
    """The keys of one thread."""

    session: SessionKeys
    alias: str

    @classmethod
    def of(cls, namespace: str, ref: ThreadRef) -> ThreadKeys:
        """Return the keys of `ref` in `namespace`."""
        return cls(SessionKeys.of(namespace, ref.session), ref.alias)

    def _key(self, name: str) -> str:
        return f"{self.session.prefix}:{name}:{self.alias}"

    @property
    def record(self) -> str:
        """Hash: the thread record (`fleet.record`)."""
        return self._key("record")

    @property
    def lease(self) -> str:
        """String with expiry: the token of the step's holder (`take_lease.lua`)."""
        return self._key("lease")

    @property
    def drain(self) -> str:
        """String with expiry: the token of the drainer (`drain_next.lua`)."""
        return self._key("drain")

    @property
    def journal(self) -> str:
        """Stream: what was said and is not stored yet (`journal_append.lua`)."""
        return self._key("journal")

    @property
    def journal_meta(self) -> str:
        """Hash: the journal's numbers (`journal_append.lua`)."""
        return self._key("journal-meta")

    @property
    def causes(self) -> str:
        """Sorted set: idempotency keys of entries no turn numbers (`journal_append_once.lua`)."""
        return self._key("causes")

    @property
    def inbox(self) -> str:
        """Hash: id of a person's item that no finished turn consumed → the item (`inbox_add.lua`)."""
        return self._key("inbox")

    @property
    def seen(self) -> str:
        """Sorted set: ids of persons' items that were taken into the inbox (`inbox_add.lua`)."""
        return self._key("seen")

    @property
    def prompt(self) -> str:
        """Hash: the open prompt (`fleet.prompts`)."""
        return self._key("prompt")

    @property
    def kept(self) -> tuple[str, ...]:
        """What is kept of a thread beside its record when it ends, and expires with it (`transition.lua`)."""
        return (self.causes, self.inbox, self.seen, self.prompt)


def post_id(ref: ThreadRef, *cause: object) -> str:
    """Return the idempotency key of a post: a pure function of the thread and of what caused it.

    A turn's item passes its epoch, turn and number; any other item the key made from its cause.
    """
    text = "\x1f".join((ref.session, ref.alias, *map(str, cause)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
