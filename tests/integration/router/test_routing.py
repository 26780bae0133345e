"""Which servers requests reach, how the router learns of them, and what it tells of its choices."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import zmq
import zmq.asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from waiting import until

from kvmesh.config import CoordinatorSettings
from kvmesh.coordinator.main import build as build_coordinator
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.service import serving
from kvmesh.protocol.match import ROUTED, MatchReply, MatchRequest, Routed, WorkerMatch
from kvmesh.router.http import HttpReply

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"model": "fake-model", "messages": MESSAGES, "max_tokens": 6}
Mesh = Callable[..., Any]


class FakeIndexer:
    """Says that each server holds what :attr:`held` says."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.salted: dict[str, dict[str, int]] = {}
        self.routed: list[Routed] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._serve, router)
                yield f"tcp://127.0.0.1:{port}"
                tasks.cancel_scope.cancel()
        finally:
            router.close()
            context.term()

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            identity, *told, frame = await router.recv_multipart()
            if told == [ROUTED]:
                self.routed.append(msgspec.msgpack.decode(frame, type=Routed))
                continue
            request = msgspec.msgpack.decode(frame, type=MatchRequest)
            held = self.held if request.cache_salt is None else self.salted.get(request.cache_salt, {})
            matches = [WorkerMatch(name, 0, tokens, tokens, tokens) for name, tokens in held.items()]
            await router.send_multipart([identity, msgspec.msgpack.encode(MatchReply(id=request.id, matches=matches))])


async def explained(m: Any, request_id: str) -> Any:
    status, body = await m.get(f"/explain/{request_id}")
    assert status == 200
    return body


async def matched(m: Any) -> None:
    """Return once the router's connection to the indexer is up."""
    answered = "match_answered_total"
    with anyio.fail_after(10):
        while not m.router.statistics()[answered]:
            await m.post("/v1/completions", {"model": "fake-model", "prompt": "x", "max_tokens": 1})


async def test_the_holders_of_a_prefix_are_chosen(mesh: Mesh) -> None:
    indexer = FakeIndexer()
    roles = {"c1": "context", "c2": "context", "c3": "context", "g1": "generation", "g2": "generation"}
    async with indexer.serving() as endpoint, mesh(roles, indexer_match_endpoint=endpoint, match_timeout_ms=5000) as m:
        await matched(m)
        indexer.held = {"c2": 128, "g2": 96}
        indexer.salted = {"tenant": {"c3": 128}}
        before = len(m["c2"].requests), len(m["c3"].requests)
        prompt = {"model": "fake-model", "prompt": "y" * 150, "max_tokens": 2}
        status, answer = await m.post("/v1/completions", prompt)
        assert status == 200
        assert len(m["c2"].requests) == before[0] + 1
        assert m["g2"].legs[-1] == "generation_only"
        await m.post("/v1/completions", {**prompt, "cache_salt": "tenant"})
        assert len(m["c3"].requests) == before[1] + 1, "only what was stored under the same salt counts"

        explanation = await explained(m, answer["id"])
        [sequence] = explanation["sequences"]
        assert sequence["match_state"] == "answered"
        assert sequence["matched_tokens"] == {"c2": 128, "g2": 96}
        [attempt] = sequence["attempts"]
        assert (attempt["context"]["chosen"], attempt["generation"]["chosen"]) == ("c2", "g2")
        terms = {entry["instance_id"]: entry["terms"]["credit_tokens"] for entry in attempt["context"]["candidates"]}
        assert terms == {"c1": 0, "c2": 128, "c3": 0}
        assert attempt["outcome"] == "done"


async def test_a_burst_of_equal_prompts_goes_to_one_server(mesh: Mesh) -> None:
    """The indexer holds nothing yet, and is told where each prompt goes."""
    indexer = FakeIndexer()
    roles = {**{f"c{number}": "context" for number in range(4)}, "g": "generation"}
    async with indexer.serving() as endpoint, mesh(roles, indexer_match_endpoint=endpoint, match_timeout_ms=5000) as m:
        await matched(m)
        before = {name: len(m[name].requests) for name in roles}
        body = {"model": "fake-model", "prompt": "z" * 200, "max_tokens": 2}

        async def ask() -> None:
            assert (await m.post("/v1/completions", body))[0] == 200

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask)
        asked = {name: len(m[name].requests) - before[name] for name in roles if name != "g"}
        assert sorted(asked.values()) == [0, 0, 0, 4]
        (holder,) = [name for name, count in asked.items() if count]
        told = [routed.instance_id for routed in indexer.routed if len(routed.token_ids) == 4 * 200]
        assert told.count(holder) == 4
        assert set(told) == {holder, "g"}, "the generation server tells no events, so it is predicted as well"


