"""Clients that send or read too slowly, or send what is no body: bounded, and told in a sentence."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import pytest
from aiohttp import web
from waiting import until

from kvmesh.router.app import RouterService

Mesh = Callable[..., Any]


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines, "", ""]).encode()


async def exchange(m: Any, request: bytes) -> bytes:
    """The answer to a request that is sent over a connection of its own."""
    host, port = m.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        with anyio.fail_after(10):
            answer = await reader.readuntil(b"\r\n\r\n")
            return answer + await reader.readuntil(b"}}")
    finally:
        writer.close()


async def test_a_stream_that_nobody_reads_is_closed_soon_after_its_deadline(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[Any] = []
    serve = RouterService._serve

    async def remember(service: RouterService, request: web.Request, kind: Any) -> web.StreamResponse:
        connections.append(request.transport.get_extra_info("socket"))
        return await serve(service, request, kind)

    monkeypatch.setattr(RouterService, "_serve", remember)
    async with mesh({"b": "both"}, request_timeout_s=0.3) as m:
        m["b"].answer = ["x" * 100_000] * 200  # more than the buffers on the way hold
        body = msgspec.json.encode({"model": "fake-model", "prompt": "x", "max_tokens": 200, "stream": True})
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = m.url.removeprefix("http://").split(":")
            client.connect((host, int(port)))
            client.sendall(head("/v1/completions", f"Content-Length: {len(body)}") + body)
            await until(lambda: m["b"].disconnects == 1)
            await until(lambda: connections[0].fileno() == -1, 5.0)
        await until(m.idle)
        assert m.router.parts.cluster.get("b").unusable() is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_body_that_does_not_come_is_a_408(mesh: Mesh, path: str) -> None:
    async with mesh(request_timeout_s=0.2) as m:
        answer = await exchange(m, head(path, "Content-Length: 100") + b'{"model"')
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in answer
        await until(m.idle)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_body_that_is_not_in_its_coding_is_a_400(
    mesh: Mesh, path: str, coding: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with mesh() as m:
        garbage = b"this is not compressed"
        answer = await exchange(
            m, head(path, f"Content-Length: {len(garbage)}", f"Content-Encoding: {coding}") + garbage
        )
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"type":"invalid_request_error"' in answer
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
