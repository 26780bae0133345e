"""Connections that do not get on: half a request, half a body, more of them than the process can have."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from aiohttp import web

from kvmesh.net import connections, http
from kvmesh.net.client import HttpClient
from kvmesh.net.connections import most_connections
from kvmesh.net.http import json_response, read_json
from kvmesh.net.service import Service, serving

HALF = b"POST /echo HTTP/1.1\r\nHost: me\r\nX-Slow: "


class Echo(Service):
    def __init__(self) -> None:
        super().__init__("echo")
        self.app.router.add_post("/echo", self._echo)

    async def _echo(self, request: web.Request) -> web.Response:
        return json_response(await read_json(request, dict[str, int]))


class QuickEcho(Echo):
    """Answers by the quick way, too."""

    def __init__(self) -> None:
        super().__init__()
        self.quick_posts = {"/echo": lambda body: body}


async def connect(url: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side closes."""
    with anyio.fail_after(10):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


@pytest.mark.parametrize("data", [b"", HALF, b"GET"])
async def test_a_connection_without_a_whole_request_is_closed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_S", 0.05)
    async with serving(Echo()) as url:
        reader, writer = await connect(url, data)
        assert await ended(reader) == b""
        writer.close()


async def test_a_connection_that_has_begun_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is of the head alone: answers may stream for hours."""
    monkeypatch.setattr(connections, "FIRST_REQUEST_S", 0.2)

    class Slow(Service):
        def __init__(self) -> None:
            super().__init__("slow")
            self.app.router.add_get("/slow", self._slow)

        async def _slow(self, _request: web.Request) -> web.Response:
            await anyio.sleep(0.5)  # longer than the bound
            return json_response({})

    async with serving(Slow()) as url, HttpClient() as client:
        assert await client.call("GET", f"{url}/slow", dict[str, int]) == {}


async def test_the_next_request_of_a_connection_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEPALIVE_S", 0.05)
    async with serving(Echo()) as url:
        reader, writer = await connect(url, b"GET /health HTTP/1.1\r\nHost: me\r\n\r\n" + HALF)
        assert (await ended(reader)).count(b"HTTP/1.1 200") == 1
        writer.close()


@pytest.mark.parametrize("service", [Echo, QuickEcho])
async def test_a_body_that_does_not_come_is_answered_408(service: type[Echo], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.05)
    head = b"POST /echo HTTP/1.1\r\nHost: me\r\nX-Other: 1\r\nContent-Length: 9\r\n\r\n"
    async with serving(service()) as url:
        reader, writer = await connect(url, head + b'{"a"')
        with anyio.fail_after(10):
            assert b" 408 " in await reader.readline()
        writer.close()


async def test_silent_connections_make_room_for_those_that_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 8)
    async with serving(Echo()) as url, HttpClient() as client:
        silent = [await connect(url, HALF) for _ in range(30)]
        assert await client.call("POST", f"{url}/echo", dict[str, int], body={"a": 1}) == {"a": 1}
        with anyio.fail_after(10):
            ends = [await ended(reader) for reader, _ in silent[:22]]
        assert ends == [b""] * 22
        for _, writer in silent:
            writer.close()


async def test_connections_that_speak_are_not_closed_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "most_connections", lambda: 4)
    asked = b"GET /health HTTP/1.1\r\nHost: me\r\n\r\n"
    async with serving(Echo()) as url:
        speaking = [await connect(url, asked) for _ in range(4)]
        for reader, _ in speaking:
            assert b" 200 " in await reader.readline()
        late_reader, late = await connect(url, asked)
        assert await ended(late_reader) == b""
        for reader, writer in speaking:
            writer.write(asked)
            with anyio.fail_after(10):
                while b" 200 " not in await reader.readline():
                    pass
            writer.close()
        late.close()


def test_descriptors_are_left_for_the_process_itself() -> None:
    assert 16 <= most_connections() <= 1_000_000
