"""Random workloads over a small fake cache: bounds hold in every step, and whoever came is served to the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from fake_cache import COLD, FakeCacheManager, FakeLease
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduling import SchedulerBench, names

from kvmesh.engine.plan import StepPlan
from kvmesh.engine.reservation import PeakPages, longest_fitting
from kvmesh.engine.scheduler import SchedulerPolicy
from kvmesh.engine.sequence import Phase, Sequence

MAX_LENGTH = 64


@dataclass
class Workload:
    """A bench, what transfers hold, and what every step must keep to."""

    bench: SchedulerBench
    leases: list[FakeLease] = field(default_factory=list)
    rebalanced: bool = False

    def submit(self, prompt: int, answer: int, first: int, priority: int, kind: str) -> None:
        """A request that intake would let through."""
        manager = self.bench.manager
        peak = PeakPages(manager.pages_needed, manager.block, self.bench.limits.max_num_tokens)
        fits = longest_fitting(peak.of_context, manager.totals, MAX_LENGTH)
        prompt = max(1, min(prompt, fits - answer))
        if prompt + answer - 1 > fits:
            return
        if not self.bench.limits.chunked_prefill and prompt > self.bench.limits.max_num_tokens:
            return
        self.bench.add(
            f"s{len(self.bench.all)}",
            prompt,
            max_tokens=answer + (kind == "received"),
            priority=priority,
            first=first,
            kind="context" if kind == "context" else "aggregated",
            received=kind == "received" and prompt + answer <= fits,
        )

    def step(self) -> StepPlan:
        """One step; context requests leave a lease behind."""
        manager = self.bench.manager
        finish = self.bench.finish

        def offer(seq: Sequence) -> None:
            if seq.kind == "context" and seq.phase is Phase.RUNNING:
                assert seq.cache is not None
                self.leases.append(seq.cache.hold(seq.history.prompt_length))  # type: ignore[arg-type]
            finish(seq)

        self.bench.finish = offer  # type: ignore[method-assign]
        try:
            plan = self.bench.step()
        finally:
            self.bench.finish = finish  # type: ignore[method-assign]
        if self.bench.limits.policy == "guaranteed_no_evict" and not self.rebalanced:
            assert not plan.gave_way, "nobody gives way"
        if not manager.can_suspend:
            assert not plan.suspended
        self._check_queues()
        self._check_order(plan)
        return plan

    def _check_queues(self) -> None:
        scheduler = self.bench.scheduler
        for queue in (scheduler.waiting, scheduler.running):
            assert queue == sorted(queue, key=lambda seq: seq.rank)
        live = [seq for seq in self.bench.all if seq.phase is not Phase.FINISHED]
        assert sorted(names(scheduler.waiting + scheduler.running)) == sorted(names(live)), "a sequence is lost"
        for seq in scheduler.waiting:
            assert (seq.cache is not None) == (seq.phase is Phase.SUSPENDED)
        for seq in scheduler.running:
            assert seq.cache is not None
        assert len(self.bench.manager.caches) == sum(seq.cache is not None for seq in live)

    def _check_order(self, plan: StepPlan) -> None:
        """Nobody gets a cache while a suspended sequence of better rank got none for want of pages."""
        waits = [seq.rank for seq in self.bench.scheduler.waiting if seq.phase is Phase.SUSPENDED]
        if waits and not plan.gave_way:
            assert all(seq.rank < min(waits) for seq in plan.admitted if not seq.awaits_transfer)

    def transfers_end(self) -> None:
        """Every offered prompt is fetched, every awaited one arrives."""
        while self.leases:
            self.leases.pop().release()
        for seq in self.bench.scheduler.running:
            if seq.phase is Phase.RECEIVING:
                self.bench.arrive(seq)

    def damage(self, index: int) -> None:
        """Break a page in the cold tier."""
        cold = [page for page in self.bench.manager.pages if page.level == COLD]
        if cold:
            self.bench.manager.damage(cold[index % len(cold)])


requests = st.tuples(
    st.sampled_from([4, 1, 9, 15, 30]),
    st.sampled_from([32, 24, 24, 9, 1]),
    st.integers(0, 10).map(lambda index: 50 * index),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from(["aggregated"] * 6 + ["context", "received"]),
)
bursts = st.tuples(st.just("burst"), st.lists(requests, min_size=2, max_size=6))
steps = st.tuples(st.just("step"), st.integers(2, 14))
operations = st.lists(
    st.one_of(
        bursts,
        steps,
        steps,
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("transfers end")),
        st.tuples(st.just("damage"), st.integers(0, 100)),
        st.tuples(st.just("rebalance")),
    ),
    min_size=6,
    max_size=30,
)
caches = st.sampled_from(
    [
        ((None,), [14], [0]),
        ((None,), [14], [3]),
        ((None,), [14], [12]),
        ((None,), [14], [60]),
        ((None, 8), [16, 12], [0, 0]),
        ((None, 8), [16, 12], [6, 2]),
        ((8, 12), [13, 13], [20, 20]),
    ]
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cache=caches,
    policy=st.sampled_from(["max_utilization", "max_utilization", "guaranteed_no_evict"]),
    max_util=st.sampled_from([1.0, 0.9, 0.5]),
    max_batch_size=st.sampled_from([4, 6, 2, 1]),
    max_num_tokens=st.sampled_from([32, 12, 5]),
    chunked=st.booleans(),
    prefix_aware=st.booleans(),
    cap=st.sampled_from([None, None, MAX_LENGTH, 100]),
    operations=operations,
)
def test_everybody_is_served(
    cache: tuple[tuple[int | None, ...], list[int], list[int]],
    policy: SchedulerPolicy,
    max_util: float,
    max_batch_size: int,
    max_num_tokens: int,
    chunked: bool,
    prefix_aware: bool,
    cap: int | None,
    operations: list[tuple[object, ...]],
) -> None:
    windows, device, cold = cache
    manager = FakeCacheManager(device, cold if any(cold) else (), windows=windows, max_util_for_resume=max_util)
    bench = SchedulerBench(
        manager,
        policy=policy,
        max_batch_size=max_batch_size,
        max_num_tokens=max(max_num_tokens, max_batch_size),
        chunked_prefill=chunked,
        prefix_aware=prefix_aware,
        context_kv_cap_tokens=cap,
    )
    work = Workload(bench)
    for name, *arguments in operations:
        match name:
            case "burst":
                for request in arguments[0]:  # type: ignore[attr-defined]
                    work.submit(*request)
            case "step":
                for _ in range(arguments[0]):  # type: ignore[call-overload]
                    work.step()
            case "cancel":
                live = [seq for seq in bench.all if seq.phase not in (Phase.FINISHED, Phase.RECEIVING)]
                if live:
                    bench.finish(live[arguments[0] % len(live)])  # type: ignore[operator]
            case "transfers end":
                work.transfers_end()
            case "damage":
                work.damage(arguments[0])  # type: ignore[arg-type]
            case "rebalance":
                if not work.leases and all(seq.phase is Phase.RUNNING for seq in bench.scheduler.running):
                    work.rebalanced = True
                    bench.scheduler.go_on(bench.scheduler.pause())
    steps = 0
    while any(seq.phase is not Phase.FINISHED for seq in bench.all):
        work.transfers_end()
        plan = work.step()
        steps += 1
        assert not plan.is_idle, {seq.request_id: seq.phase for seq in bench.all}
        assert steps < 3000, "somebody starves"
    work.transfers_end()
    assert not manager.caches
    manager.check()