async def test_conditional_local_prefill(mesh: Mesh) -> None:
    indexer = FakeIndexer()
    async with (
        indexer.serving() as endpoint,
        mesh(
            indexer_match_endpoint=endpoint,
            match_timeout_ms=5000,
            max_local_prefill_length=32,
            index={"predicted_ttl_s": 0},  # what the indexer says is all that counts here
        ) as m,
    ):
        await matched(m)
        prefills = len(m["c"].requests)
        indexer.held = {"g": 128}
        prompt = {"model": "fake-model", "prompt": "y" * 150, "max_tokens": 2}
        assert (await m.post("/v1/completions", prompt))[0] == 200
        assert (m["g"].legs[-1], len(m["c"].requests)) == ("whole", prefills)
        indexer.held = {"g": 96}
        assert (await m.post("/v1/completions", prompt))[0] == 200
        assert (m["g"].legs[-1], len(m["c"].requests)) == ("generation_only", prefills + 1)


async def test_a_dead_indexer_disturbs_nothing(mesh: Mesh) -> None:
    async with mesh(indexer_match_endpoint="tcp://127.0.0.1:1", match_timeout_ms=60_000) as m:
        with anyio.fail_after(10):
            for _ in range(5):
                status, answer = await m.post("/v1/chat/completions", CHAT)
                assert status == 200
        explanation = await explained(m, answer["id"])
        assert explanation["sequences"][0]["match_state"] == "unreachable"


async def test_a_silent_indexer_costs_its_bound_and_then_nothing(mesh: Mesh) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, and never says a word
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        async with mesh(indexer_match_endpoint=endpoint, match_timeout_ms=20) as m:
            for _ in range(5):
                assert (await m.post("/v1/chat/completions", CHAT))[0] == 200


async def test_aggregated(mesh: Mesh) -> None:
    async with mesh({"b": "both"}) as m:
        status, answer = await m.post("/v1/chat/completions", CHAT)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "abcdef")
        assert m["b"].legs == ["whole"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 9


async def test_round_robin_takes_turns(mesh: Mesh) -> None:
    async with mesh({"b1": "both", "b2": "both"}, context_router={"type": "round_robin"}) as m:
        for _ in range(4):
            await m.post("/v1/chat/completions", CHAT)
        assert [len(m[name].requests) for name in ("b1", "b2")] == [2, 2]


async def test_conversations_stay(mesh: Mesh) -> None:
    async with mesh({f"b{number}": "both" for number in range(3)}, context_router={"type": "conversation"}) as m:
        for _ in range(3):
            await m.post("/v1/chat/completions", {**CHAT, "prompt_cache_key": "mine"})
        params = {"request_type": "context_and_generation", "conversation_id": "mine"}
        await m.post("/v1/chat/completions", {**CHAT, "disaggregated_params": params})
        assert sorted(len(worker.requests) for worker in m.workers.values()) == [0, 0, 4]


async def test_request_ids_and_trace_context(mesh: Mesh) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with mesh() as m:
        headers = {"X-Request-Id": "mine-1", "traceparent": trace, "tracestate": "a=b"}
        async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": True}, headers=headers) as response:
            assert response.headers["X-Request-Id"] == "mine-1"
            data = await response.read()
        assert b'"id":"chatcmpl-mine-1"' in data
        for worker in (m["c"], m["g"]):
            assert worker.headers[-1]["traceparent"] == trace
            assert worker.headers[-1]["tracestate"] == "a=b"
            assert worker.headers[-1]["X-Request-Id"] == "mine-1"
        assert m["c"].requests[-1]["request_id"] == "mine-1"
        assert (await explained(m, "mine-1"))["outcome"] == "done"
        await m.post("/v1/chat/completions", CHAT)
        made = {worker.headers[-1]["traceparent"] for worker in (m["c"], m["g"])}
        assert len(made) == 1, "both legs are one trace"


async def test_spans_of_a_request_are_one_trace(mesh: Mesh) -> None:
    exporter = InMemorySpanExporter()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with mesh(exporter=exporter) as m:
        await m.post("/v1/chat/completions", CHAT, {"traceparent": trace})
        sent = {worker.headers[-1]["traceparent"] for worker in (m["c"], m["g"])}
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"router", "queue", "tokenize", "match"}
    assert {span.context.trace_id for span in spans.values()} == {0x0AF7651916CD43DD8448EB211C80319C}
    root = spans["router"]
    assert root.parent.span_id == 0xB7AD6B7169203331
    assert {span.parent.span_id for name, span in spans.items() if name != "router"} == {root.context.span_id}
    assert sent == {f"00-{root.context.trace_id:032x}-{root.context.span_id:016x}-01"}


