"""Scheduling decisions over a fake cache without cold tiers."""

from __future__ import annotations

import pytest
from fake_cache import FakeCacheManager
from scheduling import SchedulerBench, names, shape

from kvmesh.engine.scheduler import MAX_DEFERRED, SchedulerLimits, chunk_length
from kvmesh.engine.sequence import Phase


def test_prompt_is_computed_in_chunks_of_the_budget() -> None:
    bench = SchedulerBench(100, max_num_tokens=16)
    bench.add("a", 40)
    assert shape(bench.step()) == [("a", 0, 16, False)]
    assert shape(bench.step()) == [("a", 16, 16, False)]
    assert shape(bench.step()) == [("a", 32, 8, True)]
    assert shape(bench.step()) == [("a", 40, 1, True)]


def test_decodes_come_first_and_prompts_share_the_rest() -> None:
    bench = SchedulerBench(100, max_num_tokens=16)
    bench.add("a", 4)
    bench.step()
    bench.add("b", 100, first=100)
    bench.add("c", 4, first=300)
    assert shape(bench.step()) == [("a", 4, 1, True), ("b", 0, 15, False)]
    # A running prompt goes on before a new one begins.
    assert shape(bench.step()) == [("a", 5, 1, True), ("b", 15, 15, False)]


def test_short_prompts_share_one_step() -> None:
    bench = SchedulerBench(100, max_num_tokens=16)
    bench.add("a", 6)
    bench.add("b", 6, first=50)
    bench.add("c", 6, first=90)
    assert shape(bench.step()) == [("a", 0, 6, True), ("b", 0, 6, True), ("c", 0, 4, False)]


def test_batch_size_bounds_a_step() -> None:
    bench = SchedulerBench(100, max_batch_size=2)
    for index in range(4):
        bench.add(f"s{index}", 2, first=100 * index)
    for _ in range(3):
        assert len(bench.step().chunks) == 2


def test_priority_goes_before_arrival() -> None:
    bench = SchedulerBench(100, max_batch_size=1)
    bench.add("late", 2)
    bench.add("urgent", 2, priority=1, first=50)
    assert shape(bench.step())[0][0] == "urgent"


def test_out_of_pages_waits_without_preempting_older_ones() -> None:
    bench = SchedulerBench(4)
    bench.add("a", 12, max_tokens=5)
    assert bench.step().chunks
    bench.add("b", 8, first=50)
    plan = bench.step()
    assert shape(plan) == [("a", 12, 1, True)]
    assert names(bench.scheduler.waiting) == names(plan.refused) == ["b"]


def test_growth_preempts_the_youngest_and_it_resumes() -> None:
    bench = SchedulerBench(6, max_num_tokens=32)
    bench.add("a", 8, max_tokens=12)
    bench.add("b", 8, max_tokens=12, first=50)
    plans = bench.run(60)
    assert {name for plan in plans for name in names(plan.preempted)} == {"b"}
    assert not any(plan.suspended for plan in plans), "there is no cold tier"
    assert bench.manager.available_pages() == [6]


def test_preempted_context_is_prompt_and_output() -> None:
    bench = SchedulerBench(5, max_num_tokens=32)
    bench.add("a", 8, max_tokens=12)
    b = bench.add("b", 6, max_tokens=12, first=50)
    while not bench.step().preempted:
        pass
    generated = b.history.output_length
    assert generated > 0
    assert b.num_pending == 6 + generated
    assert not b.is_decoding


def test_a_victim_is_never_served_before_the_claimant_nor_receiving() -> None:
    bench = SchedulerBench(100, max_num_tokens=64)
    a, b, c = (bench.add(name, 2, first=20 * i) for i, name in enumerate("abc"))
    bench.step()
    queues = bench.scheduler._queues
    assert queues.victim(a) is c
    assert queues.victim(b) is c
    assert queues.victim(c) is None
    c.phase = Phase.RECEIVING
    assert queues.victim(a) is b


def test_guaranteed_no_evict_reserves_to_completion() -> None:
    bench = SchedulerBench(6, policy="guaranteed_no_evict", max_num_tokens=32)
    bench.add("a", 8, max_tokens=9)  # 16 tokens of KV: 4 pages
    bench.add("b", 8, max_tokens=9, first=50)
    plans = bench.run(40)
    assert not any(plan.gave_way for plan in plans)
    assert all(len(plan.chunks) == 1 for plan in plans)
    assert len(plans) == 18


