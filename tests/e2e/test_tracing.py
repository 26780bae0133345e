"""One trace a request, through router, context server and generation server, at an OTLP/HTTP collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from meshes.by_hand import Mesh
from meshes.process import request, until
from otlp_collector import Collector, Span, collecting
from soaks import soak_only

from kvmesh.models.store import DEFAULT_MODEL

pytestmark = pytest.mark.slow

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
CHUNK_TOKENS = 64
WINDOWS = [8192, 4096]
"""Longer than the prompt, and different, so that there are two layer groups."""
EXEMPLARS = {
    "router": "kvmesh_router_first_byte_seconds",
    "context": "kvmesh_time_to_first_token_seconds",
    "generation": "kvmesh_time_to_first_token_seconds",
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def within(inner: list[Span], outer: Span) -> None:
    """One after the other, inside their parent."""
    assert inner
    assert all(span.parent_id == outer.span_id for span in inner)
    times = [outer.start_ns, *(time for span in inner for time in (span.start_ns, span.end_ns)), outer.end_ns]
    # Between the end of a computation and the note of its token lies no more than bookkeeping, on other clocks' ticks.
    assert times == sorted(times), times


@pytest.mark.parametrize("backend", ["DEFAULT", pytest.param("NIXL", marks=soak_only)])
def test_one_trace_a_request(collector: Collector, make_brief_mesh: Callable[..., Mesh], backend: str) -> None:
    collector.spans.clear()
    to = {
        "otlp_endpoint": collector.url,
        "cache_transceiver_config": {"backend": backend},
        "kv_cache_config": {"max_attention_window": WINDOWS},
    }
    mesh = make_brief_mesh(
        {"context": {**to, "max_num_tokens": CHUNK_TOKENS}, "generation": dict(to)},
        router={"otlp_endpoint": collector.url},
        env={"OTEL_BSP_SCHEDULE_DELAY": "200"},
    )
    prompt = [1000 + number for number in range(2 * CHUNK_TOKENS + 10)]
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    status, answer = mesh["router"].post("/v1/completions", body, headers=headers)
    assert status == 200, answer
    wanted = (
        {("kvmesh-router", name) for name in ("router", "queue", "tokenize", "match")}
        | {("kvmesh-context", name) for name in ("context", "queue", "prefill", "chunk")}
        | {("kvmesh-generation", name) for name in ("generation", "queue", "transfer", "slice", "decode")}
    )

    def arrived() -> bool:
        return wanted <= {(span.service, span.name) for span in collector.spans if span.trace_id == TRACE_ID}

    until(arrived, f"all spans of the trace; there are {collector.spans}", 20.0)
    spans = [span for span in collector.spans if span.trace_id == TRACE_ID]
    parts = [span for span in spans if span.name in ("chunk", "slice")]
    by_name = {(span.service, span.name): span for span in spans if span not in parts}
    assert len(by_name) + len(parts) == len(spans), "no other span twice"
    root = by_name["kvmesh-router", "router"]
    assert root.parent_id == PARENT_ID, "the client's trace goes on"
    ids = {span.span_id for span in spans}
    assert all(span.parent_id in ids for span in spans if span is not root), "one tree"
    for span in spans:
        assert root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns + 1_000_000
    prefill, transfer = by_name["kvmesh-context", "prefill"], by_name["kvmesh-generation", "transfer"]
    decode = by_name["kvmesh-generation", "decode"]
    assert prefill.end_ns <= transfer.start_ns <= transfer.end_ns <= decode.start_ns
    assert transfer.attributes["bytes"].int_value > 0
    assert transfer.attributes["pages"].int_value == 5 * len(WINDOWS)
    chunks = sorted((span for span in parts if span.name == "chunk"), key=lambda span: span.start_ns)
    within(chunks, prefill)
    assert [span.attributes["tokens"].int_value for span in chunks] == [CHUNK_TOKENS, CHUNK_TOKENS, 10]
    slices = sorted((span for span in parts if span.name == "slice"), key=lambda span: span.start_ns)
    within(slices, transfer)
    assert len(slices) == len(WINDOWS), "each layer group is a slice"
    # Who measures it names it: a slow bucket leads to this trace.
    for name, histogram in EXEMPLARS.items():
        _, page = request(f"{mesh[name].url}/metrics", headers={"Accept": "application/openmetrics-text"})
        marked = {line.partition("_bucket")[0] for line in page.decode().splitlines() if TRACE_ID in line}
        assert marked == {"kvmesh_http_request_seconds", histogram}
    # Another request without a trace of its own gets a new one.
    assert mesh["router"].post("/v1/completions", {**body, "prompt": "Twice"})[0] == 200
    others = {TRACE_ID}

    def another() -> bool:
        found = {(span.trace_id, span.service) for span in collector.spans if span.trace_id not in others}
        return len(found) == 3 and len({trace for trace, _ in found}) == 1

    until(another, "the second request's trace", 20.0)
