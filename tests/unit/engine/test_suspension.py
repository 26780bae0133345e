"""§3.6: who is suspended, who is resumed, and who loses the cache when the cold tiers are full too."""

from __future__ import annotations

from fake_cache import COLD, FakeCacheManager
from scheduling import SchedulerBench, names

from kvmesh.engine.plan import StepPlan
from kvmesh.engine.sequence import Phase, Sequence


def computed(plans: list[StepPlan], seq: Sequence) -> list[int]:
    """Every position that was computed, in order."""
    return [
        position
        for plan in plans
        for chunk in plan.chunks
        if chunk.seq is seq
        for position in range(chunk.start, chunk.start + chunk.length)
    ]


def suspended(plans: list[StepPlan]) -> list[str]:
    return [name for plan in plans for name in names(plan.suspended)]


def preempted(plans: list[StepPlan]) -> list[str]:
    return [name for plan in plans for name in names(plan.preempted)]


def running(bench: SchedulerBench, *lengths: int, max_tokens: int = 18) -> list[Sequence]:
    """Sequences of these prompt lengths, with every prompt computed."""
    found = [
        bench.add(chr(ord("a") + index), length, first=100 * index, max_tokens=max_tokens)
        for index, length in enumerate(lengths)
    ]
    while any(seq.history.output_length == 0 for seq in found):
        assert bench.step().chunks
    return found


def test_with_a_cold_tier_nothing_is_computed_twice() -> None:
    bench = SchedulerBench(FakeCacheManager([7], [40]), max_num_tokens=32)
    a = bench.add("a", 8, max_tokens=12)
    b = bench.add("b", 8, max_tokens=12, first=50)
    plans = bench.run(60)
    assert set(suspended(plans)) == {"b"}
    assert [name for plan in plans for name in names(plan.resumed)] == suspended(plans)
    assert preempted(plans) == []
    assert computed(plans, a) == computed(plans, b) == list(range(19))


def test_a_suspended_sequence_keeps_its_place() -> None:
    """It waits with its cache, is passed by nobody of lower rank, and by one of higher rank only."""
    bench = SchedulerBench(FakeCacheManager([7], [40]), max_num_tokens=32)
    _, b = running(bench, 8, 8)
    bench.add("later", 2, first=900)
    while not suspended([plan := bench.step()]):
        assert not plan.admitted, "the newcomer would take pages that b needs for its next block"
    assert b.phase is Phase.SUSPENDED
    assert b.num_computed > 8
    urgent = bench.add("urgent", 1, first=800, priority=1, max_tokens=1)
    plan = bench.step()
    assert names(plan.admitted) == ["urgent"]
    assert urgent.phase is Phase.FINISHED
    order = [name for plan in bench.run() for name in names(plan.resumed + plan.admitted)]
    assert order.index("b") < order.index("later")


def test_what_no_cold_tier_takes_is_computed_again() -> None:
    """The victim's pages do not fit the cold tier, so that suspending frees too little: it is released."""
    bench = SchedulerBench(FakeCacheManager([6], [1], reuse=False), max_num_tokens=32)
    a, b = bench.add("a", 8, max_tokens=12), bench.add("b", 8, max_tokens=12, first=50)
    plans = bench.run(80)
    assert "b" in suspended(plans)
    assert preempted(plans) == ["b"]
    assert computed(plans, a) == list(range(19))
    assert len(computed(plans, b)) > 19


def test_the_last_in_rank_loses_its_cache_for_the_one_before_it() -> None:
    """The cold tier is full of c's pages: c is released, so that b, which is served before it, keeps its own."""
    bench = SchedulerBench(FakeCacheManager([12], [4], reuse=False), max_num_tokens=32)
    _, b, c = running(bench, 11, 11, 11, max_tokens=27)
    plans = []
    while not preempted(plans):
        plans.append(bench.step())
    assert suspended(plans) == ["c", "b"]
    assert preempted(plans) == ["c"]
    assert (b.phase, c.phase) == (Phase.SUSPENDED, Phase.WAITING)
    assert computed(plans + bench.run(), b)[-1] == 11 + 27 - 2
    assert bench.manager.free(0) == 12


def test_without_a_cold_tier_a_suspended_sequence_goes_before_a_running_one() -> None:
    """A tier that has failed takes no more pages; those of the last in rank are still the first to go."""
    bench = SchedulerBench(FakeCacheManager([10], [], reuse=False), max_num_tokens=64)
    _, b, c = running(bench, 11, 7, 7)
    bench.pages.suspend(c)
    bench.scheduler._queues.suspend(c)
    bench.manager.totals = [7]
    plans = []
    while not preempted(plans):
        plans.append(bench.step())
    assert not any(plan.resumed for plan in plans)
    assert preempted(plans) == ["c"]
    assert b.phase is Phase.RUNNING
    bench.run()


