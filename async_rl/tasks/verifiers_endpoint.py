"""The endpoint that a harness of verifiers takes for its model, in the worker process: an attempt's calls become turns.

It listens on loopback, at a port of the system's choice. Each attempt has a key in its URL, which nobody can guess;
other paths are refused."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from async_rl.tasks.environment import Said
from async_rl.tasks.task import TaskError
from async_rl.tasks.tools import ToolCall, calls_in

MAX_BODY_BYTES = 16 << 20
TAG = "<tool_call>"


class ModelCall(NamedTuple):
    """A turn that is asked for; `answer` is to become the body of the response."""

    messages: list[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    answer: asyncio.Future[dict[str, Any]]


class Endpoint:
    """`admit` gives an attempt's key; its calls come into the queue that it was admitted with."""

    def __init__(self) -> None:
        self._admitted: dict[str, asyncio.Queue[ModelCall]] = {}
        self._address = ""

    async def start(self) -> None:
        from aiohttp import web  # comes with verifiers

        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/{key}/v1/chat/completions", self._answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self._address = f"http://{host}:{port}"

    def url(self, key: str) -> str:
        return f"{self._address}/{key}/v1"

    def admit(self, calls: asyncio.Queue[ModelCall]) -> str:
        key = secrets.token_hex(16)
        self._admitted[key] = calls
        return key

    def dismiss(self, key: str) -> None:
        self._admitted.pop(key, None)

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web

        calls = self._admitted.get(request.match_info["key"])
        if calls is None:
            return web.json_response({"error": {"message": "no attempt has this key"}}, status=403)
        try:
            body = msgspec.json.decode(await request.read(), type=dict[str, Any])
            messages = msgspec.convert(body["messages"], list[dict[str, Any]])
            tools = msgspec.convert(body.get("tools") or [], list[dict[str, Any]])
        except (KeyError, msgspec.DecodeError) as error:
            return web.json_response({"error": {"message": f"no request for a chat: {error}"}}, status=400)
        if body.get("stream"):
            return web.json_response({"error": {"message": "answers are not streamed here"}}, status=400)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        calls.put_nowait(ModelCall(messages, tools, answer))
        return web.json_response(await answer)


def completion_of(said: Said, has_tools: bool) -> dict[str, Any]:
    """A turn as a chat completion. Where the model was told of tools, what it calls stands apart from its words."""
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    calls = [call for call in calls_in(said.text, "chat") if isinstance(call, ToolCall)] if has_tools else []
    if calls:
        message["content"] = said.text.partition(TAG)[0].strip() or None
        message["tool_calls"] = [_told(number, call) for number, call in enumerate(calls)]
    finish = "length" if said.finish == "length" else "tool_calls" if calls else "stop"
    return {
        "id": "policy", "object": "chat.completion", "created": 0, "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 0, "completion_tokens": len(said.tokens), "total_tokens": len(said.tokens)},
    }  # fmt: skip


def _told(number: int, call: ToolCall) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.arguments).decode()
    return {"id": f"call_{number}", "type": "function", "function": {"name": call.name, "arguments": arguments}}


def messages_since(before: ModelCall, now: ModelCall) -> list[Mapping[str, Any]]:
    """What was added after the model's last turn. Raises TaskError where the conversation is another one: its history
    was rewritten, or several go on at once."""
    known = len(before.messages) + 1
    spoken = [message.get("role") for message in now.messages[:known]]
    same = now.messages[: known - 1] == before.messages and spoken[-1:] == ["assistant"]
    if not same or len(now.messages) <= known:
        raise TaskError(
            "the harness did not go on with its conversation: one that rewrites it, or holds several at once, has to "
            'be played as [task] kind = "agent"'
        )
    return [{key: value for key, value in message.items() if value is not None} for message in now.messages[known:]]
