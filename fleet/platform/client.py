"""Requests of protocol §1: one method per command and query, no policy about repeating them."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from fleet.platform.errors import (
    AccessDeniedError,
    NotExecutedError,
    OutcomeUnknownError,
    PlatformError,
    RefusedError,
)

#: Rows asked for in one page; the platform's maximum (protocol §1).
PAGE_ROWS = 1000
#: Seconds to wait for one answer. A write that takes longer has an unknown outcome.
TIMEOUT_S = 15.0
#: Seconds to wait for a connection.
CONNECT_TIMEOUT_S = 5.0
#: What the kernel has not delivered of a request that is given up is thrown away: it must not arrive later, when
#: another drainer may have posted the same item.
DISCARD_ON_CLOSE = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
#: Bytes of a file that is downloaded: the platform's 4 MiB (protocol §1), and room for one that counts otherwise.
FILE_MAX_BYTES = 4 * 1024 * 1024 + 64 * 1024
#: Characters of a platform's own message that are kept in an error.
MESSAGE_CHARS = 300

Json = dict[str, Any]
Timestamp = str | int | float


@dataclass(frozen=True, slots=True)
class SessionRef:
    """Where a session lives: every data request names both."""

    revision_id: str
    session_id: str


class PlatformClient:
    """An asynchronous client with kept-alive connections. One per event loop."""

    def __init__(self, url: str, api_key: str, *, max_connections: int = 100) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"X-API-Key": api_key},
            timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
                trust_env=False,
                socket_options=[DISCARD_ON_CLOSE],
            ),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def me(self) -> Json:
        """Return the key's own user: `id`, `name`, `email`."""
        return await self._get("/users/me", "user")

    async def revision(self, org_id: str, blob_id: str, ref: str) -> Json:
        """Return a revision's `id`, `phase` and `status`; `ref` is an id or `default`."""
        parts = "/".join(quote(part, safe="") for part in (org_id, blob_id))
        return await self._get(f"/blobs/{parts}/revisions/{quote(ref, safe='')}", "revision")

    async def session(self, revision_id: str, id_or_alias: str) -> Json:
        """Return a session's `id` and `status`."""
        answer = await self._data(revision_id, "query", {"command": "get_session", "session_id": id_or_alias})
        return _mapping(answer, "session")

    async def is_open(self, at: SessionRef) -> bool:
        """Whether a session answers: then a 403 on something in it means that this thing was deleted (protocol §1)."""
        try:
            return (await self.session(at.revision_id, at.session_id)).get("status") == "open"
        except RefusedError:
            return False

    async def upload_object(self, at: SessionRef, alias: str, value: Any) -> None:
        """Write an object, whole."""
        await self._command(at, "upload_session_object", alias=alias, value=value)

    async def upload_file(self, at: SessionRef, alias: str, name: str, content_type: str, data: bytes) -> None:
        """Write a session file, whole: the bytes are the body, the command stands in a header (current platform).

        Raises:
            RefusedError: `unsupported_file_type`, or the file is larger than 4 MiB.
        """
        command = {
            "command": "upload_session_file",
            "session_id": at.session_id,
            "alias": alias,
            "name": name,
            "content_type": content_type,
            "size": len(data),
        }
        headers = {"Content-Type": "application/octet-stream", "X-Request-Body": json.dumps(command)}
        path = f"/revisions/{quote(at.revision_id, safe='')}/data/command"
        await self._send("POST", path, content=data, headers=headers)

    async def download_file(self, at: SessionRef, alias: str) -> tuple[bytes, Json]:
        """Return a session file's bytes, and its `name`, `content_type` and `size` (current platform).

        Raises:
            RefusedError: `not_found`; `file_too_large`: it has more than `FILE_MAX_BYTES`, the rest was not read.
        """
        body = {"command": "download_session_file", "session_id": at.session_id, "alias": alias}
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/octet-stream",
            "Accept-Encoding": "identity",  # a small answer must not unpack to a large one
        }
        path = f"/revisions/{quote(at.revision_id, safe='')}/data/query"
        with self._transport_errors():
            async with self._http.stream("POST", path, content=json.dumps(body).encode(), headers=headers) as response:
                content = await _bounded_content(response)
        envelope = response.headers.get("X-Response-Body")
        answer = _answer(httpx.Response(response.status_code, content=content if envelope is None else envelope))
        if envelope is None or response.headers.get("Content-Encoding", "identity") != "identity":
            raise PlatformError("the platform answered a download with something else than its bytes")
        value = _mapping(answer, "object").get("value")
        described = value.get("file") if isinstance(value, dict) else None
        return content, described if isinstance(described, dict) else {}

    async def download_object(self, at: SessionRef, alias: str) -> Json:
        """Return an object: `alias`, `value`, `created_at`, `user_id`.

        Raises:
            RefusedError: `not_found` when there is none.
        """
        return _mapping(await self._query(at, "download_session_object", alias=alias), "object")

    async def delete_object(self, at: SessionRef, alias: str) -> None:
        """Delete an object."""
        await self._command(at, "delete_session_object", alias=alias)

    async def post_item(self, at: SessionRef, alias: str, item: Json) -> Json:
        """Post `item` ({content, metadata}) into a thread and return it as stored."""
        fields = {"content": item["content"], "metadata": item["metadata"]}
        return _mapping(await self._command(at, "post_session_thread_item", alias=alias, **fields), "item")

    async def item(self, at: SessionRef, alias: str, item_id: str) -> Json:
        """Return one item of a thread. Unlike a list, this shows an item as soon as it is stored."""
        return _mapping(await self._query(at, "get_session_thread_item", alias=alias, item_id=item_id), "item")

    async def objects(self, at: SessionRef, prefix: str = "") -> AsyncIterator[list[Json]]:
        """Yield pages of a session's objects: `alias` and perhaps `type`."""
        filters = {"prefix": prefix} if prefix else {}
        async for page in self._pages(at, "list_session_objects", "objects", filters):
            yield page

    async def items(self, at: SessionRef, alias: str, since: Timestamp | None = None) -> AsyncIterator[list[Json]]:
        """Yield pages of a thread's items later than `since`, oldest first."""
        filters: Json = {"alias": alias, "ascending": True}
        if since is not None:
            filters["created_since"] = since
        async for page in self._pages(at, "list_session_thread_items", "items", filters):
            yield page

    async def newest_items(self, at: SessionRef, alias: str, limit: int) -> list[Json]:
        """Return the newest `limit` items of a thread, newest first."""
        answer = await self._query(at, "list_session_thread_items", alias=alias, ascending=False, limit=limit)
        return _rows(answer, "items")

    async def events(self, at: SessionRef, since: Timestamp | None = None) -> AsyncIterator[list[Json]]:
        """Yield pages of a session's events later than `since`, oldest first."""
        filters: Json = {"ascending": True}
        if since is not None:
            filters["created_since"] = since
        async for page in self._pages(at, "list_session_events", "session_events", filters):
            yield page

    async def newest_event(self, at: SessionRef) -> Json | None:
        """Return a session's newest event."""
        rows = _rows(await self._query(at, "list_session_events", ascending=False, limit=1), "session_events")
        return rows[0] if rows else None

    async def _pages(self, at: SessionRef, command: str, field: str, filters: Json) -> AsyncIterator[list[Json]]:
        cursor = None
        while True:
            page = filters if cursor is None else {**filters, "cursor": cursor}
            answer = await self._query(at, command, limit=PAGE_ROWS, **page)
            yield _rows(answer, field)
            cursor = answer.get("cursor")
            if cursor is None:
                return

    async def _query(self, at: SessionRef, command: str, **arguments: Any) -> Json:
        body = {"command": command, "session_id": at.session_id, **arguments}
        return await self._data(at.revision_id, "query", body)

    async def _command(self, at: SessionRef, command: str, **arguments: Any) -> Json:
        body = {"command": command, "session_id": at.session_id, **arguments}
        return await self._data(at.revision_id, "command", body)

    async def _data(self, revision_id: str, kind: str, body: Json) -> Json:
        content = json.dumps(body).encode()
        path = f"/revisions/{quote(revision_id, safe='')}/data/{kind}"
        return await self._send("POST", path, content=content, headers={"Content-Type": "application/json"})

    async def _get(self, path: str, field: str) -> Json:
        return _mapping(await self._send("GET", path), field)

    async def _send(self, method: str, path: str, **options: Any) -> Json:
        with self._transport_errors():
            response = await self._http.request(method, path, **options)
        return _answer(response)

    @contextmanager
    def _transport_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise NotExecutedError(f"{self.url} can't be reached: {error or type(error).__name__}") from error
        except httpx.HTTPError as error:
            raise OutcomeUnknownError(f"{self.url} gave no answer: {error or type(error).__name__}") from error


