"""Scheduling decisions against a page pool made of counters."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.engine.sampler import Sampler
from kvmesh.engine.scheduler import (
    MAX_DEFERRED,
    Scheduler,
    SchedulerLimits,
    SchedulerPolicy,
    StepPlan,
    chunk_length,
    pick_victim,
)
from kvmesh.engine.sequence import Phase, Sequence
from kvmesh.engine.tokens import TokenHistory
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.sampling import SamplingParams

BLOCK = 4
HANDOFF = HandOff(ticket=b"", control_endpoint="", instance_id="c", epoch=1, layout_digest="", seed=0)


class CountedPages:
    """A pool that only counts, with an optional prefix match and an optional refusal to reuse."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.owned: dict[str, int] = {}
        self.leased = 0
        self.matches: dict[str, int] = {}
        self.refuse_reuse = False

    tokens_per_block = BLOCK

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK)

    def reservable_blocks(self) -> int:
        return self.total - self.leased

    def available_blocks(self) -> int:
        return self.total - self.leased - sum(self.owned.values())

    def open(self, seq: Sequence, *, match: bool = True) -> bool:
        if match and self.refuse_reuse:
            return False
        seq.num_computed = min(self.matches.get(seq.request_id, 0), seq.history.length - 1) if match else 0
        self.owned[seq.request_id] = self.blocks_for(seq.num_computed)
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        more = self.blocks_for(num_tokens) - self.owned[seq.request_id]
        if more > self.available_blocks():
            return False
        self.owned[seq.request_id] += max(0, more)
        return True

    def release(self, seq: Sequence) -> None:
        del self.owned[seq.request_id]
        seq.num_computed = 0

    def matched(self, seq: Sequence) -> int:
        return min(self.matches.get(seq.request_id, 0), seq.history.length - 1)


class Bench:
    """A scheduler, its pool, and a stand-in for the model: every step computes what was planned."""

    def __init__(self, pages: int, policy: SchedulerPolicy = "max_utilization", **limits: int | bool) -> None:
        self.pages = CountedPages(pages)
        merged = {"max_batch_size": 8, "max_num_tokens": 16, **limits}
        self.scheduler = Scheduler(SchedulerLimits(policy=policy, **merged), self.pages)  # type: ignore[arg-type]
        self._sampler = Sampler(frozenset())
        self._count = 0

    def add(self, name: str, prompt: int, *, max_tokens: int = 8, priority: int = 0, first: int = 0) -> Sequence:
        tokens = TokenHistory(np.arange(first, first + prompt, dtype=np.int32))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._count += 1
        seq = Sequence(
            name,
            "aggregated",
            params,
            tokens,
            self._sampler.state(params, tokens),
            None,
            self._count,
            priority,  # type: ignore[arg-type]
        )
        self.scheduler.enqueue(seq)
        return seq

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for chunk in plan.chunks:
            chunk.seq.num_computed += chunk.length
            if chunk.sample:
                chunk.seq.history.append(1)
                if chunk.seq.history.output_length >= chunk.seq.params.max_tokens:
                    self.scheduler.remove(chunk.seq)
                    self.pages.release(chunk.seq)
                    chunk.seq.phase = Phase.FINISHED
        return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(chunk.seq.request_id, chunk.start, chunk.length, chunk.sample) for chunk in plan.chunks]


def test_prompt_is_computed_in_chunks_of_the_budget() -> None:
    bench = Bench(100, max_num_tokens=16)
    bench.add("a", 40)
    assert shape(bench.step()) == [("a", 0, 16, False)]
    assert shape(bench.step()) == [("a", 16, 16, False)]
    assert shape(bench.step()) == [("a", 32, 8, True)]
    assert shape(bench.step()) == [("a", 40, 1, True)]


def test_decodes_come_first_and_prompts_share_the_rest() -> None:
    bench = Bench(100, max_num_tokens=16)
    bench.add("a", 4)
    bench.step()
    bench.add("b", 100, first=100)
    bench.add("c", 4, first=300)
    assert shape(bench.step()) == [("a", 4, 1, True), ("b", 0, 15, False)]
    # A running prompt goes on before a new one begins.
    assert shape(bench.step()) == [("a", 5, 1, True), ("b", 15, 15, False)]


def test_short_prompts_share_one_step() -> None:
    bench = Bench(100, max_num_tokens=16)
    bench.add("a", 6)
    bench.add("b", 6, first=50)
    bench.add("c", 6, first=90)
    assert shape(bench.step()) == [("a", 0, 6, True), ("b", 0, 6, True), ("c", 0, 4, False)]


def test_batch_size_bounds_a_step() -> None:
    bench = Bench(100, max_batch_size=2)
    for index in range(4):
        bench.add(f"s{index}", 2, first=100 * index)
    for _ in range(3):
        assert len(bench.step().chunks) == 2


def test_priority_goes_before_arrival() -> None:
    bench = Bench(100, max_batch_size=1)
    bench.add("late", 2)
    bench.add("urgent", 2, priority=1, first=50)
    assert shape(bench.step())[0][0] == "urgent"


def test_out_of_pages_waits_without_preempting_older_ones() -> None:
    bench = Bench(4)
    bench.add("a", 12, max_tokens=5)
    assert bench.step().chunks
    bench.add("b", 8, first=50)
    plan = bench.step()
    assert shape(plan) == [("a", 12, 1, True)]
    assert [seq.request_id for seq in bench.scheduler.waiting] == ["b"]


def test_growth_preempts_the_youngest_and_it_resumes() -> None:
    bench = Bench(6, max_num_tokens=32)
    a = bench.add("a", 8, max_tokens=12)
    b = bench.add("b", 8, max_tokens=12, first=50)
    preempted = []
    for _ in range(60):
        preempted += [seq.request_id for seq in bench.step().preempted]
    assert set(preempted) == {"b"}
    assert a.phase is b.phase is Phase.FINISHED
    assert bench.pages.available_blocks() == 6


