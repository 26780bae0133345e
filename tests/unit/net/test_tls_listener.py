"""A service that speaks TLS: who is let in, who is told what, and that nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest
from aiohttp import web

from kvmesh.cli.certificates import Files, make_certificate
from kvmesh.config.tls import TlsSettings
from kvmesh.net import tls_listener
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.http import json_response
from kvmesh.net.service import Service, serving
from kvmesh.net.tls import Tls
from kvmesh.protocol.errors import ApiError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_certificate(tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_certificate(tmp_path_factory.mktemp("stranger"))


def tls_of(files: Files, **more: object) -> Tls:
    settings = {"cert_file": str(files.certificate), "key_file": str(files.key), "ca_file": str(files.ca), **more}
    return Tls(TlsSettings.model_validate(settings))


def trusting(files: Files, **more: object) -> Tls:
    return Tls(TlsSettings.model_validate({"ca_file": str(files.ca), **more}))


class Door(Service):
    """A service that tells who came in."""

    def __init__(self, tls: Tls) -> None:
        super().__init__("door", tls=tls)
        self.app.router.add_get("/who", self._who)

    async def _who(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        certificate = request.transport.get_extra_info("peercert")
        return json_response({"name": "" if not certificate else dict(certificate["subject"][0])["commonName"]})


@asynccontextmanager
async def door(tls: Tls) -> AsyncIterator[tuple[str, Door]]:
    service = Door(tls)
    with anyio.fail_after(20):
        async with serving(service) as url:
            yield url, service


async def ask(url: str, tls: Tls | None = None) -> str:
    async with HttpClient(timeout_s=5.0, tls=tls) as http:
        return (await http.call("GET", f"{url}/who", dict[str, str]))["name"]


def count(service: Door, name: str) -> float:
    values = [line.split()[1] for line in service.metrics.render().decode().splitlines() if line.startswith(f"{name} ")]
    return float(values[0])


async def test_a_client_that_trusts_the_authority_is_served(files: Files) -> None:
    async with door(tls_of(files)) as (url, service):
        assert url.startswith("https://127.0.0.1:")
        assert await ask(url, trusting(files)) == ""
        assert count(service, "kvmesh_tls_handshakes_total") == 1
        assert count(service, "kvmesh_tls_certificate_not_after_seconds") > 0


async def test_a_refusal_that_crosses_the_request_is_a_reset(files: Files) -> None:
    """The alert that names the reason is lost then."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset() -> None:
            for _ in range(2):  # A question is asked again over a new connection, once.
                accepted, _ = listener.accept()
                with context.wrap_socket(accepted, server_side=True) as served:
                    served.recv(1)
                    served.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, reset)
                with pytest.raises(PeerUnreachableError, match="perhaps it asks for a client certificate"):
                    await ask(f"https://127.0.0.1:{listener.getsockname()[1]}", trusting(files))


async def test_a_client_certificate_is_asked_for_where_it_is_required(files: Files, stranger: Files) -> None:
    async with door(tls_of(files, client_auth="required")) as (url, service):
        assert await ask(url, tls_of(files)) == "kvmesh"
        with pytest.raises(PeerUnreachableError, match="perhaps it asks for a client certificate"):
            await ask(url, trusting(files))
        assert count(service, 'kvmesh_tls_refused_total{reason="no_certificate"}') >= 1
        foreign = Tls(
            TlsSettings(cert_file=str(stranger.certificate), key_file=str(stranger.key), ca_file=str(stranger.ca))
        )
        mixed = foreign.for_request()["ssl"]
        mixed.load_verify_locations(str(files.ca))
        with pytest.raises(PeerUnreachableError):
            await ask(url, foreign)
        assert count(service, 'kvmesh_tls_refused_total{reason="bad_certificate"}') >= 1


async def test_an_optional_certificate_may_be_left_out(files: Files) -> None:
    async with door(tls_of(files, client_auth="optional")) as (url, _):
        assert await ask(url, trusting(files)) == ""
        assert await ask(url, tls_of(files)) == "kvmesh"


async def test_a_plain_http_client_is_told_so_at_once(files: Files) -> None:
    async with door(tls_of(files)) as (url, service):
        with pytest.raises(ApiError, match="speaks TLS; use https://") as caught:
            await ask(url.replace("https", "http"))
        assert (caught.value.status, caught.value.code) == (400, "tls_required")
        assert count(service, 'kvmesh_tls_refused_total{reason="plain_http"}') == 1


async def test_clients_say_what_they_dislike(files: Files, stranger: Files) -> None:
    async with door(tls_of(files)) as (url, _):
        with pytest.raises(PeerUnreachableError, match=r"not signed by the trusted authorities \(ca_file\)"):
            await ask(url, trusting(stranger))
        with pytest.raises(PeerUnreachableError, match=r"not signed by the trusted authorities \(ca_file\)"):
            await ask(url)
        with pytest.raises(PeerUnreachableError, match="certificate cannot be trusted: Hostname mismatch"):
            await ask(url, trusting(files, server_name="elsewhere.example"))
    async with serving(Service("plain")) as plain:
        with pytest.raises(PeerUnreachableError, match="does not speak TLS"):
            await ask(plain.replace("http", "https"), trusting(files))


