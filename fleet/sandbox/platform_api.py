"""The embedded platform over HTTP: protocol §1 for its users, `/sandbox` for those who rehearse with it.

Everything is served at the root and under `/v1`, where the real platform has it. The endpoints below `/sandbox` take
the key of an admin:

    GET, POST /sandbox/conditions           read or change the conditions of the rehearsal (`platform_conditions`)
    GET, DELETE /sandbox/requests           counts of requests by command since the last DELETE
    POST /sandbox/sessions                  {revision_id, session_id?, alias?} → a new open session
    POST /sandbox/sessions/{id}/status      {status}
    POST /sandbox/revisions/{id}            {phase?, status?}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from fleet.sandbox.platform_commands import OPERATIONS, Binary, Call, Id, Operation, parse_operation, refused
from fleet.sandbox.platform_conditions import Fault, Rehearsal
from fleet.sandbox.platform_store import PlatformStore
from fleet.sandbox.platform_values import Json, PlatformRefusal, Revision, Session, User

#: Bytes of a request's body. Four times the largest object leaves room for its escapes in JSON.
BODY_MAX_BYTES = 20 * 1024 * 1024

CutConnection = Callable[[Scope], None]
Body = TypeVar("Body", bound=BaseModel)


class _AdminBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _NewSession(_AdminBody):
    revision_id: Id
    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")] | None = None
    alias: Id | None = None


class _SessionStatus(_AdminBody):
    status: Literal["open", "closing", "closed", "deleting", "deleted"]


class _RevisionChange(_AdminBody):
    phase: Id | None = None
    status: Id | None = None


class _NoAnswer(Response):
    """Closes the connection instead of answering."""

    def __init__(self, cut: CutConnection) -> None:
        super().__init__()
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._cut(scope)
        while (await receive())["type"] != "http.disconnect":
            pass


class PlatformApi:
    """The endpoints around one store and one rehearsal.

    Parameters:
        cut_connection: closes the connection that a request of that scope came on, at once.
    """

    def __init__(self, store: PlatformStore, rehearsal: Rehearsal, cut_connection: CutConnection) -> None:
        self._store = store
        self._rehearsal = rehearsal
        self._cut_connection = cut_connection
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Let go of the requests that wait: their connections are closed without an answer."""
        self._stopping.set()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/revisions/{revision_id}/data/{kind:str}", self._data, methods=["POST"]),
            Route("/users/me", self._me),
            Route("/blobs/{org_id}/{blob_id}/revisions/{ref}", self._revision),
            Route("/health", self._health),
            Route("/sandbox/conditions", self._conditions, methods=["GET", "POST"]),
            Route("/sandbox/requests", self._requests, methods=["GET", "DELETE"]),
            Route("/sandbox/sessions", self._add_session, methods=["POST"]),
            Route("/sandbox/sessions/{session_id}/status", self._set_session_status, methods=["POST"]),
            Route("/sandbox/revisions/{revision_id}", self._set_revision, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_error, PlatformRefusal: _refusal, Exception: _server_error}
        return Starlette(routes=[*routes, Mount("/v1", routes=routes)], exception_handlers=handlers)

    # Protocol §1

    async def _data(self, request: Request) -> Response:
        kind = request.path_params["kind"]
        if kind not in OPERATIONS:
            raise HTTPException(404)
        body = await _read_body(request)
        payload = _unwrap(request, body)
        name = payload.get("command") if isinstance(payload, dict) else None

        def handle() -> Response:
            user = self._user(request)
            if isinstance(payload, PlatformRefusal):
                raise payload
            operation = parse_operation(kind, payload)
            _check_media(request, operation)
            call = Call(self._store, user, request.path_params["revision_id"], self._rehearsal.conditions, body)
            return _success(operation.run(call))

        return await self._rehearse(request, name if isinstance(name, str) else "unreadable", handle)

    async def _me(self, request: Request) -> Response:
        def handle() -> Response:
            user = self._user(request)
            return _success({"user": {"id": user.id, "name": user.name, "email": user.email}})

        return await self._rehearse(request, "users/me", handle)

    async def _revision(self, request: Request) -> Response:
        def handle() -> Response:
            self._user(request)
            return _success({"revision": _revision_row(self._store.revision_of_blob(**request.path_params))})

        return await self._rehearse(request, "revisions", handle)

    async def _rehearse(self, request: Request, name: str, handle: Callable[[], Response]) -> Response:
        """Answer a request under the current conditions. `handle` is all that reads or changes the store."""
        fault = self._rehearsal.draw(name, request.scope["path"])
        delay_ms = self._rehearsal.conditions.latency_ms + (fault.delay_ms if fault else 0)
        if delay_ms and not await self._waited(delay_ms):
            return _NoAnswer(self._cut_connection)
        if fault and fault.kind in ("429", "500_before", "cut_before"):
            return self._faulty(fault)
        try:
            response = handle()
        except PlatformRefusal as refusal:
            response = _failure(refusal)
        if fault and fault.kind in ("500_after", "cut_after"):
            return self._faulty(fault)
        return response

    async def _waited(self, delay_ms: float) -> bool:
        """Wait, and tell whether the platform goes on."""
        try:
            async with asyncio.timeout(delay_ms / 1000):
                await self._stopping.wait()
        except TimeoutError:
            return True
        return False

    def _faulty(self, fault: Fault) -> Response:
        if fault.kind.startswith("cut"):
            return _NoAnswer(self._cut_connection)
        if fault.kind == "429":
            return _failure(PlatformRefusal("rate_limited", "rehearsed", 429))
        return _failure(PlatformRefusal("internal_error", "rehearsed", 500))

    def _user(self, request: Request) -> User:
        key = request.headers.get("X-API-Key")
        if not key:
            raise PlatformRefusal("unauthorized", "the header X-API-Key is missing", 401)
        user = self._store.user_of(key)
        if user is None:
            raise PlatformRefusal("access_denied", "the API key is unknown", 403)
        return user

    # The sandbox's own

    async def _health(self, _request: Request) -> Response:
        return _success({})

    async def _conditions(self, request: Request) -> Response:
        self._check_admin(request)
        if request.method == "POST":
            changes = _parse_json(await _read_body(request))
            try:
                self._rehearsal.change(changes)
            except ValidationError as error:
                raise refused(error) from None
        return _success({"conditions": self._rehearsal.conditions.model_dump()})

    async def _requests(self, request: Request) -> Response:
        self._check_admin(request)
        if request.method == "DELETE":
            self._rehearsal.requests.clear()
        return _success({"requests": dict(self._rehearsal.requests)})

    async def _add_session(self, request: Request) -> Response:
        body = await self._admin_body(request, _NewSession)
        session = self._store.add_session(body.revision_id, session_id=body.session_id, alias=body.alias)
        return _success({"session": _session_row(session)})

    async def _set_session_status(self, request: Request) -> Response:
        body = await self._admin_body(request, _SessionStatus)
        session = self._store.set_session_status(request.path_params["session_id"], body.status)
        return _success({"session": _session_row(session)})

    async def _set_revision(self, request: Request) -> Response:
        body = await self._admin_body(request, _RevisionChange)
        revision = self._store.set_revision(request.path_params["revision_id"], phase=body.phase, status=body.status)
        return _success({"revision": _revision_row(revision)})

    async def _admin_body(self, request: Request, model: type[Body]) -> Body:
        self._check_admin(request)
        payload = _parse_json(await _read_body(request))
        try:
            return model.model_validate(payload)
        except ValidationError as error:
            raise refused(error) from None

    def _check_admin(self, request: Request) -> None:
        if not self._user(request).is_admin:
            raise PlatformRefusal("access_denied", "the sandbox's own endpoints take the key of an admin", 403)


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_MAX_BYTES:
            raise PlatformRefusal("invalid_request", f"a body has at most {BODY_MAX_BYTES} bytes", 413)
    return bytes(body)


