"""§3.6 and §8 items 15, 22: no progress ends as an error with the numbers that were seen."""

from __future__ import annotations

import pytest
from fake_cache import FakeCacheManager
from scheduling import SchedulerBench

from kvmesh.engine.starvation import MAX_IDLE_PASSES, StarvationWatch


def starving(cold: list[int]) -> tuple[SchedulerBench, StarvationWatch]:
    """A request of 40 tokens, a cache of 5 pages of which 3 are pinned for ever, and one short request that waits."""
    manager = FakeCacheManager([5], cold)
    bench = SchedulerBench(manager, max_num_tokens=64)
    sender = bench.add("sender", 12, max_tokens=1, first=500)
    bench.scheduler.schedule()
    bench.pages.advance(sender, 12)
    assert sender.cache is not None
    sender.cache.hold(12)
    bench.finish(sender)
    bench.add("large", 16, max_tokens=3)
    bench.add("small", 2, first=300)
    return bench, StarvationWatch(manager, bench.scheduler)  # type: ignore[arg-type]


def test_a_thousand_passes_fail_the_request_that_was_tried() -> None:
    bench, watch = starving(cold=[])
    for _ in range(MAX_IDLE_PASSES - 1):
        assert watch.check(bench.step(), in_transfer=False) == []
    [(seq, error)] = watch.check(bench.step(), in_transfer=False)
    assert seq.request_id == "large"
    assert (error.status, error.code) == (503, "kv_cache_exhausted")
    for words in (
        "in 1000 scheduling passes",
        "16 tokens, 0 of them computed, and needs 4 of pool 0 pages",
        "0 running, 2 waiting, 0 suspended",
        "gpu pool 0 (256 bytes a page): 5 in all, 2 free, 0 evictable, 0 held, 3 pinned, 0 locked",
        "host_cache_size (there is no host tier)",
        "max_batch_size",
    ):
        assert words in error.message
    bench.finish(seq)
    # The next in the queue was never tried; now it runs.
    assert [chunk.seq.request_id for chunk in bench.step().chunks] == ["small"]


def test_cold_tiers_are_named_with_their_numbers() -> None:
    bench, watch = starving(cold=[7])
    ends = [watch.check(bench.step(), in_transfer=False) for _ in range(MAX_IDLE_PASSES)]
    [(_, error)] = ends[-1]
    assert "host pool 0 (256 bytes a page): 7 in all, 7 free" in error.message
    assert "there is no host tier" not in error.message


@pytest.mark.parametrize("moment", [0, MAX_IDLE_PASSES - 1])
def test_passes_during_transfers_are_not_counted(moment: int) -> None:
    bench, watch = starving(cold=[])
    plan = bench.step()
    for _ in range(moment):
        watch.check(plan, in_transfer=False)
    for _ in range(2 * MAX_IDLE_PASSES):
        assert watch.check(plan, in_transfer=True) == []


def test_progress_begins_the_count_anew() -> None:
    bench, watch = starving(cold=[])
    idle = bench.step()
    busy = SchedulerBench(10)
    busy.add("a", 4)
    for plan in (*[idle] * (MAX_IDLE_PASSES - 1), busy.step(), *[idle] * (MAX_IDLE_PASSES - 1)):
        assert watch.check(plan, in_transfer=False) == []
    assert watch.check(idle, in_transfer=False)


def test_a_request_fails_once_however_often_it_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the cache refuse what it has, a pass by rank and a pass by force both end in a refusal."""
    bench = SchedulerBench(10)
    bench.add("a", 4)
    monkeypatch.setattr(bench.pages, "grow", lambda _seq, _tokens: False)
    watch = StarvationWatch(bench.manager, bench.scheduler)  # type: ignore[arg-type]
    ends = [watch.check(bench.step(), in_transfer=False) for _ in range(MAX_IDLE_PASSES)]
    assert len(bench.step().refused) > 1
    assert [seq.request_id for seq, _ in ends[-1]] == ["a"]
