"""Places for requests; explanations and performance records that stay bounded."""

from __future__ import annotations

import anyio
import pytest

from kvmesh.net.clock import ManualClock
from kvmesh.protocol.errors import ApiError
from kvmesh.router.admission import Admission
from kvmesh.router.explain import Attempt, Explainer, Explanation, SequenceExplanation
from kvmesh.router.perf import PerfRecords
from kvmesh.router.policy import Decision


async def test_waits_for_a_place_then_refuses() -> None:
    clock = ManualClock()
    admission = Admission(1, clock, max_queued=1)
    leave, served = anyio.Event(), []

    async def request(name: str) -> None:
        async with admission.place():
            served.append(name)
            await leave.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request, "first")
        tasks.start_soon(request, "second")
        while admission.queued < 1:
            await anyio.lowlevel.checkpoint()
        assert served == ["first"]
        with pytest.raises(ApiError) as caught:
            await request("third")
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "over_capacity", 1)
        leave.set()
    assert served == ["first", "second"]
    assert admission.statistics() == {"inflight_requests": 0, "queued_requests": 0, "rejected_requests_total": 1}


async def test_a_waiter_that_leaves_takes_no_place() -> None:
    admission = Admission(1, ManualClock())
    async with admission.place():
        with anyio.move_on_after(0.001):
            async with admission.place():
                pytest.fail("there was no place")
    async with admission.place():
        assert admission.statistics()["inflight_requests"] == 1
    assert admission.statistics()["inflight_requests"] == 0


async def test_retry_after_grows_with_how_long_requests_take() -> None:
    clock = ManualClock()
    admission = Admission(1, clock)
    for _ in range(100):
        async with admission.place():
            clock.advance(10)
    assert admission.retry_after_s() == 10


def explanation(request_id: str, client: str | None = None) -> Explanation:
    return Explanation(
        request_id=request_id,
        response_id=f"cmpl-{request_id}",
        client_request_id=client,
        api="completions",
        model="m",
        received_unix_ms=1,
    )


def test_explanations_by_any_name_and_bounded() -> None:
    explainer = Explainer(max_requests=2)
    one, two, three = explanation("a", "mine"), explanation("a-1", "mine"), explanation("c")
    explainer.add(one)
    explainer.add(two)
    assert explainer.find("mine") is two
    assert explainer.find("cmpl-a") is one
    explainer.add(three)
    assert explainer.find("a") is None
    assert explainer.find("cmpl-a") is None
    assert explainer.find("mine") is two, "the newer request keeps the name"
    assert explainer.find("c") is three


def test_perf_records_are_joined_and_drained() -> None:
    perf = PerfRecords(max_records=2)
    choice = Decision(policy="p", chosen="c1", reason="r", candidates=[])
    ended = explanation("a")
    attempt = Attempt(mode="disaggregated", transfer_id=5, context=choice, outcome="done")
    ended.sequences.append(SequenceExplanation(index=0, prompt_tokens=3, match_state="off", attempts=[attempt]))
    perf.heard([{"request_id": "a", "kind": "context", "x": 1}, {"request_id": "a", "kind": "generation", "x": 2}, {}])
    perf.ended(ended)
    [record] = perf.drain()
    assert (record["request_id"], record["disagg_request_id"], record["ctx_server"]) == ("a", 5, "c1")
    assert (record["ctx_perf_metrics"]["x"], record["gen_perf_metrics"]["x"]) == (1, 2)
    assert perf.drain() == []
    perf.heard([{"request_id": str(number), "kind": "context"} for number in range(9)])
    assert len(perf._workers) == 2
