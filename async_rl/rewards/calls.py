"""Calls of a service over HTTP: JSON there and back, with a key, time-outs, and retries that back off.

What may well pass is tried again: no connection, no answer in time, a status that says "later" (408, 425, 429, 5xx), an
answer that is cut short. Anything else is a fault of the config or of the service, and says so at once. The key comes
from an environment variable; no message, log or file has it. Redirects are not followed: they would carry the key on.
"""

from __future__ import annotations

import os
import random
import time
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import msgspec

from async_rl.rewards.reward import RewardConfig, RewardError
from async_rl.schema import ConfigError, Count, PositiveFloat, PositiveInt

MAX_ANSWER_BYTES = 4 << 20
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0  # between two tries, whatever the service asks for
SHOWN = 200  # characters of an answer that was no good, in a message
AGAIN = frozenset({408, 425, 429})


class CallConfig(RewardConfig, frozen=True, kw_only=True):
    """What rewards that ask a service have in common."""

    url: str
    key_env: str = ""
    """The environment variable, on every machine that runs a node, with the key to send as "Authorization: Bearer"."""
    concurrency: PositiveInt = 16
    """Calls in flight at once from each scoring worker ([inference] reward_workers of each node)."""
    timeout: PositiveFloat = 30.0
    """Seconds of one try."""
    retries: Count = 3
    """How often it is tried again, after half a second, one, two, four, or when the service says; not beyond 10 s."""


class _Unfinished(Exception):
    """A try that may go better the next time; `pause_s` is what the service asked for, if it did."""

    def __init__(self, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Caller:
    """One service. `call` may be used by any number of threads."""

    def __init__(self, config: CallConfig, where: str, path: str = "") -> None:
        """Raises ConfigError for an address that is none, or has a password in it."""
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{where}: url = {config.url!r}: write it as http://host:port/path or https://…")
        if parts.username or parts.password:
            raise ConfigError(f"{where}: url has a password in it, and goes into files and logs: use key_env")
        self._url = config.url.rstrip("/") + path if path else config.url
        self._config = config
        self._open = urllib.request.build_opener(_NoRedirect()).open
        self.seconds = config.timeout * (config.retries + 1) + MAX_PAUSE_S * config.retries

    def call(self, question: Any) -> bytes:
        """The answer to a POST of `question` as JSON. Raises RewardError, when it was tried often enough."""
        key = self._key()
        body = msgspec.json.encode(question)
        pause = FIRST_PAUSE_S
        for tries_left in range(self._config.retries, -1, -1):
            try:
                return self._once(body, key)
            except _Unfinished as failure:
                if not tries_left:
                    tries = self._config.retries + 1
                    raise RewardError(f"{self._url}, {tries} times: {_hidden(str(failure), key)}") from None
                # A random part, lest all that failed together come back together.
                time.sleep(min(failure.pause_s or pause * random.uniform(0.5, 1.0), MAX_PAUSE_S))
                pause *= 2
        raise AssertionError("unreachable")

    def _key(self) -> str:
        name = self._config.key_env
        key = os.environ.get(name, "").strip() if name else ""  # what was read from a file ends with a line's end
        if name and not key:
            raise RewardError(f"the environment variable {name} (key_env) is not set on this machine")
        if not (key.isascii() and key.isprintable()):  # else http.client refuses it, and quotes it
            raise RewardError(f"the environment variable {name} (key_env) holds no key: it has characters of no header")
        return key

    def _once(self, body: bytes, key: str) -> bytes:
        headers = {"Content-Type": "application/json", "User-Agent": "async-rl"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url, body, headers, method="POST")
        deadline = time.monotonic() + self._config.timeout
        try:
            with self._open(request, timeout=self._config.timeout) as response:
                return _read(response, deadline)
        except urllib.error.HTTPError as error:
            text = error.read(SHOWN).decode(errors="replace")
            error.close()
            said = f"status {error.code} {error.reason}: {text}"
            if error.code in AGAIN or error.code >= 500:
                raise _Unfinished(said, _retry_after(error.headers)) from None
            raise RewardError(f"{self._url}: {_hidden(said, key)}") from None
        except (OSError, HTTPException) as error:  # URLError and time-outs are OSErrors
            raise _Unfinished(str(getattr(error, "reason", "") or error) or type(error).__name__) from None


def _read(response: HTTPResponse, deadline: float) -> bytes:
    """All of it, if it is not too long and comes in time, however slowly it drips."""
    parts: list[bytes] = []
    size = 0
    while data := response.read1(1 << 16):
        parts.append(data)
        size += len(data)
        if size > MAX_ANSWER_BYTES:
            raise RewardError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > deadline:
            raise _Unfinished("the answer did not end in time")
    if response.length:  # what was announced and did not come
        raise _Unfinished("the answer was cut short")
    return b"".join(parts)


def _retry_after(headers: Message) -> float:
    """In seconds, as services write it; a date is not read."""
    text = headers.get("Retry-After") or ""
    return float(text) if text.isdigit() else 0.0


def _hidden(text: str, key: str) -> str:
    """Services quote keys that they do not know."""
    return text.replace(key, "[key]") if key else text
