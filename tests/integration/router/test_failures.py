"""Servers that die, clients that leave, and what the others see of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import openai
import pytest
from waiting import until

from kvmesh.net.faults import injected
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.members import Load
from kvmesh.protocol.openai.sse import DONE

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"model": "fake-model", "messages": MESSAGES, "max_tokens": 6}
Mesh = Callable[..., Any]


async def events_of(response: aiohttp.ClientResponse) -> bytes:
    return b"".join([data async for data in response.content.iter_any()])


async def test_events_are_relayed_as_they_come(mesh: Mesh) -> None:
    async with mesh() as m:
        go_on = anyio.Event()

        async def hold(number: int) -> None:
            if number == 2:
                await go_on.wait()

        m["g"].after = hold
        async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            seen = b""
            with anyio.fail_after(10):
                while b'"content":"c"' not in seen:
                    seen += await response.content.readany()
            assert b'"content":"d"' not in seen
            go_on.set()
            rest = await events_of(response)
        assert rest.endswith(DONE)


async def test_client_leaves_during_prefill(mesh: Mesh) -> None:
    async with mesh() as m:
        arrived = anyio.Event()

        async def hang(_body: Any) -> None:
            arrived.set()
            await anyio.sleep_forever()

        m["c"].before = hang
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(m.post, "/v1/chat/completions", CHAT)
            await arrived.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(5):
            await m["c"].left.wait()
        await until(m.idle)
        await until(lambda: len(m["c"].aborts) == 1)  # its answer may have been under way
        assert m["g"].requests == []


async def test_client_leaves_between_the_legs(mesh: Mesh) -> None:
    async with mesh() as m:
        with injected("router.between_legs", _raise_reset):
            with pytest.raises(aiohttp.ClientError):
                await m.post("/v1/chat/completions", CHAT)
            await until(lambda: len(m["c"].aborts) == 1)
        assert m["c"].aborts == [m["c"].requests[0]["disaggregated_params"]["disagg_request_id"]]
        assert m["g"].requests == []
        await until(m.idle)


def _raise_reset() -> None:
    raise ConnectionResetError("the client left")


@pytest.mark.parametrize("n", [1, 3])
async def test_client_leaves_during_decode(mesh: Mesh, n: int) -> None:
    async with mesh() as m:

        async def hang(number: int) -> None:
            if number == 1:
                await anyio.sleep_forever()

        m["g"].after = hang
        response = await m.http.post("/v1/chat/completions", json={**CHAT, "stream": True, "n": n})
        with anyio.fail_after(10):
            await response.content.readany()
            await until(lambda: len(m["g"].requests) == n)
            response.close()
            await until(lambda: m["g"].disconnects == n)
        await until(lambda: len(m["c"].aborts) == n)
        await until(m.idle)


async def test_client_leaves_while_it_waits_for_a_place(mesh: Mesh) -> None:
    async with mesh(max_inflight=1) as m:
        release = anyio.Event()

        async def hold(_body: Any) -> None:
            await release.wait()

        m["c"].before = hold
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(m.post, "/v1/chat/completions", CHAT)
            await until(lambda: len(m["c"].requests) == 1)
            with anyio.move_on_after(0.05):
                await m.post("/v1/chat/completions", CHAT)
            await until(lambda: m.router.parts.admission.queued == 0)
            release.set()
        assert len(m["c"].requests) == 1


async def test_full_queue_is_429_with_retry_after(mesh: Mesh) -> None:
    async with mesh(max_inflight=1) as m:
        release = anyio.Event()

        async def hold(_body: Any) -> None:
            await release.wait()

        m["c"].before = hold
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(m.post, "/v1/chat/completions", CHAT)
            await until(lambda: m.router.parts.admission.queued == 1)
            async with m.http.post("/v1/chat/completions", json=CHAT) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "over_capacity"
            release.set()


async def test_server_dies_in_mid_stream(mesh: Mesh) -> None:
    async with mesh() as m:

        async def die(number: int) -> None:
            if number == 2:
                await m["g"].kill()

        m["g"].after = die
        async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            assert response.status == 200
            data = await events_of(response)
        *_, last = data.split(b"\n\n")[:-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_broken"
        assert b"[DONE]" not in data
        assert b'"finish_reason":"length"' not in data
        await until(m.idle)
        await until(lambda: len(m["c"].aborts) == 1)


async def test_the_openai_client_raises_when_the_stream_fails(mesh: Mesh) -> None:
    async with mesh() as m:

        async def fail(number: int) -> None:
            if number == 2:
                raise ApiError(500, "the engine died", type="server_error", code="engine_dead")

        m["g"].after = fail
        stream = await m.openai.chat.completions.create(**CHAT, stream=True)
        texts: list[str] = []

        async def collect() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="the engine died"):
            await collect()
        assert "".join(texts) == "abc"


async def test_n_choices_fail_together(mesh: Mesh) -> None:
    async with mesh() as m:

        async def fail(number: int) -> None:
            if number == 2 and len(m["g"].requests) == 3:
                raise ApiError(500, "boom", type="server_error", code="boom")
            if number == 3:
                await anyio.sleep_forever()

        m["g"].after = fail
        async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": True, "n": 3}) as response:
            data = await events_of(response)
        assert data.count(b'"code":"boom"') == 1
        assert b"[DONE]" not in data
        await until(m.idle)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dead", ["c1", "g1"])
async def test_unreachable_servers_are_passed_over(mesh: Mesh, stream: bool, dead: str) -> None:
    roles = {"c1": "context", "c2": "context", "g1": "generation", "g2": "generation"}
    async with mesh(roles, max_retries=0) as m:
        await m[dead].kill()
        for _ in range(4):
            answer = await m.openai.chat.completions.create(**CHAT, stream=stream)
            if stream:
                assert [chunk async for chunk in answer][-1].choices[0].finish_reason == "length"
            else:
                assert answer.choices[0].message.content == "abcdef"
        info = {server["instance_id"]: server["usable"] for server in m.router.parts.cluster.info()["servers"]}
        assert info == {"c1": dead != "c1", "c2": True, "g1": dead != "g1", "g2": True}
        prefills = len(m["c2"].requests) + len(m["c1"].requests)
        assert prefills == 4, "an unused hand-off is good for another server"


async def test_a_server_that_comes_back_is_used_again(mesh: Mesh) -> None:
    async with mesh({"b": "both"}) as m:
        await m["b"].kill()
        status, body = await m.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (503, "unreachable")
        status, body = await m.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (503, "no_server_available")
        assert (await m.get("/ready"))[0] == 503
        await m["b"].start(m["b"].port)
        await until(lambda: m.router.parts.cluster.ready("fake-model"))
        assert (await m.post("/v1/chat/completions", CHAT))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("worker", "leg"), [("c1", "context_only"), ("g1", "generation_only")])
async def test_a_server_that_dies_before_it_answers_is_replaced(
    mesh: Mesh, stream: bool, worker: str, leg: str
) -> None:
    roles = {"c1": "context", "g1": "generation"}
    async with mesh(roles) as m:

        async def die(_body: Any) -> None:
            await m[worker].kill()

        m[worker].before = die
        spare = type(m[worker])(worker[0] + "2", roles[worker])
        await m.join(spare, load=Load(running=50))  # the doomed one is the cheaper choice
        answer = await m.openai.chat.completions.create(**CHAT, stream=stream)
        if stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        else:
            text = answer.choices[0].message.content
        assert text == "abcdef"
        assert m[worker].legs == [leg]
        assert spare.legs == [leg]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_server_that_is_over_is_not_tried_again(mesh: Mesh, stream: bool) -> None:
    """It still answers, but generation servers know that its pages are gone; the other one costs more."""
    async with mesh({"c1": "context", "g1": "generation", "g2": "generation"}) as m:
        spare = type(m["c1"])("c2", "context")
        await m.join(spare, load=Load(running=50))

        async def refuse(_body: Any) -> None:
            if not spare.requests:
                raise ApiError(503, "c1#1 ended before it was asked", code="peer_dead")

        m["g1"].before = m["g2"].before = refuse
        answer = await m.openai.chat.completions.create(**CHAT, stream=stream)
        if stream:
            assert [chunk async for chunk in answer][-1].choices[0].finish_reason == "length"
        else:
            assert answer.choices[0].message.content == "abcdef"
        assert (len(m["c1"].requests), len(spare.requests)) == (1, 1)


@pytest.mark.parametrize("news", ["dead", "a new life"])
async def test_nobody_waits_for_a_server_that_is_taken_for_dead(mesh: Mesh, news: str) -> None:
    """It stands still: its connections stay open, and no answer comes."""
    async with mesh({"c1": "context", "g": "generation"}) as m:
        waits = anyio.Event()

        async def stand_still(_body: Any) -> None:
            waits.set()
            await anyio.sleep_forever()

        m["c1"].before = stand_still
        spare = type(m["c1"])("c2", "context")
        await m.join(spare, load=Load(running=50))
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await m.post("/v1/chat/completions", CHAT))[0])

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await waits.wait()
                if news == "dead":
                    m.tell("dead", m["c1"])
                else:
                    m.tell("updated", m["c1"], epoch=99, draining=True)
        assert statuses == [200]
        assert (len(m["c1"].requests), len(spare.requests)) == (1, 1)


async def test_a_poisonous_request_does_not_go_through_all_servers(mesh: Mesh) -> None:
    names = [f"b{number}" for number in range(5)]
    async with mesh(dict.fromkeys(names, "both"), max_retries=1) as m:
        for name in names:

            async def die(_body: Any, name: str = name) -> None:
                await m[name].kill()

            m[name].before = die
        status, body = await m.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (502, "upstream_broken")
        assert sum(len(m[name].requests) for name in names) == 2


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (403, 1), (429, 2), (500, 2), (503, 2), (504, 1)])
async def test_statuses_of_the_only_leg(mesh: Mesh, status: int, tries: int) -> None:
    async with mesh({"b1": "both", "b2": "both"}) as m:

        async def fail(_body: Any) -> None:
            raise ApiError(status, "sorry", type="t", code="c", param="p")

        m["b1"].before = m["b2"].before = fail
        async with m.http.post("/v1/chat/completions", json=CHAT) as response:
            assert response.status == status
            assert (await response.json())["error"] == {"message": "sorry", "type": "t", "code": "c", "param": "p"}
            assert ("Retry-After" in response.headers) == (status in (429, 503))
        assert len(m["b1"].requests) + len(m["b2"].requests) == tries


async def test_a_refused_hand_off_is_not_the_clients_fault(mesh: Mesh) -> None:
    async with mesh() as m:

        async def forged(_body: Any) -> None:
            raise ApiError(403, "the ticket is forged", code="forged_ticket")

        m["g"].before = forged
        status, body = await m.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (502, "forged_ticket")
        await until(lambda: len(m["c"].aborts) == 2)  # one for each try


async def test_deadline_before_and_in_the_stream(mesh: Mesh) -> None:
    async with mesh(request_timeout_s=0.3) as m:

        async def hang(number: int) -> None:
            if number == 1:
                await anyio.sleep_forever()

        m["g"].after = hang
        async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            data = await events_of(response)
        assert b'"code":"request_timeout"' in data
        assert b"[DONE]" not in data

        async def hang_before(_body: Any) -> None:
            await anyio.sleep_forever()

        m["c"].before = hang_before
        status, body = await m.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (504, "request_timeout")
        await until(m.idle)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_hangs_is_taken_out(mesh: Mesh, stream: bool) -> None:
    async with mesh({"b1": "both"}, request_timeout_s=0.2) as m:
        m["b1"].healthy = False

        async def hang(number: int) -> None:
            await anyio.sleep_forever()

        m["b1"].after = hang
        for failures in range(3):
            assert m.router.parts.cluster.get("b1").unusable() is None, failures
            async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
                assert b"request_timeout" in await response.read()
        assert m.router.parts.cluster.get("b1").unusable() == "not answering"


async def test_a_client_that_leaves_says_nothing_about_the_server(mesh: Mesh) -> None:
    async with mesh({"b1": "both"}, request_timeout_s=20) as m:

        async def hang(_body: Any) -> None:
            await anyio.sleep_forever()

        m["b1"].before = hang
        for number in range(4):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(m.post, "/v1/chat/completions", CHAT)
                await until(lambda number=number: len(m["b1"].requests) == number + 1)
                tasks.cancel_scope.cancel()
            await until(m.idle)
        assert m.router.parts.cluster.get("b1").unusable() is None


@pytest.mark.parametrize(("status", "aborts"), [(400, 0), (429, 0), (500, 1), (503, 1), (504, 1)])
async def test_a_context_server_that_failed_is_told_not_to_keep_the_pages(mesh: Mesh, status: int, aborts: int) -> None:
    async with mesh(max_retries=0) as m:

        async def fail(_body: Any) -> None:
            raise ApiError(status, "sorry")

        m["c"].before = fail
        assert (await m.post("/v1/chat/completions", CHAT))[0] == status
        assert m.router.statistics()["aborted_hand_offs_total"] == aborts
        await until(lambda: len(m["c"].aborts) == aborts)


async def test_choices_of_a_whole_answer_run_together(mesh: Mesh) -> None:
    async with mesh({"b1": "both", "b2": "both"}) as m:
        release = anyio.Event()

        async def hold(_body: Any) -> None:
            await release.wait()

        m["b1"].before = m["b2"].before = hold
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(m.post, "/v1/chat/completions", {**CHAT, "n": 3})
            await until(lambda: len(m["b1"].requests) + len(m["b2"].requests) == 3)
            release.set()
        assert {len(m["b1"].requests), len(m["b2"].requests)} == {0, 3}, "where the prompt is"


async def test_nonsense_from_servers_is_a_bad_gateway(mesh: Mesh) -> None:
    async with mesh() as m:
        m["c"].finish_context = "not_finished"
        m["c"]._prefilled = lambda *_: aiohttp.web.Response(body=b"<html>")
        status, body = await m.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (502, "bad_context_answer")


async def test_no_servers(mesh: Mesh) -> None:
    async with mesh({}) as m:
        async with m.http.post("/v1/chat/completions", json=CHAT) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
        assert (await m.get("/health"))[0] == 503
        assert (await m.get("/v1/models"))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_drain_that_is_over_ends_what_runs_with_an_error(mesh: Mesh, stream: bool) -> None:
    async with mesh(drain_s=0.1) as m:
        running = anyio.Event()

        async def hold(_number: int) -> None:
            running.set()
            await anyio.sleep_forever()

        m["g"].after = hold
        answers: list[tuple[int, bytes]] = []

        async def ask() -> None:
            async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
                answers.append((response.status, await events_of(response)))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await running.wait()
                await m.router.drain()
        [(status, body)] = answers
        assert status == (200 if stream else 503)
        assert b'"code":"draining"' in body
        assert DONE not in body


async def test_draining_servers_get_nothing_new(mesh: Mesh) -> None:
    async with mesh({"b1": "both", "b2": "both"}) as m:
        m.tell("updated", m["b1"], draining=True)
        for _ in range(3):
            assert (await m.post("/v1/chat/completions", CHAT))[0] == 200
        assert m["b1"].requests == []


async def test_random_disconnects_leave_nothing_behind(mesh: Mesh) -> None:
    async with mesh() as m:

        async def slowly(_number: int) -> None:
            await anyio.sleep(0.002)

        async def slow_prefill(_body: Any) -> None:
            await anyio.sleep(0.01)

        m["g"].after, m["c"].before = slowly, slow_prefill

        async def impatient(patience_s: float, stream: bool) -> None:
            with anyio.move_on_after(patience_s):
                async with m.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}) as response:
                    await response.read()

        async with anyio.create_task_group() as tasks:
            for number in range(60):
                tasks.start_soon(impatient, 0.001 * number, number % 2 == 0)
        await until(m.idle)
        assert (await m.post("/v1/chat/completions", CHAT))[0] == 200
