"""Speaking HTTP to an SGLang server: every wait has a time-out, and every failure is said to be the server's refusal
(EngineError) or its end (EngineDied)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from inference.engine import EngineError
from inference.server import EngineDied

KEY_VARIABLE = "SGLANG_API_KEY"  # of a server that somebody else started
CONNECT_S = 10.0
SILENCE_S = 600.0
"""The longest that a call may be without a token: other calls or a new policy may go first. Whoever serves one to many
(inference.served_engine) notices a stall earlier."""
BROKEN = (aiohttp.ClientError, ConnectionError, OSError)
WANTS_KEY = (401, 403)
EVENT, DONE = b"data: ", b"[DONE]"


class Client:
    """`why` says how the server ended, once it has; to be closed from the event loop on which it was made."""

    def __init__(self, url: str, key: str, why: Callable[[], Awaitable[str]]) -> None:
        self.url = url.rstrip("/")
        self._why = why
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # A call is a connection, and slots bound the calls. None is kept for another: the server closes those that
            # were idle for a while, and what is sent on one at that moment is lost.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
            json_serialize=lambda value: msgspec.json.encode(value).decode(),
        )

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        """What the server answers, decoded; None for an answer that is not JSON. GET without a body."""
        method = "GET" if body is None else "POST"
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as response:
                text = await response.read()
                if response.status != 200:
                    raise EngineError(_refusal(path, response.status, text))
        except TimeoutError as error:
            raise EngineDied(f"{self.url}{path} did not answer within {timeout_s:g} s; {await self._why()}") from error
        except BROKEN as error:
            raise await self._died(path, error) from error
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return None

    async def status(self, path: str, *, timeout_s: float) -> int | None:
        """Of a GET; None when there is no server, or no answer in time. Raises EngineError where it wants a key."""
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._session.get(self.url + path, timeout=limit) as response:
                if response.status in WANTS_KEY:
                    raise EngineError(_refusal(path, response.status, await response.read()))
                return response.status
        except (TimeoutError, *BROKEN):
            return None

    def stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        return Stream(self._session.post(self.url + path, json=body), path, self._died)

    async def unload_all(self, *, timeout_s: float) -> None:
        """Whatever adapters the server has, also those of a node that was killed; seconds for each."""
        models = await self.ask("/v1/models", timeout_s=timeout_s)
        for name in [model["id"] for model in models["data"] if model.get("parent")]:
            await self.ask("/unload_lora_adapter", {"lora_name": name}, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._session.close()

    async def _died(self, path: str, error: BaseException) -> EngineDied:
        what = f"{type(error).__name__} {error}".strip()
        return EngineDied(f"{self.url}{path}: the connection is lost ({what}); {await self._why()}")


class Stream:
    """The server-sent events of an answer, decoded; to be iterated over once."""

    def __init__(self, request: Any, path: str, died: Callable[[str, BaseException], Awaitable[EngineDied]]) -> None:
        self._request = request
        self._path = path
        self._died = died
        self._response: aiohttp.ClientResponse | None = None
        self._closed = False

    def close(self) -> None:
        """The server stops working on it when it next looks."""
        self._closed = True
        if self._response is not None:
            self._response.close()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async with self._request as self._response:
                if self._response.status != 200:
                    raise EngineError(_refusal(self._path, self._response.status, await self._response.read()))
                async for event in _events(self._response.content):
                    yield event
        except (TimeoutError, *BROKEN) as error:
            if not self._closed:
                raise await self._died(self._path, error) from error


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """An event is a line of any length (the last one may hold the routes of a whole sequence)."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(EVENT) and line[len(EVENT) :].strip() != DONE:
                yield msgspec.json.decode(line[len(EVENT) :])


def _refusal(path: str, status: int, text: bytes) -> str:
    """The server's own words, wherever it put them."""
    said: Any = text.decode(errors="replace").strip()
    try:
        answer = msgspec.json.decode(text)
        error = answer.get("error", answer)
        said = error.get("message") or error.get("error_message") or answer if isinstance(error, dict) else error
    except (msgspec.DecodeError, AttributeError):
        pass
    key = f"; the key that it wants goes into the environment variable {KEY_VARIABLE}" if status in WANTS_KEY else ""
    return f"the SGLang server refuses {path} ({status}): {said}{key}"
