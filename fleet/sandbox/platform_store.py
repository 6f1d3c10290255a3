"""What the embedded platform keeps: users, revisions, sessions and all that is in them, in one SQLite file.

The store knows the platform's own rules (who may write, what a thread is, which event follows which change) and
nothing of HTTP. Each public method is one transaction. A refusal is a `PlatformRefusal` with the platform's code.

Times never decrease, but two may be equal, as on the real platform; rows of one time are told apart by `seq`, the order
of storing.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleet.sandbox.platform_values import (
    Event,
    Item,
    Json,
    ObjectEntry,
    Page,
    PlatformRefusal,
    Position,
    Revision,
    Session,
    StoredObject,
    User,
    Window,
    microseconds_now,
    to_json,
)

#: Seconds to wait for another process that writes to the same file.
BUSY_TIMEOUT_S = 10.0
#: Sorts behind every alias that begins with the text before it, because aliases are ASCII.
_AFTER_PREFIX = "\x7f"

WRITABLE_PHASES = ("draft", "managed")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS users (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL, is_admin INTEGER NOT NULL,
    key_hash TEXT NOT NULL UNIQUE               -- SHA-256 of the API key; the key itself is nowhere in the file
);
CREATE TABLE IF NOT EXISTS revisions (
    id TEXT PRIMARY KEY, org_id TEXT NOT NULL, blob_id TEXT NOT NULL, phase TEXT NOT NULL, status TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, revision_id TEXT NOT NULL REFERENCES revisions (id), alias TEXT, status TEXT NOT NULL,
    UNIQUE (revision_id, alias)
);
CREATE TABLE IF NOT EXISTS objects (
    session_id TEXT NOT NULL, alias TEXT NOT NULL,
    type TEXT,                                  -- value.type, NULL when the value has none
    value TEXT,                                 -- JSON; NULL once deleted: a deleted object is no unknown one
    user_id TEXT NOT NULL, created_at INTEGER NOT NULL,
    PRIMARY KEY (session_id, alias)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (
    session_id TEXT NOT NULL, alias TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (session_id, alias)
);
CREATE TABLE IF NOT EXISTS items (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, alias TEXT NOT NULL,
    user_id TEXT NOT NULL, parent_id TEXT, created_at INTEGER NOT NULL,
    body TEXT NOT NULL                          -- JSON of {content, metadata}
);
CREATE INDEX IF NOT EXISTS items_in_time ON items (session_id, alias, created_at, seq);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL, session_id TEXT NOT NULL, created_at INTEGER NOT NULL,
    type TEXT NOT NULL, alias TEXT, object_type TEXT, item_id TEXT
);
CREATE INDEX IF NOT EXISTS events_in_time ON events (session_id, created_at, seq);
"""