async def test_a_name_may_stand_for_every_address(tmp_path: Path) -> None:
    """Addresses of pods are in no certificate: one name in all of them is verified instead."""
    files = make_certificate(tmp_path)
    async with door(tls_of(files)) as (url, _):
        assert await ask(url, trusting(files, server_name="kvmesh.internal")) == ""


async def test_a_connection_that_says_nothing_is_closed_in_time(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with door(tls_of(files)) as (url, service):
        stream = await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))
        async with stream:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        stream = await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))
        async with stream:
            await stream.send(b"\x16\x03\x01")
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        assert await ask(url, trusting(files)) == "", "others are served meanwhile"
        assert count(service, 'kvmesh_tls_refused_total{reason="timeout"}') == 2


async def test_noise_is_refused_and_a_bare_connection_is_no_refusal(files: Files) -> None:
    async with door(tls_of(files)) as (url, service):
        stream = await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))
        async with stream:
            await stream.send(b"\x16" + b"\xff" * 300)
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while await stream.receive():
                    pass  # an alert may come before the end
        await (await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))).aclose()
        assert await ask(url, trusting(files)) == ""
        assert count(service, 'kvmesh_tls_refused_total{reason="broken"}') == 1


def test_a_storm_of_broken_connections_harms_nobody(files: Files, stranger: Files) -> None:
    """On the loop that services run on: noise, resets at any point of a handshake, and clients that trust nobody."""
    anyio.run(_storm, files, stranger, backend_options={"use_uvloop": True})


async def _storm(files: Files, stranger: Files) -> None:
    choose = random.Random(7)
    hello = _client_hello()

    async def break_off(port: int) -> None:
        plain = socket.socket()
        plain.setblocking(False)
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError), plain:
            await loop.sock_connect(plain, ("127.0.0.1", port))
            data = choose.choice([b"GET / HTTP/1.1\r\n\r\n", b"\x16" + choose.randbytes(64), hello, b""])
            await loop.sock_sendall(plain, data[: choose.randint(0, len(data))])
            if choose.random() < 0.5:
                with anyio.move_on_after(0.05):
                    await loop.sock_recv(plain, 4096)
            if choose.random() < 0.5:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset

    async def distrust(url: str) -> None:
        with contextlib.suppress(PeerUnreachableError):
            await ask(url, trusting(stranger))

    async with door(tls_of(files)) as (url, service):
        port = int(url.rpartition(":")[2])
        for _ in range(5):
            async with anyio.create_task_group() as tasks:
                for _ in range(40):
                    tasks.start_soon(break_off, port)
                for _ in range(4):
                    tasks.start_soon(distrust, url)
                tasks.start_soon(ask, url, trusting(files))
        assert await ask(url, trusting(files)) == ""
        assert count(service, "kvmesh_tls_handshakes_total") == 6
        assert count(service, 'kvmesh_tls_refused_total{reason="broken"}') > 20


def _client_hello() -> bytes:
    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def test_a_service_that_stops_ends_connections_and_waiting_handshakes(files: Files) -> None:
    async with anyio.create_task_group() as tasks:
        async with door(tls_of(files)) as (url, _):
            silent = await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))
            http = await HttpClient(tls=trusting(files)).__aenter__()
            await http.call("GET", f"{url}/who", dict[str, str])
        async with silent:
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await silent.receive()
        await http.__aexit__(None, None, None)
        tasks.cancel_scope.cancel()


async def test_a_client_that_leaves_cancels_its_handler(files: Files) -> None:
    entered, cancelled = anyio.Event(), anyio.Event()

    async def wait(_request: web.Request) -> web.Response:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError("for ever is over")

    service = Door(tls_of(files))
    service.app.router.add_get("/wait", wait)
    async with serving(service) as url, HttpClient(tls=trusting(files)) as http, anyio.create_task_group() as tasks:
        tasks.start_soon(http.call, "GET", f"{url}/wait", dict)
        await entered.wait()
        tasks.cancel_scope.cancel()
    with anyio.fail_after(5):
        await cancelled.wait()


async def test_certificates_change_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that trust only the new authority are served as soon as the files are there; running ones go on."""
    monkeypatch.setattr("kvmesh.net.tls.LOOK_S", 0.0)
    files = make_certificate(tmp_path / "now")
    later = make_certificate(tmp_path / "later")
    async with door(tls_of(files)) as (url, service), HttpClient(tls=trusting(files)) as running:
        await running.call("GET", f"{url}/who", dict[str, str])
        for new, old in ((later.ca, files.ca), (later.key, files.key), (later.certificate, files.certificate)):
            new.rename(old)
        assert await ask(url, trusting(files)) == "", "the file at ca_file is the new authority"
        await running.call("GET", f"{url}/who", dict[str, str])
        assert count(service, "kvmesh_tls_reloads_total") == 1


async def test_the_plain_answer_is_http_for_other_clients_too(files: Files) -> None:
    async with (
        door(tls_of(files)) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(url.replace("https", "http"), data=b"x" * 10_000) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "tls_required"