def test_guaranteed_no_evict_reserves_only_the_prompt_of_a_context_request() -> None:
    bench = SchedulerBench(2, policy="guaranteed_no_evict")
    bench.add("a", 8, max_tokens=500, kind="context")
    assert shape(bench.step()) == [("a", 0, 8, True)]


def test_guaranteed_no_evict_reserves_a_window_and_a_chunk() -> None:
    """A windowed group needs its window and one chunk, however long the sequence: both run at once."""
    manager = FakeCacheManager([60, 11], windows=(None, 8))
    bench = SchedulerBench(manager, policy="guaranteed_no_evict", max_num_tokens=8)
    for index in range(2):
        bench.add(f"s{index}", 40, max_tokens=20, first=100 * index)
    plans = bench.run(200)
    assert not any(plan.gave_way for plan in plans)
    assert max(len(plan.chunks) for plan in plans) == 2
    # With all of their blocks, one alone would need 15.
    assert manager.pages_needed(history=0, capacity=59)[1] == 15


def test_guaranteed_no_evict_counts_pages_that_transfers_hold() -> None:
    bench = SchedulerBench(6, policy="guaranteed_no_evict")
    sender = bench.add("s", 12, max_tokens=1, first=200)
    assert bench.scheduler.schedule().chunks
    bench.pages.advance(sender, 12)
    assert sender.cache is not None
    lease = sender.cache.hold(12)
    bench.finish(sender)
    bench.add("a", 8, max_tokens=9)
    plan = bench.step()
    assert not plan.chunks
    assert names(plan.refused) == ["a"]
    lease.release()
    assert bench.step().chunks


def test_without_chunked_prefill_a_prompt_goes_whole() -> None:
    bench = SchedulerBench(100, chunked_prefill=False, max_num_tokens=16)
    bench.add("a", 10)
    bench.add("b", 10, first=50)
    assert shape(bench.step()) == [("a", 0, 10, True)]
    assert shape(bench.step()) == [("a", 10, 1, True), ("b", 0, 10, True)]


@pytest.mark.parametrize(
    ("pending", "budget", "chunked", "expected"), [(9, 4, True, 4), (9, 4, False, 0), (40, 16, False, 16)]
)
def test_chunk_length(pending: int, budget: int, chunked: bool, expected: int) -> None:
    assert chunk_length(pending, budget, SchedulerLimits(8, 16, chunked_prefill=chunked)) == expected


def test_snapshot_points_end_chunks() -> None:
    """§1.2, §1.3: every prefill chunk ends at a snapshot point, also without chunked prefill; decodes do not."""
    manager = FakeCacheManager([100])
    manager.snapshot_every = 6
    bench = SchedulerBench(manager, max_num_tokens=16, chunked_prefill=False)
    bench.add("a", 15)
    assert [shape(bench.step()) for _ in range(4)] == [
        [("a", 0, 6, False)],
        [("a", 6, 6, False)],
        [("a", 12, 3, True)],
        [("a", 15, 1, True)],
    ]


def test_a_prefix_being_computed_is_waited_for() -> None:
    bench = SchedulerBench(100, max_num_tokens=16)
    bench.add("a", 24)
    b = bench.add("b", 24)
    bench.add("other", 4, first=500)
    assert shape(bench.step()) == [("a", 0, 16, False)]
    assert shape(bench.step()) == [("a", 16, 8, True), ("other", 0, 4, True)]
    assert ("b", 20, 4, True) in shape(bench.step())
    assert b.phase is Phase.RUNNING


def test_without_prefix_awareness_nobody_is_waited_for_and_cached_tokens_cost_budget() -> None:
    """§2 enable_block_reuse: the switch gates the deferral and the budget's credit for cached tokens."""
    off = SchedulerBench(100, max_num_tokens=32, prefix_aware=False)
    off.add("a", 24, max_tokens=1)
    off.add("b", 24)
    assert shape(off.step()) == [("a", 0, 24, True), ("b", 0, 8, False)]

    def second_step(prefix_aware: bool) -> list[tuple[str, int, int, bool]]:
        bench = SchedulerBench(100, max_num_tokens=24, prefix_aware=prefix_aware)
        bench.add("a", 24, max_tokens=1)
        bench.step()
        bench.add("b", 24, max_tokens=1)
        bench.add("c", 8, first=100)
        return shape(bench.step())

    assert second_step(prefix_aware=True) == [("b", 20, 4, True), ("c", 0, 8, True)]
    assert second_step(prefix_aware=False) == [("b", 20, 4, True)]