_SESSION_AND_REVISION = """
SELECT s.id, s.revision_id, s.alias, s.status, r.id, r.org_id, r.blob_id, r.phase, r.status
FROM revisions r LEFT JOIN sessions s ON s.revision_id = r.id AND s.id = :session WHERE r.id = :revision
"""
_ITEMS_ASCENDING = """
SELECT id, user_id, parent_id, created_at, body, seq FROM items
WHERE session_id = :session AND alias = :alias AND created_at BETWEEN :low AND :high AND (created_at, seq) > (:at, :seq)
ORDER BY created_at, seq LIMIT :limit
"""
_ITEMS_DESCENDING = """
SELECT id, user_id, parent_id, created_at, body, seq FROM items
WHERE session_id = :session AND alias = :alias AND created_at BETWEEN :low AND :high AND (created_at, seq) < (:at, :seq)
ORDER BY created_at DESC, seq DESC LIMIT :limit
"""
_EVENTS_ASCENDING = """
SELECT id, type, created_at, alias, object_type, item_id, seq FROM events
WHERE session_id = :session AND created_at BETWEEN :low AND :high AND (created_at, seq) > (:at, :seq)
ORDER BY created_at, seq LIMIT :limit
"""
_EVENTS_DESCENDING = """
SELECT id, type, created_at, alias, object_type, item_id, seq FROM events
WHERE session_id = :session AND created_at BETWEEN :low AND :high AND (created_at, seq) < (:at, :seq)
ORDER BY created_at DESC, seq DESC LIMIT :limit
"""
_OBJECTS = """
SELECT alias, type FROM objects
WHERE session_id = :session AND value IS NOT NULL AND created_at <= :visible_until
    AND alias >= :prefix AND alias < :prefix_end AND alias > :after
ORDER BY alias LIMIT :limit
"""
# Like _OBJECTS, but aliases that go on after the delimiter are one row: the text up to and with the delimiter.
_OBJECTS_GROUPED = """
SELECT CASE instr(substr(alias, :rest), :delimiter)
        WHEN 0 THEN alias
        ELSE substr(alias, 1, :rest + instr(substr(alias, :rest), :delimiter) - 1)
    END AS entry, max(type)
FROM objects
WHERE session_id = :session AND value IS NOT NULL AND created_at <= :visible_until
    AND alias >= :prefix AND alias < :prefix_end AND entry > :after
GROUP BY entry ORDER BY entry LIMIT :limit
"""