async def test_two_requests_with_one_id_do_not_meet(mesh: Mesh) -> None:
    async with mesh() as m:
        release = anyio.Event()

        async def hold(_body: Any) -> None:
            await release.wait()

        m["c"].before = hold
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(m.post, "/v1/chat/completions", {**CHAT, "request_id": "same"})
            await until(lambda: len(m["c"].requests) == 2)
            release.set()
        names = [body["request_id"] for body in m["c"].requests]
        assert len(set(names)) == 2
        assert all(name.startswith("same") for name in names)


async def test_what_cannot_fit_is_refused_before_the_indexer_is_asked(mesh: Mesh, monkeypatch: Any) -> None:
    async with mesh() as m:
        asked: list[int] = []
        matcher = m.router._pipeline._matcher
        ask = matcher.match

        async def match(model: str, ids: Any, **scope: Any) -> Any:
            asked.append(len(ids))
            return await ask(model, ids, **scope)

        monkeypatch.setattr(matcher, "match", match)
        body = {"model": "fake-model", "max_tokens": 1}
        for prompt in ("x" * 257, [1] * 257, ["fine", "x" * 257]):
            status, answer = await m.post("/v1/completions", {**body, "prompt": prompt})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert asked == []
        assert (await m.post("/v1/completions", {**body, "prompt": ["a", "bc"]}))[0] == 200
        assert asked == [1, 2]


async def test_tokenize_and_detokenize(mesh: Mesh) -> None:
    async with mesh() as m:
        status, body = await m.post("/tokenize", {"prompt": "AB", "return_token_strs": True})
        assert (status, body) == (
            200,
            {"count": 2, "max_model_len": 256, "tokens": [33, 34], "token_strs": ["A", "B"]},
        )
        status, body = await m.post("/tokenize", {"model": "fake-model", "messages": MESSAGES})
        assert body["count"] == len("<user>hello<assistant>")
        assert await m.post("/detokenize", {"tokens": [33, 34]}) == (200, {"prompt": "AB"})
        assert (await m.post("/detokenize", {"tokens": [1000]}))[0] == 400
        assert (await m.post("/tokenize", {}))[0] == 400
        assert (await m.post("/tokenize", {"model": "other", "prompt": "x"}))[0] == 404


async def test_information(mesh: Mesh) -> None:
    async with mesh() as m:
        await m.post("/v1/chat/completions", CHAT)
        status, info = await m.get("/cluster_info")
        assert (status, info["is_ready"]) == (200, True)
        assert info["current_workers"]["context_servers"] == [m["c"].url]
        status, records = await m.get("/perf_metrics")
        [record] = records
        assert (record["ctx_server"], record["gen_server"], record["outcome"]) == ("c", "g", "done")
        assert record["ctx_perf_metrics"]["kind"] == "context"
        assert record["gen_perf_metrics"]["kind"] == "generation"
        assert (await m.get("/perf_metrics"))[1] == []
        assert (await m.get("/openapi.json"))[1]["openapi"] == "3.1.0"
        assert (await m.get("/ready"))[0] == (await m.get("/health"))[0] == 200
        assert "version" in (await m.get("/version"))[1]
        assert (await m.get("/explain/nobody"))[0] == 404
        for path in ("/metrics", "/prometheus/metrics"):
            async with m.http.get(path) as response:
                text = await response.text()
            assert 'kvmesh_router_requests_total{api="chat",outcome="ok"} 1.0' in text
            assert "kvmesh_router_sequences_disaggregated_total 1.0" in text
        status, body = await m.post("/v1/embeddings", {})
        assert (status, body["error"]["code"]) == (404, "not_found")


async def test_body_over_the_limit(mesh: Mesh) -> None:
    async with mesh(max_body_bytes=1000) as m:
        status, body = await m.post("/v1/completions", {"model": "fake-model", "prompt": "x" * 1000})
        assert (status, body["error"]["code"]) == (413, "too_large")