def test_a_prompt_is_hashed_once() -> None:
    bench = SchedulerBench(100, max_num_tokens=16)
    bench.add("a", 40)
    for index in range(4):
        bench.add(f"b{index}", 40, max_tokens=3)
    bench.run()
    assert bench.manager.hashed_tokens == 5 * 40


def test_a_crowd_behind_one_prefix_is_passed_over_in_bounded_work() -> None:
    bench = SchedulerBench(1000, max_num_tokens=24)
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
    assert len(asked) == MAX_DEFERRED, "only the second of the two steps had budget left"


def test_reuse_that_does_not_fit_alone_starts_without_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SchedulerBench(10)
    opened = bench.pages.open
    monkeypatch.setattr(bench.pages, "open", lambda seq, *, match=True: not match and opened(seq, match=False))
    bench.add("a", 4)
    assert shape(bench.step()) == [("a", 0, 4, True)]


def test_receivers_get_pages_for_the_whole_prompt_and_their_own_seats() -> None:
    bench = SchedulerBench(100, max_batch_size=1, max_num_tokens=4)
    bench.add("a", 4)
    receiver = bench.add("r", 30, first=50, received=True)
    plan = bench.step()
    assert names(plan.receiving) == ["r"]
    assert receiver.phase is Phase.RECEIVING
    assert receiver.cache is not None
    assert receiver.cache.num_blocks == 8
    bench.arrive(receiver)
    # It decodes when the one place in a step is free.
    assert [chunk.seq.request_id for chunk in bench.step().chunks] == ["a"]


def test_a_receiver_gets_only_the_pages_of_its_window() -> None:
    """§3.3 and decisions 3: blocks that the window has passed are neither allocated nor asked for."""
    bench = SchedulerBench(FakeCacheManager([10, 3], windows=(None, 8)))
    receiver = bench.add("r", 30, first=50, received=True)
    bench.step()
    assert bench.pages.first_missing_blocks(receiver) == [0, 5]
    assert receiver.cache is not None
    assert [page is not None for page in receiver.cache.pages[1]] == [False] * 5 + [True] * 3  # type: ignore[attr-defined]
    bench.arrive(receiver)
    bench.run()


def test_receivers_are_admitted_when_the_token_budget_is_spent() -> None:
    bench = SchedulerBench(100, max_num_tokens=4)
    bench.add("a", 40)
    bench.step()
    bench.add("waits", 4, first=200)
    bench.add("r", 8, first=50, received=True)
    assert names(bench.step().receiving) == ["r"]


def test_the_context_cap_defers_prompts() -> None:
    """§2 fp8_context_mla_kv_len_cap: the attended KV of the contexts of one step never exceeds it."""
    bench = SchedulerBench(100, max_num_tokens=64, context_kv_cap_tokens=30)
    bench.add("a", 16)
    bench.add("b", 12, first=100)
    bench.add("c", 8, first=200)
    # The bench checks the sum in every step; decodes do not count.
    assert shape(bench.step()) == [("a", 0, 16, True), ("b", 0, 12, True)]
    assert shape(bench.step()) == [("a", 16, 1, True), ("b", 12, 1, True), ("c", 0, 8, True)]
    bench.run()


def test_disk_prefetch_takes_the_first_queued_prompts_once() -> None:
    """§2 disk_prefetch_num_reqs: N=1, two queued: the first is fetched ahead, the second untouched."""
    bench = SchedulerBench(100, max_batch_size=1, disk_prefetch_num_reqs=1)
    bench.add("running", 4)
    bench.step()
    fetched = bench.manager.prefetched
    assert len(fetched) == 1
    bench.add("r", 8, first=300, received=True)
    bench.add("b", 8, first=100)
    bench.add("c", 8, first=200)
    bench.step()
    bench.step()
    assert [int.from_bytes(bytes.fromhex(token), "little") for token in fetched] == [0, 100]
    assert bench.manager.kept_meanwhile == [0, 0]


def test_disk_prefetch_keeps_what_the_others_have() -> None:
    """§2 disk_prefetch_num_reqs: N=2: neither is fetched at the other's cost; the third does not count."""
    bench = SchedulerBench(100, max_batch_size=1, disk_prefetch_num_reqs=2)
    bench.add("running", 4)
    bench.step()
    for number, name in enumerate("abc", 1):
        bench.add(name, 8, first=100 * number)
    bench.step()
    fetched = bench.manager.prefetched[1:]
    assert [int.from_bytes(bytes.fromhex(token), "little") for token in fetched] == [100, 200]
    assert bench.manager.kept_meanwhile == [0, 1, 1]