def _is_binary(request: Request) -> bool:
    return request.headers.get("Content-Type", "").startswith("application/octet-stream")


def _unwrap(request: Request, body: bytes) -> Json | PlatformRefusal:
    """Return a data request's JSON, or why there is none: whoever lacks a key is told about that first."""
    try:
        if _is_binary(request):
            return _parse_json(request.headers.get("X-Request-Body", "").encode("latin-1"))
        if not request.headers.get("Content-Type", "").startswith("application/json"):
            return PlatformRefusal("invalid_request", "the Content-Type is neither JSON nor octets", 400)
        return _parse_json(body)
    except PlatformRefusal as refusal:
        return refusal


def _parse_json(text: bytes) -> Json:
    """Return a JSON object. `from_json` refuses what JSON and UTF-8 can't carry: NaN, lone surrogates.

    Raises:
        PlatformRefusal: `invalid_request`.
    """
    try:
        payload = from_json(text, allow_inf_nan=False)
    except ValueError:
        raise PlatformRefusal("invalid_request", "the request holds no valid JSON", 400) from None
    if not isinstance(payload, dict):
        raise PlatformRefusal("invalid_request", "the request's JSON is no object", 400)
    return payload


def _check_media(request: Request, operation: Operation) -> None:
    """Refuse bytes where JSON belongs, and JSON where bytes belong.

    Raises:
        PlatformRefusal: `invalid_request`.
    """
    if (operation.binary == "in") != _is_binary(request):
        raise PlatformRefusal("invalid_request", "bytes go with upload_session_file, and only with it", 400)
    if operation.binary == "out" and "application/octet-stream" not in request.headers.get("Accept", ""):
        raise PlatformRefusal("invalid_request", "download_session_file answers octets: Accept them", 400)


def _success(result: Json | Binary) -> Response:
    if isinstance(result, Binary):
        envelope = json.dumps({"status": "success", **result.envelope})
        return Response(result.content, 200, {"X-Response-Body": envelope}, "application/octet-stream")
    return _json({"status": "success", **result}, 200)


def _failure(refusal: PlatformRefusal) -> Response:
    return _json({"status": "failure", "error": refusal.code, "message": refusal.message}, refusal.http_status)


def _json(body: Json, status: int) -> Response:
    return Response(to_json(body), status, media_type="application/json")


def _session_row(session: Session) -> Json:
    return {"id": session.id, "alias": session.alias, "status": session.status}


def _revision_row(revision: Revision) -> Json:
    return {"id": revision.id, "phase": revision.phase, "status": revision.status}


async def _refusal(_request: Request, refusal: PlatformRefusal) -> Response:
    return _failure(refusal)


async def _http_error(_request: Request, error: HTTPException) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    return _failure(PlatformRefusal(code, error.detail, error.status_code))


async def _server_error(_request: Request, _error: Exception) -> Response:
    return _failure(PlatformRefusal("internal_error", "see the platform's log", 500))