def test_a_damaged_page_starts_its_sequence_anew_from_what_is_cached() -> None:
    bench = SchedulerBench(FakeCacheManager([7], [40]), max_num_tokens=32)
    _, b = running(bench, 8, 8)
    while not suspended([bench.step()]):
        pass
    assert b.cache is not None
    bench.manager.make_room(0, 2)
    cold = [page for page in b.cache.live() if page.level == COLD]  # type: ignore[attr-defined]
    assert len(cold) == 3
    bench.manager.damage(cold[-1])
    before = b.history.length
    plans = bench.run()
    assert [names(plan.lost) for plan in plans if plan.lost] == [["b"]]
    again = computed(plans, b)
    assert 0 < again[0] < before, "the blocks before the damaged one were still there"
    assert again == list(range(again[0], 8 + 18 - 1))


def test_a_page_found_damaged_at_admission_is_a_miss() -> None:
    """§8 item 14: the cache that found it is closed, and one without it is opened in the same step."""
    bench = SchedulerBench(FakeCacheManager([7], [40]), max_num_tokens=32)
    bench.add("a", 16, max_tokens=1)
    bench.run()
    bench.manager.make_room(0, 7)
    victim = next(page for page in list(bench.manager.pages)[2:3])
    assert victim.level == COLD
    victim.damaged = True
    cache = bench.manager.create

    def create(*arguments: object, **settings: object) -> object:
        """The manager finds the damage when it reads the page, and forgets the block."""
        made = cache(*arguments, **settings)  # type: ignore[arg-type]
        resume = made.resume

        def resume_and_forget() -> bool:
            done = resume()
            if made.lost:
                bench.manager.damage(victim)
            return done

        made.resume = resume_and_forget  # type: ignore[method-assign]
        return made

    bench.manager.create = create  # type: ignore[method-assign,assignment]
    bench.add("again", 16, max_tokens=1)
    [chunk] = bench.step().chunks
    assert chunk.start < 12
    assert chunk.start + chunk.length == 16


def test_a_refused_resume_that_nothing_would_end_takes_the_others_pages() -> None:
    """§3.6 max_util_for_resume: nobody runs, so utilisation will not fall; the suspended ones behind it give way."""
    manager = FakeCacheManager([12], [1], max_util_for_resume=0.6, reuse=False)
    bench = SchedulerBench(manager, max_num_tokens=32)
    a, _, c = running(bench, 11, 11, 11)
    for seq in bench.scheduler.pause():
        assert seq.phase is Phase.SUSPENDED
    assert manager.utilisation > 0.6
    plan = bench.step()
    assert names(plan.resumed) == ["a"]
    assert "c" in names(plan.preempted)
    assert (a.phase, c.phase) == (Phase.RUNNING, Phase.WAITING)
    bench.run()


def test_a_resume_that_is_refused_for_its_own_pages_starts_anew() -> None:
    manager = FakeCacheManager([10], [], max_util_for_resume=0.2)
    bench = SchedulerBench(manager, max_num_tokens=32)
    [a] = running(bench, 11)
    bench.scheduler.pause()
    plan = bench.step()
    assert names(plan.preempted) == names(plan.admitted) == ["a"]
    assert [chunk.seq for chunk in plan.chunks] == [a]
    bench.run()


def test_a_blocked_runner_gives_way_to_a_suspended_sequence_before_it() -> None:
    """Each holds pages that the other needs, and none can leave the device: without a claimant both would wait."""
    bench = SchedulerBench(FakeCacheManager([9], [], reuse=False), max_num_tokens=64)
    a, _ = running(bench, 11, 19, max_tokens=13)
    # The better one is suspended (as by one before it that is gone).
    bench.pages.suspend(a)
    bench.scheduler._queues.suspend(a)
    bench.manager.totals = [8]
    plans = bench.run()
    [resumed] = [plan for plan in plans if plan.resumed]
    assert names(resumed.resumed) == ["a"]
    assert names(resumed.preempted) == names(resumed.refused[:1]) == ["b"]
    assert [chunk.seq for chunk in resumed.chunks] == [a]
    assert plans.index(resumed) > 0, "b computed as long as there were pages"


def test_a_refused_resume_waits_for_transfers_instead_of_taking_pages() -> None:
    """While a transfer holds pages nothing is taken by force: its end brings more of them."""
    manager = FakeCacheManager([8], [], max_util_for_resume=0.5)
    bench = SchedulerBench(manager, max_num_tokens=32)
    sender, b = running(bench, 11, 11, max_tokens=9)
    assert sender.cache is not None
    lease = sender.cache.hold(11)
    bench.finish(sender)
    bench.scheduler.pause()
    for _ in range(3):
        plan = bench.step()
        assert plan.is_idle
        assert names(plan.refused) == ["b"]
    lease.release()
    plans = bench.run()
    assert names(plans[0].resumed) == ["b"]
    assert preempted(plans) == []
    assert b.phase is Phase.FINISHED
