"""Latency histograms name a trace of each bucket to scrapers that understand it, and to nobody else."""

from __future__ import annotations

import time

import anyio
import pytest
from aiohttp import web
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from prometheus_client import Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from waiting import until

from kvmesh.net.client import HttpClient
from kvmesh.net.http import json_response
from kvmesh.net.service import Service, serving
from kvmesh.telemetry import exemplars
from kvmesh.telemetry.metrics import Metrics
from kvmesh.telemetry.tracing import Tracing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


class Traced(Service):
    """Serves with a span around each request, as router and workers do; waits on demand."""

    def __init__(self, tracing: Tracing) -> None:
        super().__init__("traced")
        self.tracing = tracing
        self.gate = anyio.Event()
        self.app.router.add_post("/traced", self._serve)
        self.app.router.add_post("/held", self._hold)
        self.app.router.add_get("/plain", self._plain)

    async def _serve(self, request: web.Request) -> web.Response:
        with self.tracing.span("work", self.tracing.extract(request.headers), kind=SpanKind.SERVER):
            return json_response({})

    async def _hold(self, _request: web.Request) -> web.Response:
        await self.gate.wait()
        return json_response({})

    async def _plain(self, _request: web.Request) -> web.Response:
        return json_response({})


def recording() -> Tracing:
    return Tracing("test", exporter=InMemorySpanExporter())


def marked(page: str, name: str) -> list[tuple[dict[str, str], dict[str, str], float]]:
    """Labels, exemplar and its value of the buckets of a histogram that have one."""
    return [
        (dict(sample.labels), dict(sample.exemplar.labels), sample.exemplar.value)
        for family in text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
        if family.name == name
        for sample in family.samples
        if sample.exemplar is not None
    ]


async def scraped(client: HttpClient, url: str, accept: str | None) -> tuple[str, str]:
    headers = {} if accept is None else {"Accept": accept}
    async with client.open("GET", f"{url}/metrics", headers=headers) as response:
        return response.headers["Content-Type"], (await response.read()).decode()


async def test_a_request_leaves_its_trace_in_its_bucket() -> None:
    tracing = recording()
    async with serving(Traced(tracing)) as url, HttpClient() as client:
        for path, method in (("/traced", "POST"), ("/plain", "GET")):  # on one connection: the second one has no trace
            headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"} if path == "/traced" else {}
            async with client.open(method, url + path, headers=headers) as response:
                assert response.status == 200
                await response.read()
        kind, page = await scraped(client, url, PROMETHEUS_2)
        assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        ((labels, exemplar, value),) = marked(page, "kvmesh_http_request_seconds")
        assert labels["route"] == "/traced"
        assert exemplar == {"trace_id": TRACE}
        assert 0 < value <= float(labels["le"])
        kind, page = await scraped(client, url, None)
        assert kind == "text/plain; version=1.0.0; charset=utf-8"
        assert 'kvmesh_http_request_seconds_count{route="/traced"} 1.0' in page
        assert TRACE not in page
    tracing.close()


@pytest.mark.parametrize(
    ("tracing", "flags"), [(Tracing("test"), "01"), (recording(), "00")], ids=["no collector", "not sampled"]
)
async def test_what_nobody_could_look_up_is_no_exemplar(tracing: Tracing, flags: str) -> None:
    async with serving(Traced(tracing)) as url, HttpClient() as client:
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-{flags}"}
        async with client.open("POST", f"{url}/traced", headers=headers) as response:
            assert response.status == 200
            await response.read()
        _, page = await scraped(client, url, PROMETHEUS_3)
        assert marked(page, "kvmesh_http_request_seconds") == []
    tracing.close()


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/plain;version=0.0.4,application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
    ],
)
def test_the_scraper_chooses(accept: str, openmetrics: bool) -> None:
    metrics = Metrics()
    body, kind = metrics.answer(accept)
    assert kind.startswith("application/openmetrics-text") == openmetrics
    assert body.endswith(b"# EOF\n") == openmetrics
    family = "kvmesh_http_requests" if openmetrics else "kvmesh_http_requests_total"
    assert f"# TYPE {family} counter" in body.decode().splitlines()


def test_a_request_begins_without_the_last_ones_trace() -> None:
    tracing = recording()
    histogram = Histogram("h", "test", registry=Metrics().registry)
    with tracing.span("inner", tracing.extract({})):
        assert exemplars.current() is None, "only a request's own span is its exemplar"
    with tracing.span("request", tracing.extract({}), kind=SpanKind.SERVER):
        pass
    kept = exemplars.current()
    assert kept is not None, "what is measured after the span's end has it, too"
    histogram.observe(0.1, kept)
    exemplars.begin()
    assert exemplars.current() is None
    tracing.close()


async def test_a_draining_service_says_until_when() -> None:
    service = Traced(Tracing("test"))
    service.drain_s = 30.0
    name = "kvmesh_drain_deadline_seconds"

    def deadline() -> float:
        (line,) = (line for line in service.metrics.render().decode().splitlines() if line.startswith(f"{name} "))
        return float(line.split()[1])

    async def post(client: HttpClient, url: str) -> None:
        async with client.open("POST", f"{url}/held") as response:
            await response.read()

    async def look_and_release(client: HttpClient, url: str) -> None:
        await until(lambda: service.draining, "it drains")
        _, page = await scraped(client, url, None)
        assert f"{name} 0.0" not in page
        assert deadline() > time.time()
        service.gate.set()

    async with HttpClient() as client, anyio.create_task_group() as tasks:
        assert deadline() == 0.0
        async with serving(service) as url:
            tasks.start_soon(post, client, url)
            await until(lambda: service.statistics()["in_flight"] == 1, "the request runs")
            tasks.start_soon(look_and_release, client, url)