async def _bounded_content(response: httpx.Response) -> bytes:
    """Return the content of a file's answer.

    Raises:
        RefusedError: `file_too_large`.
    """
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > FILE_MAX_BYTES:
            raise RefusedError("file_too_large", f"the file has more than {FILE_MAX_BYTES} bytes")
    return bytes(content)


def _answer(response: httpx.Response) -> Json:
    status = response.status_code
    if status == httpx.codes.TOO_MANY_REQUESTS:
        raise NotExecutedError("the platform asks to slow down (429)")
    if status >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise OutcomeUnknownError(f"the platform answered {status}")
    try:
        body = response.json()
    except ValueError as error:
        raise OutcomeUnknownError(f"the platform answered {status} without JSON") from error
    if not isinstance(body, dict):
        raise OutcomeUnknownError(f"the platform answered {status} with something that is no object")
    if body.get("status") == "success" and response.is_success:
        return body
    code = str(body.get("error") or f"http_{status}")
    message = str(body.get("message") or "")[:MESSAGE_CHARS]
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise AccessDeniedError(code, message)
    raise RefusedError(code, message)


def _mapping(answer: Json, field: str) -> Json:
    value = answer.get(field)
    if not isinstance(value, dict):
        raise PlatformError(f"the platform's answer has no {field!r}")
    return value


def _rows(answer: Json, field: str) -> list[Json]:
    rows = answer.get(field)
    if not isinstance(rows, list):
        raise PlatformError(f"the platform's answer has no list {field!r}")
    return [row for row in rows if isinstance(row, dict)]
