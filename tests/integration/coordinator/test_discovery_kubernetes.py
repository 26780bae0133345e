"""The EndpointSlice source against a fake API server: lists in pages, watches, outages and their ends."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from fake_kubernetes import FakeKubernetes, endpoint
from structlog.testing import capture_logs
from waiting import until

from kvmesh.cli.certificates import make_certificate
from kvmesh.config import ConfigError
from kvmesh.config.discovery import EndpointSliceSource
from kvmesh.coordinator.discovery import kubernetes
from kvmesh.coordinator.discovery.kubernetes import ApiServer, KubernetesSource, api_server
from kvmesh.coordinator.discovery.source import Expected
from kvmesh.net.clock import SystemClock


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(kubernetes, "MAX_RETRY_S", 0.05)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("token\n")
    return file


class Follower:
    """A source that runs, and what it has reported."""

    def __init__(self, source: KubernetesSource) -> None:
        self.source = source
        self.reports: list[dict[str, bool]] = []

    def report(self, urls: Mapping[str, bool]) -> None:
        self.reports.append(dict(urls))

    async def sees(self, **takes_work: bool) -> None:
        """Wait until exactly these hosts (``a1`` is 10.0.0.1) are the last report."""
        wanted = {f"http://10.0.0.{name[1:]}:8100": value for name, value in takes_work.items()}
        await until(lambda: self.reports and self.reports[-1] == wanted, f"{wanted}, not {self.reports[-1:]}", 10.0)


@asynccontextmanager
async def following(url: str, token: Path, ca: Path | None = None) -> AsyncIterator[Follower]:
    server = ApiServer(url, str(token), str(ca or token.with_name("none")), "serving")
    source = KubernetesSource("mesh", server, "http", "http", Expected(), clock=SystemClock())
    follower = Follower(source)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.run, follower.report)
        yield follower
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_pods_come_change_and_go(version: str, token: Path) -> None:
    fake = FakeKubernetes("mesh", versions=(version,))
    fake.put("s-0", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=None))
    async with fake.serving() as url, following(url, token) as follower:
        await follower.sees(a1=True, a2=True)
        fake.put("s-0", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False, terminating=True))
        await follower.sees(a1=True, a2=False)
        fake.put("s-1", endpoint("10.0.0.3"))
        fake.put("s-0", endpoint("10.0.0.1"))
        await follower.sees(a1=True, a3=True)
        fake.delete("s-0")
        await follower.sees(a3=True)
        assert follower.source.statistics() == {"errors_total": 0, "lists_total": 1, "watches_total": 1}


async def test_a_list_is_read_in_pages(token: Path) -> None:
    fake = FakeKubernetes("mesh")
    fake.page = 2
    for number in range(1, 6):
        fake.put(f"s-{number}", endpoint(f"10.0.0.{number}"))
    async with fake.serving() as url, following(url, token) as follower:
        await follower.sees(a1=True, a2=True, a3=True, a4=True, a5=True)
        await until(lambda: fake.watchers)
    assert [query.get("continue") for query in fake.requests] == [None, "2", "4", None]


async def test_a_watch_that_ends_goes_on_where_it_was_told_to(token: Path) -> None:
    """A bookmark moves the resource version, so that nothing is listed again after a quiet time."""
    fake = FakeKubernetes("mesh")
    fake.put("s-0", endpoint("10.0.0.1"))
    async with fake.serving() as url, following(url, token) as follower:
        await until(lambda: fake.watchers)
        fake.bookmark()
        marked = fake.version
        fake.put("s-1", endpoint("10.0.0.2"))
        await follower.sees(a1=True, a2=True)
        fake.bookmark()
        await anyio.lowlevel.checkpoint()  # the bookmark is on its way before the watch ends
        await until(lambda: len(fake.requests) == 2)
        fake.drop_watches()
        await until(lambda: len(fake.requests) > 2)
        fake.put("s-2", endpoint("10.0.0.3"))
        await follower.sees(a1=True, a2=True, a3=True)
        assert follower.source.statistics()["lists_total"] == 1
        assert int(fake.requests[2]["resourceVersion"]) > marked


@pytest.mark.parametrize("way", ["status", "event"])
async def test_a_version_that_is_too_old_means_a_new_list(way: str, token: Path) -> None:
    """410 Gone, as the answer to a watch or in the middle of one; what happened meanwhile is not missed."""
    fake = FakeKubernetes("mesh")
    fake.put("s-0", endpoint("10.0.0.1"))
    async with fake.serving() as url, following(url, token) as follower:
        await until(lambda: fake.watchers)
        if way == "event":
            fake.fail_watches(410)
            await until(lambda: follower.source.statistics()["lists_total"] == 2)
        else:
            del fake._slices["s-0"]
            fake.compact()
            fake.drop_watches()
            await follower.sees()
        fake.put("s-1", endpoint("10.0.0.2"))
        await until(lambda: "http://10.0.0.2:8100" in follower.reports[-1])
        assert follower.source.statistics()["lists_total"] == 2
        assert follower.source.statistics()["errors_total"] == 0


async def test_an_api_server_that_is_away_takes_nobody_along(token: Path, free_port: int) -> None:
    fake = FakeKubernetes("mesh")
    fake.put("s-0", endpoint("10.0.0.1"))
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            async with fake.serving(free_port) as url:
                follower = await tasks.start(_follow, url, token)
                await follower.sees(a1=True)
                await until(lambda: fake.watchers)
            await until(lambda: follower.source.statistics()["errors_total"] > 3)
            await follower.sees(a1=True)
            fake.put("s-1", endpoint("10.0.0.2"))
            async with fake.serving(free_port):
                await follower.sees(a1=True, a2=True)
                tasks.cancel_scope.cancel()
    assert [line["log_level"] for line in logs] == ["warning", "info"], "one line for the loss, one for the end"


async def _follow(url: str, token: Path, *, task_status: anyio.abc.TaskStatus[Follower]) -> None:
    async with following(url, token) as follower:
        task_status.started(follower)
        await anyio.sleep_forever()


async def test_a_token_that_changes_is_read_again(token: Path) -> None:
    fake = FakeKubernetes("mesh")
    fake.put("s-0", endpoint("10.0.0.1"))
    async with fake.serving() as url, following(url, token) as follower:
        await until(lambda: fake.watchers)
        fake.token = "next"
        fake.drop_watches()
        await until(lambda: follower.source.statistics()["errors_total"] > 0)
        await anyio.Path(token).write_text("next")
        fake.put("s-0", endpoint("10.0.0.2"))
        await follower.sees(a2=True)


async def test_missing_rights_are_said_with_the_remedy(token: Path) -> None:
    fake = FakeKubernetes("mesh")
    fake.refuse = 403, 'endpointslices.discovery.k8s.io is forbidden: User "x" cannot list resource'
    with capture_logs() as logs:
        async with fake.serving() as url, following(url, token) as follower:
            await until(lambda: follower.source.statistics()["errors_total"] > 2)
    [line] = logs
    assert "cannot list resource" in line["error"]
    assert "get, list and watch of endpointslices in serving" in line["error"]


async def test_a_port_that_the_service_lacks_is_said(token: Path) -> None:
    fake = FakeKubernetes("mesh")
    fake.put("s-0", endpoint("10.0.0.1"), port_name="web", port=80)
    with capture_logs() as logs:
        async with fake.serving() as url, following(url, token) as follower:
            await until(lambda: follower.reports)
    assert [(line["event"], line["has"]) for line in logs] == [("the service has no such port", ["web"])]


async def test_a_slice_of_a_thousand_pods_fits(token: Path) -> None:
    fake = FakeKubernetes("mesh")
    async with fake.serving() as url, following(url, token) as follower:
        await until(lambda: fake.watchers)
        fake.put("s-0", *(endpoint(f"10.0.{n // 250}.{n % 250}") for n in range(1000)))
        await until(lambda: len(follower.reports[-1]) == 1000)


async def test_the_api_server_is_verified(token: Path, tmp_path: Path) -> None:
    """By the ServiceAccount's authority, which is read for each connection: clusters replace it."""
    files = make_certificate(tmp_path / "cluster")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    trusted = tmp_path / "ca.crt"
    shutil.copy(make_certificate(tmp_path / "stranger").ca, trusted)
    fake = FakeKubernetes("mesh")
    fake.put("s-0", endpoint("10.0.0.1"))
    with capture_logs() as logs:
        async with fake.serving(context=context) as url, following(url, token, trusted) as follower:
            await until(lambda: follower.source.statistics()["errors_total"] > 1)
            assert fake.requests == []
            shutil.copy(files.ca, trusted)
            await follower.sees(a1=True)
    assert "certificate is not signed by" in logs[0]["error"]


def test_outside_of_a_cluster_the_settings_have_to_say_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="state api_url"):
        api_server(EndpointSliceSource(service="mesh"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    token = str(tmp_path / "token")
    with pytest.raises(ConfigError, match="state the namespace"):
        api_server(EndpointSliceSource(service="mesh", token_file=token))
    (tmp_path / "namespace").write_text("serving\n")
    found = api_server(EndpointSliceSource(service="mesh", token_file=token))
    assert (found.url, found.namespace) == ("https://[fd00::1]:6443", "serving")
