"""§3.9: when the pools may exchange memory, and what happens to the sequences meanwhile."""

from __future__ import annotations

from fake_cache import FakeCacheManager
from scheduling import SchedulerBench

from kvmesh.engine.sequence import Phase
from kvmesh.engine.upkeep import CacheUpkeep


def test_time_passes_once_an_iteration() -> None:
    bench = SchedulerBench(10)
    upkeep = CacheUpkeep(bench.manager, bench.scheduler)  # type: ignore[arg-type]
    for iteration in (1, 2, 3):
        upkeep.before_step(iteration, iteration / 10)
    assert bench.manager.ticks == [0.1, 0.2, 0.3]


def test_off_means_never() -> None:
    """§2.2 enable_kv_pool_rebalance: off -> adjust never called even with a mismatch."""
    manager = FakeCacheManager([10])
    manager.wants = True
    bench = SchedulerBench(manager)
    upkeep = CacheUpkeep(manager, bench.scheduler)  # type: ignore[arg-type]
    for iteration in range(1, 100):
        upkeep.before_step(iteration, 0.0)
    assert manager.rebalances == 0


def test_on_means_at_multiples_of_the_interval_with_all_caches_suspended() -> None:
    """The fake asserts that every cache is suspended; the sequences go on at once, and compute nothing twice."""
    manager = FakeCacheManager([20])
    bench = SchedulerBench(manager, max_num_tokens=8)
    upkeep = CacheUpkeep(manager, bench.scheduler, rebalance_interval=3)  # type: ignore[arg-type]
    for index in range(3):
        bench.add(f"s{index}", 10, first=100 * index)
    done = []
    positions: list[tuple[str, int]] = []
    for iteration in range(1, 20):
        manager.wants = iteration > 4
        before = manager.rebalances
        upkeep.before_step(iteration, 0.0)
        if manager.rebalances > before:
            done.append(iteration)
        positions += [(c.seq.request_id, c.start + i) for c in bench.step().chunks for i in range(c.length)]
    assert done == [6, 9, 12, 15, 18]
    assert all(seq.phase is Phase.FINISHED for seq in bench.all)
    assert len(positions) == len(set(positions))


def test_not_while_transfers_use_pages() -> None:
    manager = FakeCacheManager([20])
    manager.wants = True
    bench = SchedulerBench(manager)
    upkeep = CacheUpkeep(manager, bench.scheduler, rebalance_interval=1)  # type: ignore[arg-type]
    receiver = bench.add("r", 8, received=True)
    bench.step()
    upkeep.before_step(1, 0.0)
    assert (manager.rebalances, receiver.phase) == (0, Phase.RECEIVING)
    bench.arrive(receiver)
    assert receiver.cache is not None
    lease = receiver.cache.hold(8)
    upkeep.before_step(2, 0.0)
    assert manager.rebalances == 0
    lease.release()
    upkeep.before_step(3, 0.0)
    assert manager.rebalances == 1


def test_what_does_not_fit_after_the_move_waits_with_its_cache() -> None:
    manager = FakeCacheManager([4], [10])
    bench = SchedulerBench(manager)
    for index in range(2):
        bench.add(f"s{index}", 6, first=100 * index, max_tokens=9)
    bench.step()
    assert len(bench.scheduler.running) == 1
    bench.step()
    manager.totals = [3]
    paused = bench.scheduler.pause()
    manager.max_util_for_resume = -1.0
    bench.scheduler.go_on(paused)
    assert [seq.phase for seq in paused] == [Phase.SUSPENDED] * len(paused)
    manager.max_util_for_resume = 1.0
    manager.totals = [4]
    bench.run()
