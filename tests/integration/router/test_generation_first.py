"""§5.3: both legs of a request at once, over fake workers: who waits for whom, and what ends what."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from waiting import until

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.openai.sse import DONE
from kvmesh.router.breaker import FAILURES_TO_OPEN

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"model": "fake-model", "messages": MESSAGES, "max_tokens": 6}
USAGE = {"stream_options": {"include_usage": True}}
ADDRESS = base64.b64encode(b"signed address").decode()
Mesh = Callable[..., Any]


@pytest.fixture
def early(mesh: Mesh) -> Mesh:
    """``async with early() as m``: generation first, between servers that say where to ask for pages."""

    @asynccontextmanager
    async def start(roles: Any = None, **settings: Any) -> AsyncIterator[Any]:
        async with mesh(roles, schedule_style="generation_first", **settings) as m:
            for worker in m.workers.values():
                if worker.role == "context":
                    m.tell("updated", worker, ctx_addresses=[ADDRESS], ctx_info_endpoint="tcp://context:1")
            yield m

    return start


class Rendezvous:
    """The context leg answers when the generation leg has come, as a context server does."""

    def __init__(self, m: Any) -> None:
        self.came = anyio.Event()
        self.go_on = anyio.Event()
        m["c"].before = self._context
        m["g"].before = self._generation

    async def _context(self, _body: Any) -> None:
        with anyio.fail_after(10):
            await self.came.wait()
            await self.go_on.wait()

    async def _generation(self, _body: Any) -> None:
        self.came.set()
        with anyio.fail_after(10):
            await self.go_on.wait()


async def sse(response: aiohttp.ClientResponse) -> list[Any]:
    data = b"".join([part async for part in response.content.iter_any()])
    assert data.endswith(DONE), data
    return [json.loads(event[6:]) for event in data.split(b"\n\n")[:-2]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_both_legs_run_at_once(early: Mesh, stream: bool) -> None:
    """The context server's answer waits for the generation leg: who awaited it first would wait for ever."""
    async with early() as m:
        meeting = Rendezvous(m)
        meeting.go_on.set()
        body = {**CHAT, "stream": stream, **(USAGE if stream else {})}
        async with m.http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200
            if stream:
                events = await sse(response)
                text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
                usage = events[-1]["usage"]
            else:
                answer = await response.json()
                text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
        assert text == "abcdef"
        # T21: cached tokens are the context server's.
        assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (6, 9)
        [context], [generation] = m["c"].requests, m["g"].requests
        early_params, late_params = context["disaggregated_params"], generation["disaggregated_params"]
        transfer_id = early_params["disagg_request_id"]
        assert early_params == {"request_type": "context_only", "disagg_request_id": transfer_id, "schedule_style": 1}
        assert late_params == {
            "request_type": "generation_only",
            "disagg_request_id": transfer_id,
            "ctx_request_id": transfer_id,
            "ctx_info_endpoint": "tcp://context:1",
            "encoded_opaque_state": ADDRESS,
            "schedule_style": 1,
        }
        assert context["prompt_token_ids"] == generation["prompt_token_ids"]
        assert context["seed"] == generation["seed"]
        assert (context.get("stream"), bool(generation.get("stream"))) == (None, stream)
        assert m["c"].aborts == []
        await until(m.idle)
        assert m.router.statistics()["sequences_generation_first_total"] == 1


async def test_the_generation_answer_flows_before_the_context_leg_is_over(early: Mesh) -> None:
    async with early() as m:
        release = anyio.Event()
        m["c"].before = lambda _body: release.wait()

        async def hold(number: int) -> None:
            if number == 4:
                await release.wait()

        m["g"].after = hold
        async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": True, **USAGE}) as response:
            seen = b""
            with anyio.fail_after(10):
                while b'"content":"e"' not in seen:
                    seen += await response.content.readany()
            release.set()
            rest = b"".join([part async for part in response.content.iter_any()])
        assert (seen + rest).endswith(DONE)
        # The usage chunk waited for the context server's count.
        assert json.loads((seen + rest).split(b"\n\n")[-3][6:])["usage"]["prompt_tokens_details"]["cached_tokens"] == 9
        await until(m.idle)