async def test_events_are_sent_without_delay(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    nodelay: list[int] = []
    write = HttpReply.write

    async def spy(reply: HttpReply, data: bytes) -> None:
        client = reply._request.transport.get_extra_info("socket")
        nodelay.append(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await write(reply, data)

    monkeypatch.setattr(HttpReply, "write", spy)
    async with mesh() as m, m.http.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        await response.read()
    assert nodelay
    assert all(nodelay)


async def test_static_servers(mesh: Mesh) -> None:
    async with mesh() as outer:
        urls = {"context_servers": [outer["c"].url], "generation_servers": [outer["g"].url]}
        async with mesh({}, **urls) as m:
            assert (await m.get("/ready"))[0] == 200
            assert (await m.post("/v1/chat/completions", CHAT))[0] == 200
        assert outer["g"].legs == ["generation_only"]


@pytest.fixture
async def coordinator_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def test_servers_from_the_coordinator_which_may_die(mesh: Mesh, coordinator_port: int) -> None:
    url = f"http://127.0.0.1:{coordinator_port}"
    async with mesh() as outer, anyio.create_task_group() as tasks:
        async with serving(build_coordinator(CoordinatorSettings()), port=coordinator_port):
            clients = []
            for worker in outer.workers.values():
                client = CoordinatorClient(url, watch=False)
                await client.start(tasks)
                client.announce(worker.member())
                clients.append(client)
            async with mesh({}, coordinator_url=url) as m:
                await until(lambda: m.router.parts.cluster.ready("fake-model"))
                assert (await m.post("/v1/chat/completions", CHAT))[0] == 200
                await until(lambda: m.router.statistics()["members"] == 3)
        async with mesh({}, coordinator_url=url) as alone:
            assert (await alone.get("/ready"))[0] == 503, "a router that starts without a coordinator waits for it"
        tasks.cancel_scope.cancel()


async def test_the_coordinators_death_disturbs_no_request(mesh: Mesh, coordinator_port: int) -> None:
    url = f"http://127.0.0.1:{coordinator_port}"
    async with mesh() as outer, anyio.create_task_group() as tasks:
        async with mesh({}, coordinator_url=url) as m:
            async with serving(build_coordinator(CoordinatorSettings()), port=coordinator_port):
                for worker in outer.workers.values():
                    client = CoordinatorClient(url, watch=False)
                    await client.start(tasks)
                    client.announce(worker.member())
                await until(lambda: m.router.parts.cluster.ready("fake-model"))
            for _ in range(3):
                assert (await m.post("/v1/chat/completions", CHAT))[0] == 200
            assert (await m.get("/ready"))[0] == 200
        tasks.cancel_scope.cancel()


RETENTION = {
    "token_range_retention_configs": [{"token_start": 0, "token_end": 32, "priority": 90, "duration_ms": 500}],
    "decode_retention_priority": 5,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_a_request_says_about_the_cache_reaches_both_legs(mesh: Mesh, path: str) -> None:
    """§3.1, §5.1, §5.2: retention and salt unchanged, the conversation's id stripped."""
    said = {
        "kv_cache_retention_config": RETENTION,
        "cache_salt": "tenant",
        "conversation_params": {"conversation_id": " chat-1 "},
    }
    prompt = {"model": "fake-model", "prompt": "x" * 40, "max_tokens": 4}
    async with mesh() as m:
        status, _ = await m.post(path, {**(CHAT if "chat" in path else prompt), **said})
        assert status == 200
        assert (m["c"].legs, m["g"].legs) == (["context_only"], ["generation_only"])
        for leg in (m["c"].requests[0], m["g"].requests[0]):
            assert leg["kv_cache_retention_config"] == RETENTION
            assert leg["cache_salt"] == "tenant"
            assert leg["disaggregated_params"]["conversation_id"] == "chat-1"


async def test_a_conversation_goes_on_in_one_choice(mesh: Mesh) -> None:
    async with mesh({"w": "both"}) as m:
        status, _ = await m.post(
            "/v1/completions",
            {
                "model": "fake-model",
                "prompt": "xyz",
                "n": 3,
                "max_tokens": 2,
                "conversation_params": {"conversation_id": "a"},
            },
        )
        assert status == 200
        named = [leg.get("disaggregated_params", {}).get("conversation_id") for leg in m["w"].requests]
        assert sorted(named, key=str) == [None, None, "a"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_cache_retention_config", {"decode_retention_priority": 101}),
        ("kv_cache_retention_config", {"transfer_mode": "GDS"}),
        ("conversation_params", "chat-1"),
        ("cache_salt", 5),
    ],
)
async def test_what_is_wrong_with_it_reaches_nobody(mesh: Mesh, field: str, value: Any) -> None:
    async with mesh() as m:
        status, answer = await m.post("/v1/chat/completions", {**CHAT, field: value})
        assert status == 400
        assert answer["error"]["param"].startswith(field)
        assert not m["c"].requests
