"""A coordinator that finds servers over HTTP: they join, drain, leave, are asked with a key, and survive its death."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
from aiohttp import web
from fake_worker import FakeWorker
from waiting import until

from kvmesh.config import ConfigError, CoordinatorSettings
from kvmesh.coordinator.discovery.source import Expected, may_have_key
from kvmesh.coordinator.main import build
from kvmesh.net.auth import ApiKeys
from kvmesh.net.client import HttpClient
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.http import json_response
from kvmesh.net.service import Health, Service, serving
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Member, MemberList

T = TypeVar("T")


class FakeVllm(Service):
    """An engine with an OpenAI face and nothing else."""

    def __init__(self) -> None:
        super().__init__("vllm")
        self.app.router.add_get("/v1/models", self._models)

    async def _models(self, _request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [{"id": "llama", "object": "model"}]})


@asynccontextmanager
async def coordinator(port: int = 0, **settings: Any) -> AsyncIterator[str]:
    service = build(CoordinatorSettings(lease_s=1.5, drain_s=0.1, **settings))
    async with serving(service, port=port) as url:
        yield url


async def members(http: HttpClient, url: str) -> dict[str, Member]:
    listed = await http.call("GET", f"{url}/members", MemberList)
    return {member.instance_id: member for member in listed.members}


@pytest.fixture
async def http() -> AsyncIterator[HttpClient]:
    async with HttpClient(timeout_s=5.0) as client:
        yield client


async def eventually(read: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """What is read over HTTP, once it is so."""
    with anyio.fail_after(15):
        while not holds(value := await read()):  # noqa: ASYNC110 - another service has no event to wait for
            await anyio.sleep(0.02)
    return value


async def wait_members(http: HttpClient, url: str, *names: str) -> dict[str, Member]:
    return await eventually(lambda: members(http, url), lambda found: set(found) == set(names))


async def test_listed_servers_join_are_asked_again_and_die(http: HttpClient) -> None:
    worker, other = FakeWorker(), FakeWorker("context-1")
    async with serving(other) as other_url, serving(worker) as worker_url:
        static = {"type": "static", "urls": [worker_url, other_url]}
        async with coordinator(discovery=[static]) as url:
            found = (await wait_members(http, url, "context-0", "context-1"))["context-0"]
            assert (found.url, found.role, found.epoch, found.source) == (worker_url, "context", 5, "static")
            assert (found.dp_size, found.tp_size, found.load.running, found.load.pages_total) == (2, 1, 1, 7)
            worker.draining = True
            await eventually(lambda: members(http, url), lambda found: found["context-0"].draining)
            worker.draining = False
            worker.well = Health(False, "the engine does not answer")
            await eventually(lambda: members(http, url), lambda found: not found["context-0"].load.healthy)
            places = (await http.call("GET", f"{url}/discovery", dict[str, Any]))["places"]
            assert {place["state"] for place in places} == {"a member"}
            worker.info["instance_id"] = "nobody else"
            worker.info["protocol"] = 1
            started_s = anyio.current_time()
            await wait_members(http, url, "context-1")
            assert anyio.current_time() - started_s < 4.0, "a lease, and a second for the sweep"


async def test_a_watcher_hears_of_found_servers_like_of_any_other(http: HttpClient) -> None:
    heard: list[tuple[str, str]] = []
    async with (
        serving(FakeWorker()) as worker_url,
        coordinator(discovery=[{"type": "static", "urls": [worker_url]}]) as url,
        anyio.create_task_group() as tasks,
    ):
        client = CoordinatorClient(url)
        client.subscribe(lambda event: heard.append((event.kind, event.member.instance_id)))
        await client.start(tasks)
        await until(lambda: heard == [("joined", "context-0")])
        await client.stop()


async def test_another_engine_appears_with_the_role_of_its_source(http: HttpClient) -> None:
    async with serving(FakeVllm()) as vllm:
        source = {"type": "static", "urls": [vllm], "role": "both", "dialect": "vllm"}
        async with coordinator(discovery=[source]) as url:
            [found] = (await wait_members(http, url, vllm.removeprefix("http://"))).values()
            assert (found.role, found.dialect, found.model) == ("both", "vllm", "llama")


async def test_servers_that_ask_for_a_key_are_given_one(http: HttpClient, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("mesh sk-1\n")
    async with serving(FakeWorker(keys=ApiKeys(file))) as worker_url:
        source = {"type": "static", "urls": [worker_url], "trusted": True}
        async with coordinator(discovery=[source]) as url:
            places = partial(http.call, "GET", f"{url}/discovery", dict[str, Any])
            await eventually(places, lambda found: "API key" in str(found))
        async with (
            coordinator(discovery=[source], api_keys_file=str(file)) as url,
            HttpClient(keys=ApiKeys(file)) as own,
        ):
            await wait_members(own, url, "context-0")
            with pytest.raises(ApiError) as caught:
                await members(http, url)
            assert caught.value.status == 401
            assert (await http.call("GET", f"{url}/health", dict[str, str]))["status"] == "ok"


async def test_who_is_not_known_is_not_shown_the_key(http: HttpClient, tmp_path: Path) -> None:
    """An address that a source names, or one that it sends to, may be anybody's."""
    file = tmp_path / "keys"
    file.write_text("mesh sk-1\n")
    shown: list[str | None] = []

    class Stranger(Service):
        def __init__(self, elsewhere: str = "") -> None:
            super().__init__("stranger")
            self._elsewhere = elsewhere
            for path in ("/server_info", "/v1/models", "/latest"):
                self.app.router.add_get(path, self._note)

        async def _note(self, request: web.Request) -> web.Response:
            shown.append(request.headers.get("Authorization"))
            return json_response({}, 307 if self._elsewhere else 404, {"Location": f"{self._elsewhere}/latest"})

    async with serving(Stranger()) as victim, serving(Stranger(victim)) as url, serving(Stranger(victim)) as engine:
        sources = [
            {"type": "static", "urls": [url]},
            {"type": "static", "urls": [engine], "role": "both", "dialect": "vllm", "trusted": True},
        ]
        async with (
            coordinator(discovery=sources, api_keys_file=str(file)) as own,
            HttpClient(keys=ApiKeys(file)) as keyed,
        ):
            places = partial(keyed.call, "GET", f"{own}/discovery", dict[str, Any])
            await eventually(places, lambda found: str(found).count("does not answer") == 2)
    assert set(shown) == {None}
    assert not may_have_key("http://10.0.0.7:8100", Expected(), verifies=True)
    assert not may_have_key("https://10.0.0.7:8100", Expected(), verifies=False)
    assert may_have_key("https://10.0.0.7:8100", Expected(), verifies=True)


async def test_a_registration_cannot_pass_for_a_found_server(http: HttpClient) -> None:
    async with coordinator() as url:
        one = Member(instance_id="context-0", role="context", url="http://127.0.0.1:1", source="static")
        await http.call("POST", f"{url}/members", dict[str, Any], body={"member": one})
        assert (await members(http, url))["context-0"].source == ""


def test_a_source_that_cannot_work_here_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="endpointslice source works in a pod"):
        build(CoordinatorSettings.model_validate({"discovery": [{"type": "endpointslice", "service": "mesh"}]}))
