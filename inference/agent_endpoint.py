"""The OpenAI-compatible endpoint of a node, for the agents that it starts.

    POST /v1/chat/completions · /v1/completions        answered by the engine, recorded in the session's attempt
    GET  /v1/models                                    POST /v1/reward, for an agent that says its reward itself

It listens on loopback alone, at a free port. Every attempt has a session with a key of its own, given to its program
and to nobody else, which ends with the attempt: strangers, and who comes late, are refused. A request is of a limited
size and read within a limited time; a connection that has not shown a key by then is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from typing import Any

from inference.agent_forms import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    chat_body,
    chunks,
    completion_body,
    error_body,
    event,
    models_body,
    read_request,
    read_reward,
)
from inference.agent_session import Session

log = logging.getLogger("agents")

HOST = "127.0.0.1"
MAX_BODY_BYTES = 8 << 20  # a conversation as text, many times what fits into a context
READ_S = 30.0  # for a request's body to be here, and an answer to be taken
STRANGER_S = 10.0  # until a connection has shown a key
MAX_STRANGERS = 256  # connections that have not yet; then the oldest is closed
KEPT_KEYS = 4096  # of sessions that are over, to tell who comes late from a stranger
ALIVE_S = 10.0  # between signs of life in a stream whose answer is not there yet
MADE_S = 1.0
END_S = 0.1  # for answers that are on their way; every session is over by then
WRITTEN = {"Content-Type": "application/json"}
NO_RETRY = {"x-should-retry": "false"}  # what OpenAI's clients heed; an answer would be the same


class AgentEndpoint:
    """All of it in one event loop. `start`, then `admit` sessions and `dismiss` them, then `close`."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}
        self._over: OrderedDict[bytes, None] = OrderedDict()
        self._strangers: OrderedDict[Any, float] = OrderedDict()  # connections, by when they came
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._http: Any = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Where it listens, as OPENAI_BASE_URL has it."""
        from aiohttp import web

        # A body that unpacks to more than it has is none that a client sends.
        self._http = web.Server(self._handle, handler_cancellation=True, auto_decompress=False, access_log=None)
        self._server = await asyncio.get_running_loop().create_server(self._connection, HOST, 0)
        self._sweeper = asyncio.create_task(self._sweep())
        return f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}/v1"

    def admit(self, session: Session) -> str:
        """The key with which the session is spoken to."""
        key = secrets.token_urlsafe(32)
        self._sessions[_name(key)] = session
        return key

    def dismiss(self, key: str) -> None:
        """End the session, and refuse its key from now on."""
        session = self._sessions.pop(_name(key), None)
        if session is not None:
            session.end()
            self._over[_name(key)] = None
            if len(self._over) > KEPT_KEYS:
                self._over.popitem(last=False)

    async def close(self) -> None:
        for session in self._sessions.values():
            session.end()
        self._sessions.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None
            await self._http.shutdown(END_S)

    # --- connections -------------------------------------------------------------------------------------------------

    def _connection(self) -> Any:
        """Of anybody on this machine, so far."""
        while len(self._strangers) >= MAX_STRANGERS:
            _cut(self._strangers.popitem(last=False)[0])
        connection = self._http()
        self._strangers[connection] = time.monotonic()
        return connection

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            late = time.monotonic() - STRANGER_S
            while self._strangers and next(iter(self._strangers.values())) < late:
                _cut(self._strangers.popitem(last=False)[0])

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _handle(self, request: Any) -> Any:
        from aiohttp import web

        try:
            session = self._session_of(request)
            return await self._answer(request, session)
        except BadRequest as refused:
            headers = WRITTEN | (NO_RETRY if refused.status >= 429 else {})
            body = error_body(str(refused), refused.code, refused.status)
            return web.Response(status=refused.status, body=body, headers=headers)

    def _session_of(self, request: Any) -> Session:
        """Raises BadRequest. A key is looked up by its hash, so that the time it takes says nothing of it."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        name = _name(key.strip())
        session = self._sessions.get(name)
        if session is None and name in self._over:
            raise BadRequest("this session is over: its lease has ended", status=403, code="lease_over")
        if session is None or scheme.lower() != "bearer":
            raise BadRequest(
                "no session has this key: the node gives every program that it starts one of its own, in "
                "OPENAI_API_KEY, for as long as its lease lasts",
                status=401,
                code="invalid_api_key",
            )
        self._strangers.pop(request.protocol, None)
        return session

    async def _answer(self, request: Any, session: Session) -> Any:
        from aiohttp import web

        match request.method, request.path.rstrip("/"):
            case "GET", "/v1/models":
                return web.Response(body=models_body(), headers=WRITTEN)
            case "GET", path if path.startswith("/v1/models/"):
                return web.Response(body=models_body(path.removeprefix("/v1/models/")), headers=WRITTEN)
            case "POST", "/v1/chat/completions":
                asked = read_request(await _body(request), ChatRequest)
            case "POST", "/v1/completions":
                asked = read_request(await _body(request), CompletionRequest)
            case "POST", "/v1/reward":
                session.reward = read_reward(await _body(request))
                return web.Response(body=b"{}", headers=WRITTEN)
            case method, path:
                raise BadRequest(f"{method} {path}: there is no such thing here", status=404, code="not_found")
        work = session.start(asked)
        try:
            if asked.stream:
                return await self._stream(request, asked, work)
            answers = await _done(work)
        finally:
            work.cancel()
        number = self._number(asked)
        chat = isinstance(asked, ChatRequest)
        body = chat_body(asked, answers, number) if chat else completion_body(asked, answers, number)
        return web.Response(body=body, headers=WRITTEN)

    async def _stream(self, request: Any, asked: ChatRequest | CompletionRequest, work: asyncio.Task[Any]) -> Any:
        """The answer is there as a whole, and sent in a few events. Until then the client gets a sign of life now and
        then; what goes wrong before the first has a status, and is an event afterwards."""
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        begun = False
        while not (await asyncio.wait({work}, timeout=ALIVE_S))[0]:
            if not begun:
                await response.prepare(request)
                begun = True
            await _write(response, b": not yet\n\n")
        try:
            answers = await _done(work)
        except BadRequest as refused:
            if not begun:
                raise
            await _write(response, event({"error": {"message": str(refused), "code": refused.code}}))
            return response
        if not begun:
            await response.prepare(request)
        await _write(response, b"".join(chunks(asked, answers, self._number(asked))))
        return response

    def _number(self, asked: ChatRequest | CompletionRequest) -> str:
        return f"{'chatcmpl' if isinstance(asked, ChatRequest) else 'cmpl'}-{next(self._numbers)}"


def _name(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _cut(connection: Any) -> None:
    """Close it; one that was made a moment ago has its transport a moment later, and one that is closed has none."""
    if connection.transport is not None:
        connection.transport.abort()
    else:
        asyncio.get_running_loop().call_later(MADE_S, lambda: connection.transport and connection.transport.abort())


async def _body(request: Any) -> bytes:
    """Raises BadRequest when there is too much of it, or it takes too long."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise BadRequest("a compressed body: send it as it is", status=415)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise BadRequest(f"a request may have {MAX_BODY_BYTES} bytes", status=413)
    except TimeoutError:
        raise BadRequest(f"the request was not here within {READ_S:g} s", status=408) from None
    return bytes(body)


async def _done(work: asyncio.Task[Any]) -> Any:
    """Raises BadRequest, also when the session ended meanwhile."""
    try:
        return await work
    except asyncio.CancelledError:
        own = asyncio.current_task()
        if own is not None and own.cancelling():
            raise
        raise BadRequest("this session is over: its lease has ended", status=403, code="lease_over") from None


async def _write(response: Any, data: bytes) -> None:
    """A client that does not read is one that has gone."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(READ_S):
            await response.write(data)