async def test_one_token_needs_no_generation_server(early: Mesh) -> None:
    async with early() as m:
        status, answer = await m.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "a")
        assert m["g"].requests == []
        assert m["c"].requests[0]["disaggregated_params"].get("schedule_style", 0) == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_that_ends_with_its_first_token_is_given_once(early: Mesh, stream: bool) -> None:
    """Both servers say so; the generation server's words are the client's."""
    async with early() as m:
        m["c"].finish_context = "stop"
        m["c"].answer = m["g"].answer = "a"
        async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
            assert response.status == 200
            if stream:
                events = await sse(response)
                assert [event["choices"][0]["delta"].get("content") for event in events] in (["", "a"], ["a"])
            else:
                assert (await response.json())["choices"][0]["message"]["content"] == "a"
        assert m["c"].aborts == []


async def test_n_choices_each_run_both_legs(early: Mesh) -> None:
    async with early() as m:
        status, answer = await m.post("/v1/chat/completions", {**CHAT, "n": 3})
        assert status == 200
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["abcdef"] * 3
        ids = [body["disaggregated_params"]["disagg_request_id"] for body in m["c"].requests]
        assert len(set(ids)) == 3
        assert sorted(ids) == sorted(body["disaggregated_params"]["ctx_request_id"] for body in m["g"].requests)
        await until(m.idle)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ending", ["fails", "is late"])
async def test_siblings_do_not_wait_for_a_context_leg_whose_answer_is_not_needed(
    early: Mesh, monkeypatch: pytest.MonkeyPatch, stream: bool, ending: str
) -> None:
    """The first choice is generated, so the prompt's pages are there: whether its context leg ever answers or not."""
    monkeypatch.setattr("kvmesh.router.generation_first.USAGE_WAIT_S", 0.01)
    async with early() as m:
        generated = anyio.Event()

        async def first_answers_badly(_body: Any) -> None:
            if len(m["c"].requests) > 1:
                return
            await generated.wait()
            if ending == "fails":
                raise ApiError(500, "gone", code="engine_dead")
            await anyio.sleep_forever()

        async def tell_the_end(number: int) -> None:
            if not stream or number >= 5:
                generated.set()

        m["c"].before = first_answers_badly
        m["g"].after = tell_the_end
        if not stream:
            m["g"].before = lambda _body: tell_the_end(5)
        with anyio.fail_after(10):
            async with m.http.post("/v1/chat/completions", json={**CHAT, "n": 3, "stream": stream}) as response:
                text = await response.text()
        assert response.status == 200, text
        assert "error" not in text
        await until(m.idle)


async def test_a_context_server_without_an_address_is_served_context_first(early: Mesh) -> None:
    async with early() as m:
        m.tell("updated", m["c"])
        status, _ = await m.post("/v1/chat/completions", CHAT)
        assert status == 200
        assert m["g"].requests[0]["disaggregated_params"]["first_gen_tokens"] == [65]


async def test_a_rank_of_the_context_server_is_ordered(early: Mesh) -> None:
    """Attention data parallelism: the generation leg names the engine, so the context leg must go there."""
    addresses = [base64.b64encode(f"rank {rank}".encode()).decode() for rank in range(3)]
    async with early() as m:
        m.tell("updated", m["c"], ctx_addresses=addresses, ctx_info_endpoint="tcp://context:1", dp_size=3)
        for _ in range(6):
            assert (await m.post("/v1/chat/completions", CHAT))[0] == 200
        for context, generation in zip(m["c"].requests, m["g"].requests, strict=True):
            rank = context["disaggregated_params"]["ctx_dp_rank"]
            assert generation["disaggregated_params"]["ctx_dp_rank"] == rank
            assert generation["disaggregated_params"]["encoded_opaque_state"] == addresses[rank]


