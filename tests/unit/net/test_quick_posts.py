"""Plain POSTs answered without the framework, and connections that are handed over to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvmesh.net.quick_posts import QuickPosts
from kvmesh.telemetry.metrics import Metrics

REQUEST = b"POST /quick HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
PATIENCE_S = 20.0


class Served:
    """A framework behind quick answers."""

    def __init__(
        self, address: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, posts: QuickPosts
    ) -> None:
        self.address = address
        self.reader = reader
        self.writer = writer
        self.posts = posts

    async def answer(self) -> tuple[bytes, bytes]:
        """Head and body of the next answer."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            return head, await self.reader.readexactly(length)


def shout(body: bytes) -> bytes:
    if body == b"wrong":
        raise ValueError("not this")
    return body.upper()


async def by_framework(request: web.BaseRequest) -> web.Response:
    return web.Response(body=b"framework " + await request.read())


@asynccontextmanager
async def served(
    metrics: Metrics | None = None, *, open: Callable[[], bool] = lambda: True, rest_s: float = PATIENCE_S
) -> AsyncIterator[Served]:
    framework = web.Server(by_framework, access_log=None)  # type: ignore[arg-type]
    posts = QuickPosts(framework, {"/quick": shout}, metrics or Metrics(), open=open, rest_s=rest_s)
    server = await asyncio.get_running_loop().create_server(posts, "127.0.0.1", 0)
    posts.served_by(server)
    address = server.sockets[0].getsockname()[:2]
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield Served(address, reader, writer, posts)
    finally:
        posts.close()
        await framework.shutdown(1.0)
        writer.close()


async def test_a_plain_post_is_answered_on_the_spot() -> None:
    metrics = Metrics()
    async with served(metrics) as client:
        client.writer.write(REQUEST)
        head, body = await client.answer()
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: application/json\r\n" in head
        assert b"\r\nX-Request-Id: " in head
        assert body == b"HELLO"
        assert client.posts.answered_total == 1
    assert metrics.registry.get_sample_value("kvmesh_http_requests_total", {"route": "/quick", "status": "200"}) == 1


async def test_requests_come_in_any_pieces_and_several_at_once() -> None:
    async with served() as client:
        for i in range(len(REQUEST)):
            client.writer.write(REQUEST[i : i + 1])
            await client.writer.drain()
        assert (await client.answer())[1] == b"HELLO"
        client.writer.write(REQUEST + REQUEST.replace(b"hello", b"other") + REQUEST[:30])
        assert [(await client.answer())[1] for _ in range(2)] == [b"HELLO", b"OTHER"]
        client.writer.write(REQUEST[30:])
        assert (await client.answer())[1] == b"HELLO"
        assert client.posts.answered_total == 4


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /quick HTTP/1.1\r\nHost: x\r\n\r\n",
        REQUEST.replace(b"/quick", b"/other"),
        REQUEST.replace(b"/quick", b"/quick?x=1"),
        REQUEST.replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer key"),
        REQUEST.replace(b"Host: x", b"Host: x\r\nX-Request-Id: mine"),
        REQUEST.replace(b"Host: x", b"Host: x\r\nConnection: close"),
        REQUEST.replace(b"Content-Length: 5", b"Content-Length: 5\r\nContent-Length: 5"),
        REQUEST.replace(b"Content-Length: 5", b"Content-Length: +5"),
        b"POST /quick HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        REQUEST.replace(b"hello", b"wrong"),
    ],
)
async def test_everything_else_is_handed_over_with_its_connection(request_: bytes) -> None:
    async with served() as client:
        client.writer.write(REQUEST)
        await client.answer()
        client.writer.write(request_)
        head, body = await client.answer()
        # What the framework calls wrong is wrong, too.
        assert body.startswith(b"framework") or head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
        assert client.posts.answered_total == 1
        assert not client.posts.connections


async def test_a_connection_that_was_handed_over_stays_with_the_framework() -> None:
    async with served() as client:
        client.writer.write(REQUEST.replace(b"Host: x", b"Host: x\r\nX-Request-Id: mine"))
        assert (await client.answer())[1] == b"framework hello"
        client.writer.write(REQUEST)
        assert (await client.answer())[1] == b"framework hello"
        assert client.posts.answered_total == 0


async def test_nothing_is_answered_quickly_while_the_service_drains() -> None:
    async with served(open=lambda: False) as client:
        client.writer.write(REQUEST)
        assert (await client.answer())[1] == b"framework hello"


async def test_a_head_without_end_is_the_frameworks_business() -> None:
    async with served() as client:
        client.writer.write(b"POST /quick HTTP/1.1\r\nHost: " + b"x" * 20_000 + b"\r\n\r\n")
        head, _ = await client.answer()
        assert b" 400 " in head.split(b"\r\n")[0]


async def test_a_connection_that_rests_or_takes_its_time_is_handed_over() -> None:
    async with served(rest_s=0.01) as client:
        client.writer.write(REQUEST[:-2])
        async with asyncio.timeout(PATIENCE_S):
            while client.posts.connections:  # noqa: ASYNC110 - the timer tells nobody else
                await asyncio.sleep(0.005)
        client.writer.write(REQUEST[-2:])
        assert (await client.answer())[1] == b"framework hello"
        assert client.posts.answered_total == 0


async def test_open_connections_end_with_the_server() -> None:
    async with served() as client:
        client.writer.write(REQUEST)
        await client.answer()
        client.posts.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*client.address)
        async with asyncio.timeout(PATIENCE_S):
            assert await client.reader.read() == b""
        assert not client.posts.connections
