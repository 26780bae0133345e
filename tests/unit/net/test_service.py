"""Services start, answer, report, drain and stop."""

from __future__ import annotations

import contextlib

import anyio
import msgspec
import pytest
from aiohttp import web

from kvmesh.net.auth import ApiKeys
from kvmesh.net.client import HttpClient, PeerUnreachableError
from kvmesh.net.http import REQUEST_ID_HEADER, api_key_middleware, json_response, read_json
from kvmesh.net.service import Health, Service, serving
from kvmesh.protocol.errors import ApiError


class Greeting(msgspec.Struct):
    name: str


class Greeter(Service):
    """A service with one slow and one broken route."""

    def __init__(self, keys: frozenset[str] = frozenset()) -> None:
        super().__init__("greeter", middleware=[api_key_middleware(ApiKeys(fixed=keys))], drain_s=5)
        self.ready = False
        self.entered = anyio.Event()
        self.release = anyio.Event()
        self.cancelled = anyio.Event()
        self.app.router.add_post("/greet", self._greet)
        self.app.router.add_post("/slow", self._slow)
        self.app.router.add_post("/broken", self._broken)
        self.app.router.add_post("/half", self._half)

    async def start(self, tasks: anyio.abc.TaskGroup, url: str) -> None:
        self.ready = True

    def health(self) -> Health:
        return Health(self.ready, "" if self.ready else "not started")

    async def _greet(self, request: web.Request) -> web.Response:
        return json_response({"hello": (await read_json(request, Greeting)).name})

    async def _slow(self, request: web.Request) -> web.Response:
        self.entered.set()
        try:
            await self.release.wait()
        except BaseException:
            self.cancelled.set()
            raise
        return json_response({"slow": True})

    async def _half(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        raise ApiError(504, "too late")

    async def _broken(self, request: web.Request) -> web.Response:
        raise KeyError("secret detail")


async def test_json_exchange_request_id_and_health() -> None:
    async with serving(Greeter()) as url, HttpClient() as client:
        assert await client.call("POST", f"{url}/greet", dict[str, str], body={"name": "Ada"}) == {"hello": "Ada"}
        async with client.open("GET", f"{url}/health", headers={REQUEST_ID_HEADER: "r-1"}) as response:
            assert response.headers[REQUEST_ID_HEADER] == "r-1"
            assert (await response.json())["status"] == "ok"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/greet", b"{", 400, "not valid JSON"),
        ("/greet", b'{"name": 5}', 400, "$.name"),
        ("/greet", b'{"more": ' + b"[" * 100_000, 400, "nested too deeply"),
        ("/greet", b'{"name": "\xff"}', 400, "not valid JSON"),
        ("/nowhere", b"{}", 404, "No such path"),
        ("/health", b"{}", 405, "does not accept POST"),
        ("/broken", b"{}", 500, "Internal error"),
    ],
)
async def test_every_error_has_the_openai_shape(path: str, body: bytes, status: int, says: str) -> None:
    async with serving(Greeter()) as url, HttpClient() as client:
        with pytest.raises(ApiError) as caught:
            await client.call("POST", url + path, dict[str, str], body=body)
    assert caught.value.status == status
    assert says in caught.value.message
    assert "secret" not in caught.value.message


async def test_api_keys_guard_all_but_the_probes() -> None:
    async with serving(Greeter(frozenset({"k1", "k2"}))) as url, HttpClient() as client:
        assert (await client.call("GET", f"{url}/health", dict[str, str]))["status"] == "ok"
        refused = ("", "Bearer k3", "Bearer k\u00e9", "k2", "Basic k2")
        for headers in ({"Authorization": value} for value in refused):
            with pytest.raises(ApiError) as caught:
                await client.call("POST", f"{url}/greet", dict[str, str], body={"name": "x"}, headers=headers)
            assert caught.value.status == 401
        for scheme in ("Bearer", "bearer"):
            good = {"Authorization": f"{scheme} k2"}
            await client.call("POST", f"{url}/greet", dict[str, str], body={"name": "x"}, headers=good)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://elsewhere.example", "Content-Type": "text/plain"},  # a request that no browser asks about
        {"Origin": "null", "Content-Type": "text/plain"},  # of a page that hides where it is from
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
async def test_no_web_page_can_have_a_service_do_anything(headers: dict[str, str]) -> None:
    async with serving(Greeter()) as url, HttpClient() as client:
        with pytest.raises(ApiError) as caught:
            await client.call("POST", f"{url}/greet", dict[str, str], body={"name": "x"}, headers=headers)
        assert (caught.value.status, caught.value.code) == (403, "web_page")
        async with client.open("GET", f"{url}/health", headers=headers) as response:
            assert response.status == 200
        typed = {"Sec-Fetch-Site": "none"}  # a person who types the address
        await client.call("POST", f"{url}/greet", dict[str, str], body={"name": "x"}, headers=typed)


async def test_a_service_for_clients_takes_requests_of_web_pages() -> None:
    class Open(Greeter):
        for_web_pages = True

    async with serving(Open()) as url, HttpClient() as client:
        origin = {"Origin": "http://elsewhere.example"}
        answer = await client.call("POST", f"{url}/greet", dict[str, str], body={"name": "x"}, headers=origin)
    assert answer == {"hello": "x"}


async def test_a_key_of_arbitrary_bytes_is_refused_like_any_other() -> None:
    async with serving(Greeter(frozenset({"k1"}))) as url:
        stream = await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))
        async with stream:
            await stream.send(
                b"POST /greet HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\nContent-Length: 0\r\n\r\n"
            )
            assert (await stream.receive()).startswith(b"HTTP/1.1 401")


async def test_an_answer_that_had_begun_is_broken_off_not_answered_twice() -> None:
    async with serving(Greeter()) as url:
        stream = await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))
        received = b""
        async with stream:
            await stream.send(b"POST /half HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    received += await stream.receive()
        assert received.count(b"HTTP/1.1") == 1
        assert not received.endswith(b"0\r\n\r\n")


async def test_drain_waits_for_the_begun_and_refuses_the_new() -> None:
    service = Greeter()
    answers = []

    async def ask(client: HttpClient, url: str) -> None:
        answers.append(await client.call("POST", f"{url}/slow", dict[str, bool]))

    async with HttpClient() as client, serving(service) as url, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, client, url)
        await service.entered.wait()
        async with anyio.create_task_group() as draining:
            draining.start_soon(service.drain)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ApiError) as caught:
                await client.call("POST", f"{url}/greet", dict[str, str], body={"name": "late"})
            assert (caught.value.status, caught.value.code) == (503, "draining")
            service.release.set()
    assert answers == [{"slow": True}]


async def test_a_client_that_leaves_cancels_its_handler() -> None:
    service = Greeter()
    async with serving(service) as url, HttpClient() as client:
        with pytest.raises(PeerUnreachableError):
            await client.call("POST", f"{url}/slow", dict[str, bool], timeout_s=0.2)
        with anyio.fail_after(5):
            await service.cancelled.wait()


async def test_an_unreachable_peer_is_named() -> None:
    async with serving(Greeter()) as url:
        pass
    async with HttpClient() as client:
        with pytest.raises(PeerUnreachableError, match=url):
            await client.call("GET", f"{url}/health", dict[str, str])


async def test_metrics_count_requests_by_route_and_status() -> None:
    async with serving(Greeter()) as url, HttpClient() as client:
        await client.call("POST", f"{url}/greet", dict[str, str], body={"name": "Ada"})
        async with client.open("GET", f"{url}/metrics") as response:
            text = await response.text()
    assert 'kvmesh_http_requests_total{route="/greet",status="200"} 1.0' in text