# Failures.


def failing(status: int, code: str) -> Callable[[Any], Awaitable[None]]:
    async def fail(_body: Any) -> None:
        raise ApiError(status, f"it is {code}", code=code)

    return fail


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failing_context_leg_ends_the_generation_leg_at_once(early: Mesh, stream: bool) -> None:
    async with early(max_retries=0) as m:
        arrived = anyio.Event()

        async def hang(_body: Any) -> None:
            arrived.set()
            await anyio.sleep_forever()

        async def fail(_body: Any) -> None:
            await arrived.wait()
            raise ApiError(500, "the model failed", code="model_error")

        m["g"].before, m["c"].before = hang, fail
        with anyio.fail_after(10):
            status, answer = await m.post("/v1/chat/completions", {**CHAT, "stream": stream})
            assert (status, answer["error"]["code"]) == (500, "model_error")
            await m["g"].left.wait()
        await until(m.idle)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failing_generation_leg_aborts_the_context_leg(early: Mesh, stream: bool) -> None:
    async with early(max_retries=0) as m:
        arrived = anyio.Event()

        async def hang(_body: Any) -> None:
            arrived.set()
            await anyio.sleep_forever()

        async def fail(_body: Any) -> None:
            await arrived.wait()
            raise ApiError(503, "no seats", code="busy")

        m["c"].before, m["g"].before = hang, fail
        with anyio.fail_after(10):
            status, answer = await m.post("/v1/chat/completions", {**CHAT, "stream": stream})
            assert (status, answer["error"]["code"]) == (503, "busy")
            await m["c"].left.wait()
        await until(lambda: len(m["c"].aborts) == 1)
        assert m["c"].aborts == [m["c"].requests[0]["disaggregated_params"]["disagg_request_id"]]
        await until(m.idle)


@pytest.mark.parametrize(
    ("context", "generation", "told"),
    [
        ((400, "context_length_exceeded"), (400, "context_length_exceeded"), (400, "context_length_exceeded")),
        ((500, "model_error"), (503, "kv_transfer_cancelled"), (500, "model_error")),
        ((400, "no_such_rank"), (503, "kv_transfer_cancelled"), (503, "no_such_rank")),
        ((503, "kv_transfer_cancelled"), (500, "model_error"), (500, "model_error")),
        ((503, "peer_dead"), (503, "kv_transfer_cancelled"), (503, "kv_transfer_cancelled")),
    ],
    ids=str,
)
async def test_the_client_hears_the_cause(
    early: Mesh, context: tuple[int, str], generation: tuple[int, str], told: tuple[int, str]
) -> None:
    """Of two failing legs the one that failed because of the other is not the one to tell of."""
    async with early(max_retries=0) as m:
        m["c"].before, m["g"].before = failing(*context), failing(*generation)
        status, answer = await m.post("/v1/chat/completions", CHAT)
        assert (status, answer["error"]["code"]) == told


@pytest.mark.parametrize("when", ["before it begins", "whole", "in the stream"])
async def test_the_generation_server_is_not_blamed_for_the_context_servers_failure(early: Mesh, when: str) -> None:
    """Else one sick context server would take all generation servers out, one after the other."""
    async with early(max_retries=0) as m:
        fail = failing(502, "transfer_failed")
        if when == "in the stream":

            async def fail_later(number: int) -> None:
                if number == 2:
                    await fail(None)

            m["g"].after = fail_later
        else:
            m["c"].before, m["g"].before = failing(503, "engine_dead"), fail
        for _ in range(FAILURES_TO_OPEN + 1):
            body = {**CHAT, "stream": when != "whole"}
            async with m.http.post("/v1/chat/completions", json=body) as response:
                assert "error" in await response.text()
        assert all(server.breaker.closed for server in m.router.parts.cluster.servers())
        # What it breaks by itself counts.
        m["c"].before, m["g"].before, m["g"].after = None, failing(502, "upstream_broken"), None
        for _ in range(FAILURES_TO_OPEN):
            assert (await m.post("/v1/chat/completions", CHAT))[0] == 502
        assert not m.router.parts.cluster.get("g").breaker.closed