class PlatformStore:
    """The platform's data under one file path. Not for use from several threads."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        # NORMAL loses the newest commits when the machine loses power, never when the process dies.
        self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + _SCHEMA)
        self._latest: int = self._db.execute("SELECT coalesce(max(created_at), 0) FROM events").fetchone()[0]

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # Users

    def put_user(self, user: User, key: str) -> None:
        """Add `user`, or give the user of that id these properties and this API key."""
        self._db.execute(
            "INSERT OR REPLACE INTO users (id, name, email, is_admin, key_hash) VALUES (?, ?, ?, ?, ?)",
            (user.id, user.name, user.email, user.is_admin, _key_hash(key)),
        )

    def user_of(self, key: str) -> User | None:
        """Return the user whose API key this is."""
        row = self._db.execute(
            "SELECT id, name, email, is_admin FROM users WHERE key_hash = ?", (_key_hash(key),)
        ).fetchone()
        return User(row[0], row[1], row[2], bool(row[3])) if row else None

    # Revisions

    def add_revision(self, revision: Revision) -> None:
        """Add `revision`; one that is there already stays as it is."""
        self._db.execute(
            "INSERT OR IGNORE INTO revisions (id, org_id, blob_id, phase, status) VALUES (?, ?, ?, ?, ?)",
            (revision.id, revision.org_id, revision.blob_id, revision.phase, revision.status),
        )

    def revision(self, revision_id: str) -> Revision:
        """Return a revision by its id.

        Raises:
            PlatformRefusal: `revision_not_found`.
        """
        row = self._db.execute(
            "SELECT id, org_id, blob_id, phase, status FROM revisions WHERE id = ?", (revision_id,)
        ).fetchone()
        if row is None:
            raise _no_revision(revision_id)
        return Revision(*row)

    def revision_of_blob(self, org_id: str, blob_id: str, ref: str) -> Revision:
        """Return a blob's revision by its id, or its first one for the ref `default`.

        Raises:
            PlatformRefusal: `revision_not_found`.
        """
        row = self._db.execute(
            "SELECT id, org_id, blob_id, phase, status FROM revisions"
            " WHERE org_id = ? AND blob_id = ? AND ? IN (id, 'default') ORDER BY rowid LIMIT 1",
            (org_id, blob_id, ref),
        ).fetchone()
        if row is None:
            raise PlatformRefusal("revision_not_found", f"blob {org_id}/{blob_id} has no revision {ref}")
        return Revision(*row)

    def set_revision(self, revision_id: str, *, phase: str | None = None, status: str | None = None) -> Revision:
        """Change what is given and return the revision.

        Raises:
            PlatformRefusal: `revision_not_found`.
        """
        self._db.execute(
            "UPDATE revisions SET phase = coalesce(?, phase), status = coalesce(?, status) WHERE id = ?",
            (phase, status, revision_id),
        )
        return self.revision(revision_id)

    # Sessions

    def add_session(self, revision_id: str, *, session_id: str | None = None, alias: str | None = None) -> Session:
        """Open a session; without an id it gets a new one.

        Raises:
            PlatformRefusal: `revision_not_found`, `session_exists`.
        """
        session = Session(session_id or _new_id(), self.revision(revision_id).id, alias, "open")
        try:
            self._db.execute(
                "INSERT INTO sessions (id, revision_id, alias, status) VALUES (?, ?, ?, ?)",
                (session.id, session.revision_id, session.alias, session.status),
            )
        except sqlite3.IntegrityError:
            raise PlatformRefusal("session_exists", "there is a session with that id or alias") from None
        return session

    def find_session(self, revision_id: str, id_or_alias: str) -> Session:
        """Return a session by its id or, failing that, by its alias.

        Raises:
            PlatformRefusal: `revision_not_found`, `not_found`, `access_denied` (deleted).
        """
        self.revision(revision_id)
        row = self._db.execute(
            "SELECT id, revision_id, alias, status FROM sessions WHERE revision_id = :revision"
            " AND (id = :ref OR alias = :ref) ORDER BY id <> :ref LIMIT 1",
            {"revision": revision_id, "ref": id_or_alias},
        ).fetchone()
        if row is None:
            raise PlatformRefusal("not_found", f"there is no session {id_or_alias}")
        return _undeleted(Session(*row))

    def readable_session(self, revision_id: str, session_id: str) -> Session:
        """Return a session by its id.

        Raises:
            PlatformRefusal: `revision_not_found`, `access_denied` (unknown or deleted; an alias is unknown here).
        """
        return self._session_and_revision(revision_id, session_id)[0]

    def writable_session(self, revision_id: str, session_id: str) -> Session:
        """Return a session that takes writes.

        Raises:
            PlatformRefusal: as `readable_session`, `revision_not_writable`, `revision_not_ready`, `session_not_open`.
        """
        session, revision = self._session_and_revision(revision_id, session_id)
        if revision.phase not in WRITABLE_PHASES:
            raise PlatformRefusal("revision_not_writable", f"revision {revision_id} is in phase {revision.phase}")
        if revision.status != "ready":
            raise PlatformRefusal("revision_not_ready", f"revision {revision_id} is {revision.status}")
        if session.status != "open":
            raise PlatformRefusal("session_not_open", f"session {session_id} is {session.status}")
        return session

    def set_session_status(self, session_id: str, status: str) -> Session:
        """Change a session's status, with the event for it.

        Raises:
            PlatformRefusal: `not_found`.
        """
        with self._transaction():
            changed = self._db.execute("UPDATE sessions SET status = ? WHERE id = ?", (status, session_id))
            if not changed.rowcount:
                raise PlatformRefusal("not_found", f"there is no session {session_id}")
            if status != "open":
                self._add_event(session_id, f"session_{status}", self._now())
        row = self._db.execute(
            "SELECT id, revision_id, alias, status FROM sessions WHERE id = ?", (session_id,)
        ).fetchone()
        return Session(*row)

    # Objects and files

    def put_object(
        self, session_id: str, alias: str, value: Json, user_id: str, *, content: bytes | None = None
    ) -> StoredObject:
        """Store `value` under `alias`; `content` are the bytes of a file."""
        now = self._now()
        kind = _type_of(value)
        with self._transaction():
            created_at = self._db.execute(
                "INSERT INTO objects (session_id, alias, type, value, user_id, created_at) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET type = excluded.type, value = excluded.value, user_id = excluded.user_id,"
                " created_at = iif(value IS NULL, excluded.created_at, created_at) RETURNING created_at",
                (session_id, alias, kind, to_json(value, ensure_ascii=False), user_id, now),
            ).fetchone()[0]
            self._db.execute("DELETE FROM files WHERE session_id = ? AND alias = ?", (session_id, alias))
            if content is not None:
                self._db.execute("INSERT INTO files VALUES (?, ?, ?)", (session_id, alias, content))
            self._add_event(session_id, "session_object_modified", now, alias, kind)
        return StoredObject(alias, value, created_at, user_id)

    def stored_object(self, session_id: str, alias: str) -> StoredObject:
        """Return the object under `alias`.

        Raises:
            PlatformRefusal: `not_found`, `access_denied` (deleted).
        """
        row = self._db.execute(
            "SELECT value, created_at, user_id FROM objects WHERE session_id = ? AND alias = ?", (session_id, alias)
        ).fetchone()
        if row is None:
            raise PlatformRefusal("not_found", f"there is no object {alias}")
        if row[0] is None:
            raise PlatformRefusal("access_denied", f"object {alias} was deleted", 403)
        return StoredObject(alias, json.loads(row[0]), row[1], row[2])

    def stored_file(self, session_id: str, alias: str) -> tuple[StoredObject, bytes]:
        """Return the file under `alias` and its bytes.

        Raises:
            PlatformRefusal: as `stored_object`; `not_found` also for an object that is no file.
        """
        found = self.stored_object(session_id, alias)
        row = self._db.execute(
            "SELECT content FROM files WHERE session_id = ? AND alias = ?", (session_id, alias)
        ).fetchone()
        if row is None:
            raise PlatformRefusal("not_found", f"object {alias} is no file")
        return found, row[0]

    def delete_object(self, session_id: str, alias: str) -> None:
        """Delete the object under `alias`, and a thread's items with it.

        Raises:
            PlatformRefusal: as `stored_object`.
        """
        kind = _type_of(self.stored_object(session_id, alias).value)
        place = (session_id, alias)
        with self._transaction():
            self._db.execute("UPDATE objects SET value = NULL WHERE session_id = ? AND alias = ?", place)
            self._db.execute("DELETE FROM files WHERE session_id = ? AND alias = ?", place)
            self._db.execute("DELETE FROM items WHERE session_id = ? AND alias = ?", place)
            self._add_event(session_id, "session_object_deleted", self._now(), alias, kind)

    def list_objects(
        self, session_id: str, *, limit: int, visible_until: int, prefix: str = "", delimiter: str = "", after: str = ""
    ) -> tuple[list[ObjectEntry], bool]:
        """Return up to `limit` entries by alias, behind the entry `after`, and whether more follow.

        With a `delimiter`, all objects whose alias goes on after the first one behind `prefix` are one entry.
        """
        parameters: dict[str, object] = {
            "session": session_id,
            "visible_until": visible_until,
            "prefix": prefix,
            "prefix_end": prefix + _AFTER_PREFIX,
            "after": after,
            "limit": limit + 1,
        }
        if not delimiter:
            entries = [ObjectEntry(alias, kind) for alias, kind in self._db.execute(_OBJECTS, parameters)]
            return entries[:limit], len(entries) > limit
        parameters |= {"delimiter": delimiter, "rest": len(prefix) + 1}
        entries = [
            ObjectEntry(entry, kind, is_prefix=delimiter in entry[len(prefix) :])
            for entry, kind in self._db.execute(_OBJECTS_GROUPED, parameters)
        ]
        return entries[:limit], len(entries) > limit

    # Thread items and events

    def post_item(
        self, session_id: str, alias: str, body: str, user_id: str, parent_id: str | None = None
    ) -> tuple[str, int]:
        """Append an item to a thread; `body` is the JSON of {content, metadata}. Return its id and time.

        Raises:
            PlatformRefusal: `invalid_thread_envelope`, `access_denied` (a deleted thread).
        """
        self._check_thread(session_id, alias)
        item_id, now = _new_id(), self._now()
        with self._transaction():
            self._db.execute(
                "INSERT INTO items (id, session_id, alias, user_id, parent_id, created_at, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (item_id, session_id, alias, user_id, parent_id, now, body),
            )
            self._add_event(session_id, "session_thread_item_posted", now, alias, "thread", item_id)
        return item_id, now

    def item(self, session_id: str, alias: str, item_id: str) -> Item:
        """Return one item of a thread.

        Raises:
            PlatformRefusal: as `post_item`, `not_found`.
        """
        self._check_thread(session_id, alias)
        row = self._db.execute(
            "SELECT id, user_id, parent_id, created_at, body, seq FROM items"
            " WHERE id = ? AND session_id = ? AND alias = ?",
            (item_id, session_id, alias),
        ).fetchone()
        if row is None:
            raise PlatformRefusal("not_found", f"thread {alias} has no item {item_id}")
        return _item(row)

    def list_items(self, session_id: str, alias: str, window: Window) -> Page[Item]:
        """Return a page of a thread's items.

        Raises:
            PlatformRefusal: as `post_item`.
        """
        self._check_thread(session_id, alias)
        query = _ITEMS_ASCENDING if window.ascending else _ITEMS_DESCENDING
        rows = self._db.execute(query, {"session": session_id, "alias": alias, **window.parameters()}).fetchall()
        kept = rows[: window.limit]
        last = Position(kept[-1][3], kept[-1][5]) if len(rows) > window.limit else None
        return Page(tuple(map(_item, kept)), last)

    def list_events(self, session_id: str, window: Window) -> Page[Event]:
        """Return a page of a session's events."""
        query = _EVENTS_ASCENDING if window.ascending else _EVENTS_DESCENDING
        rows = self._db.execute(query, {"session": session_id, **window.parameters()}).fetchall()
        kept = rows[: window.limit]
        last = Position(kept[-1][2], kept[-1][6]) if len(rows) > window.limit else None
        return Page(tuple(Event(*row[:6]) for row in kept), last)

    # Inside

    def _session_and_revision(self, revision_id: str, session_id: str) -> tuple[Session, Revision]:
        row = self._db.execute(_SESSION_AND_REVISION, {"revision": revision_id, "session": session_id}).fetchone()
        if row is None:
            raise _no_revision(revision_id)
        if row[0] is None:
            raise PlatformRefusal("access_denied", f"no access to a session of the id {session_id}", 403)
        return _undeleted(Session(*row[:4])), Revision(*row[4:])

    def _check_thread(self, session_id: str, alias: str) -> None:
        row = self._db.execute(
            "SELECT type, value IS NULL FROM objects WHERE session_id = ? AND alias = ?", (session_id, alias)
        ).fetchone()
        if row is not None and row[1]:
            raise PlatformRefusal("access_denied", f"thread {alias} was deleted", 403)
        if row is None or row[0] != "thread":
            raise PlatformRefusal("invalid_thread_envelope", f"{alias} is no thread")

    def _add_event(
        self,
        session_id: str,
        kind: str,
        now: int,
        alias: str | None = None,
        object_type: str | None = None,
        item_id: str | None = None,
    ) -> None:
        self._db.execute(
            "INSERT INTO events (id, session_id, created_at, type, alias, object_type, item_id)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (_new_id(), session_id, now, kind, alias, object_type, item_id),
        )

    def _now(self) -> int:
        self._latest = max(self._latest, microseconds_now())
        return self._latest

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _item(row: tuple[Any, ...]) -> Item:
    return Item(row[0], row[1], row[2], row[3], json.loads(row[4]))


def _type_of(value: Json) -> str | None:
    kind = value.get("type")
    return kind if isinstance(kind, str) else None


def _undeleted(session: Session) -> Session:
    if session.status == "deleted":
        raise PlatformRefusal("access_denied", f"session {session.id} was deleted", 403)
    return session


def _no_revision(revision_id: str) -> PlatformRefusal:
    return PlatformRefusal("revision_not_found", f"there is no revision {revision_id}")


def _new_id() -> str:
    return str(uuid.uuid4())


def _key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