def test_preempted_context_is_prompt_and_output() -> None:
    bench = Bench(5, max_num_tokens=32)
    bench.add("a", 8, max_tokens=12)
    b = bench.add("b", 6, max_tokens=12, first=50)
    while not bench.step().preempted:
        pass
    generated = b.history.output_length
    assert generated > 0
    assert b.num_pending == 6 + generated
    assert not b.is_decoding


def test_a_victim_is_never_served_before_the_claimant() -> None:
    bench = Bench(10)
    a, b, c = (bench.add(name, 2, first=20 * i) for i, name in enumerate("abc"))
    for seq in (a, b, c):
        seq.phase = Phase.RUNNING
    assert pick_victim([a, b, c], a) is c
    assert pick_victim([a, b, c], b) is c
    assert pick_victim([a, b, c], c) is None
    c.phase = Phase.RECEIVING
    assert pick_victim([a, b, c], a) is b


def test_guaranteed_no_evict_reserves_to_completion() -> None:
    bench = Bench(6, policy="guaranteed_no_evict", max_num_tokens=32)
    bench.add("a", 8, max_tokens=9)  # 16 tokens of KV: 4 pages
    bench.add("b", 8, max_tokens=9, first=50)
    finished = 0
    for _ in range(40):
        plan = bench.step()
        assert not plan.preempted
        assert len(plan.chunks) <= 1
        finished += len(plan.chunks)
    assert finished == 18
    assert not bench.scheduler.waiting
    assert not bench.scheduler.running


def test_guaranteed_no_evict_reserves_only_the_prompt_of_a_context_request() -> None:
    bench = Bench(2, policy="guaranteed_no_evict")
    bench.add("a", 8, max_tokens=500).kind = "context"
    assert shape(bench.step()) == [("a", 0, 8, True)]


def test_a_crowd_behind_one_prefix_is_passed_over_in_bounded_work() -> None:
    bench = Bench(1000, max_num_tokens=16)
    bench.add("a", 64)
    for index in range(2 * MAX_DEFERRED):
        bench.add(f"same{index}", 64)
    bench.add("other", 4, first=500)
    bench.step()
    asked: list[str] = []
    matched = bench.pages.matched
    bench.pages.matched = lambda seq: asked.append(seq.request_id) or matched(seq)  # type: ignore[method-assign,func-returns-value]
    for _ in range(2):
        bench.step()
    assert len(asked) <= 2 * MAX_DEFERRED


def test_guaranteed_no_evict_counts_pages_that_transfers_hold() -> None:
    bench = Bench(6, policy="guaranteed_no_evict")
    bench.pages.leased = 3
    bench.add("a", 8, max_tokens=9)
    plan = bench.step()
    assert not plan.chunks
    assert plan.blocked
    bench.pages.leased = 0
    assert bench.step().chunks


def test_without_chunked_prefill_a_prompt_goes_whole() -> None:
    bench = Bench(100, chunked_prefill=False, max_num_tokens=16)
    bench.add("a", 10)
    bench.add("b", 10, first=50)
    assert shape(bench.step()) == [("a", 0, 10, True)]
    assert shape(bench.step()) == [("a", 10, 1, True), ("b", 0, 10, True)]


@pytest.mark.parametrize(
    ("pending", "budget", "chunked", "expected"), [(9, 4, True, 4), (9, 4, False, 0), (40, 16, False, 16)]
)
def test_chunk_length(pending: int, budget: int, chunked: bool, expected: int) -> None:
    assert chunk_length(pending, budget, SchedulerLimits(8, 16, chunked_prefill=chunked)) == expected


def test_a_prefix_being_computed_is_waited_for() -> None:
    bench = Bench(100, max_num_tokens=16)
    bench.add("a", 24)
    b = bench.add("b", 24)
    bench.add("other", 4, first=500)
    assert shape(bench.step()) == [("a", 0, 16, False)]
    assert shape(bench.step()) == [("a", 16, 8, True), ("other", 0, 4, True)]
    bench.pages.matches["b"] = 24
    plan = bench.step()
    assert ("b", 23, 1, True) in shape(plan)
    assert b.phase is Phase.RUNNING


def test_reuse_that_does_not_fit_alone_starts_without_reuse() -> None:
    bench = Bench(10)
    bench.pages.refuse_reuse = True
    bench.add("a", 4)
    assert shape(bench.step()) == [("a", 0, 4, True)]


def test_receivers_get_pages_for_the_whole_prompt_and_their_own_seats() -> None:
    bench = Bench(100, max_batch_size=1, max_num_tokens=4)
    bench.add("a", 4)
    receiver = bench.add("r", 30, first=50)
    receiver.handoff = HANDOFF
    plan = bench.step()
    assert [seq.request_id for seq in plan.receiving] == ["r"]
    assert receiver.phase is Phase.RECEIVING
    assert bench.pages.owned["r"] == 8
    receiver.handoff, receiver.phase = None, Phase.RUNNING
    receiver.num_computed = 30
    receiver.history.append(1)
    # It decodes when the one place in a step is free.
    assert [chunk.seq.request_id for chunk in bench.step().chunks] == ["a"]


def test_receivers_are_admitted_when_the_token_budget_is_spent() -> None:
    bench = Bench(100, max_num_tokens=4)
    bench.add("a", 40)
    bench.step()
    bench.add("waits", 4, first=200)
    receiver = bench.add("r", 8, first=50)
    receiver.handoff = HANDOFF
    assert [seq.request_id for seq in bench.step().receiving] == ["r"]