async def test_a_retry_takes_a_new_id(early: Mesh) -> None:
    async with early({"c": "context", "g1": "generation", "g2": "generation"}) as m:
        failed: list[str] = []

        def once(name: str) -> Callable[[Any], Awaitable[None]]:
            async def fail(_body: Any) -> None:
                if not failed:
                    failed.append(name)
                    raise ApiError(503, "no seats", code="busy")

            return fail

        for name in ("g1", "g2"):
            m[name].before = once(name)
        status, answer = await m.post("/v1/chat/completions", CHAT)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "abcdef")
        first, second = [body["disaggregated_params"]["disagg_request_id"] for body in m["c"].requests]
        assert first != second
        await until(lambda: m["c"].aborts == [first])
        [good] = m[{"g1": "g2", "g2": "g1"}[failed[0]]].requests
        assert good["disaggregated_params"]["ctx_request_id"] == second
        await until(m.idle)


@pytest.mark.parametrize("dead", ["c1", "g1"])
async def test_a_server_that_cannot_be_reached_costs_no_retry(early: Mesh, dead: str) -> None:
    roles = {"c1": "context", "c2": "context", "g1": "generation", "g2": "generation"}
    async with early(roles, max_retries=0) as m:
        await m[dead].kill()
        for _ in range(2):
            status, _ = await m.post("/v1/chat/completions", CHAT)
            assert status == 200
        await until(m.idle)


async def test_the_client_leaves(early: Mesh) -> None:
    async with early() as m:
        Rendezvous(m)  # and nobody goes on
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(m.post, "/v1/chat/completions", CHAT)
            await until(lambda: len(m["c"].requests) == len(m["g"].requests) == 1)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            await m["c"].left.wait()
            await m["g"].left.wait()
        await until(lambda: len(m["c"].aborts) == 1)
        await until(m.idle)


async def test_a_context_leg_that_breaks_off_after_the_stream_has_begun_does_no_harm(early: Mesh) -> None:
    """What it had to give has arrived."""
    async with early() as m:
        release = anyio.Event()

        async def die(_body: Any) -> None:
            await release.wait()
            raise ApiError(500, "gone", code="engine_dead")

        m["c"].before = die
        async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            seen = b""
            with anyio.fail_after(10):
                while b'"content":"b"' not in seen:
                    seen += await response.content.readany()
            release.set()
            seen += b"".join([part async for part in response.content.iter_any()])
        assert seen.endswith(DONE)
        assert b"error" not in seen
        await until(m.idle)


async def test_explanation_and_trace_show_both_legs(early: Mesh) -> None:
    exporter = InMemorySpanExporter()
    async with early(exporter=exporter) as m:
        status, answer = await m.post("/v1/chat/completions", CHAT)
        assert status == 200
        _, explained = await m.get(f"/explain/{answer['id']}")
        [attempt] = explained["sequences"][0]["attempts"]
        assert (attempt["generation_first"], attempt["outcome"]) == (True, "done")
        assert (attempt["context"]["chosen"], attempt["generation"]["chosen"]) == ("c", "g")
        assert attempt["transfer_id"] == m["c"].requests[0]["disaggregated_params"]["disagg_request_id"]
        parents = {m[name].headers[0]["traceparent"] for name in ("c", "g")}
    assert len(parents) == 1
    [span] = [span for span in exporter.get_finished_spans() if span.name == "router"]
    assert parents.pop().split("-")[1:3] == [f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"]
