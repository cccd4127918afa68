"""The HTTP that SGLang is spoken to by, against a small server of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from inference.engine import EngineError
from inference.server import EngineDied
from inference.sglang_client import Client

LONG = "x" * 300_000  # longer than what aiohttp takes for a line

ADAPTERS: list[str] = []


async def answer(request: web.Request) -> web.StreamResponse:
    if request.headers.get("Authorization") != "Bearer key":
        return web.json_response({"error": "Unauthorized"}, status=401)
    if request.path == "/v1/models":
        return web.json_response({"data": [{"id": "base"}, *({"id": each, "parent": "base"} for each in ADAPTERS)]})
    body = await request.json()
    if request.path == "/unload_lora_adapter":
        ADAPTERS.remove(body["lora_name"])
        return web.json_response({"success": True})
    if body.get("refuse"):
        return web.json_response({"error": {"message": "too long"}}, status=400)
    if body.get("slow"):
        await asyncio.sleep(30)
    response = web.StreamResponse()
    await response.prepare(request)
    text = f'data: {{"n": 1}}\n\ndata: {{"n": "{LONG}"}}\n\n'.encode()
    for part in (text[:3], text[3:20], text[20:]):
        await response.write(part)
        await asyncio.sleep(0.01)
    if body.get("hang"):
        await asyncio.sleep(30)
    if body.get("break"):
        assert request.transport is not None
        request.transport.abort()
        return response
    await response.write(b"data: [DONE]\n\n")
    return response


async def with_a_server(test: Callable[[Client], Awaitable[None]], key: str = "key") -> None:
    app = web.Application()
    for path in ("/generate", "/unload_lora_adapter"):
        app.router.add_post(path, answer)
    for path in ("/v1/models", "/ready"):
        app.router.add_get(path, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = Client(f"http://127.0.0.1:{runner.addresses[0][1]}", key, why)
    try:
        await asyncio.wait_for(test(client), 20)
    finally:
        await client.close()
        await runner.cleanup()


async def why() -> str:
    return "it was killed"


async def events(client: Client, body: dict[str, Any]) -> list[Any]:
    return [event["n"] async for event in client.stream("/generate", body)]


def test_events_of_any_length_are_read_however_they_are_cut() -> None:
    async def test(client: Client) -> None:
        assert await events(client, {}) == [1, LONG]

    asyncio.run(with_a_server(test))


def test_a_refusal_is_told_in_the_servers_words() -> None:
    async def test(client: Client) -> None:
        with pytest.raises(EngineError, match=r"/generate \(400\): too long"):
            await events(client, {"refuse": True})
        with pytest.raises(EngineError, match=r"/generate \(400\): too long"):
            await client.ask("/generate", {"refuse": True}, timeout_s=60)

    asyncio.run(with_a_server(test))


def test_without_the_key_it_refuses() -> None:
    async def test(client: Client) -> None:
        for asked in (client.ask("/generate", {}, timeout_s=60), client.status("/ready", timeout_s=60)):
            with pytest.raises(EngineError, match=r"\(401\): Unauthorized; the key that it wants .* SGLANG_API_KEY"):
                await asked

    asyncio.run(with_a_server(test, key=""))


def test_what_another_node_has_left_is_unloaded() -> None:
    async def test(client: Client) -> None:
        ADAPTERS[:] = ["1-aaaaaaaa", "2-bbbbbbbb"]
        await client.unload_all(timeout_s=60)
        assert ADAPTERS == []

    asyncio.run(with_a_server(test))


def test_a_lost_connection_tells_how_the_server_ended() -> None:
    async def test(client: Client) -> None:
        with pytest.raises(EngineDied, match="it was killed"):
            await events(client, {"break": True})

    asyncio.run(with_a_server(test))


def test_an_answer_that_does_not_come_is_a_dead_server() -> None:
    async def test(client: Client) -> None:
        with pytest.raises(EngineDied, match=r"/generate did not answer within 0.1 s; it was killed"):
            await client.ask("/generate", {"slow": True}, timeout_s=0.1)

    asyncio.run(with_a_server(test))


def test_a_stream_that_we_close_ends_quietly() -> None:
    async def test(client: Client) -> None:
        stream, seen = client.stream("/generate", {"hang": True}), []
        async for event in stream:
            seen.append(event["n"])
            if len(seen) == 2:
                stream.close()
        assert seen == [1, LONG]

    asyncio.run(with_a_server(test))


def test_nobody_there_is_no_status_and_a_dead_server() -> None:
    async def test() -> None:
        client = Client("http://127.0.0.1:9", "key", why)
        assert await client.status("/ready", timeout_s=60) is None
        with pytest.raises(EngineDied, match="it was killed"):
            await client.ask("/generate", {}, timeout_s=60)
        await client.close()

    asyncio.run(test())
