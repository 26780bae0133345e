"""The scheduler over the real cache, without a model: random loads on few pages, every page's bookkeeping checked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from scheduling import SchedulerBench

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.storage import Storage
from kvmesh.engine.reservation import PeakPages, longest_fitting
from kvmesh.engine.sequence import Phase

BLOCK = 4
CASES: list[dict[str, Any]] = [
    {"windows": (None,), "pages": (14,)},
    {"windows": (None,), "pages": (14, 3)},
    {"windows": (None,), "pages": (14, 60)},
    {"windows": (None, 8), "pages": (18,)},
    {"windows": (None, 8), "pages": (18, 6), "enable_swa_scratch_reuse": True},
    {"windows": (None, 8), "pages": (18, 40), "policy": "per_request"},
    {"windows": (6, 9), "pages": (9, 6), "policy": "per_request", "enable_swa_scratch_reuse": True},
    {"windows": (None,), "pages": (14, 6, 30), "enable_block_reuse": False},
]


def checked_manager(
    windows: tuple[int | None, ...], pages: tuple[int, ...], directory: Path, **settings: Any
) -> KvCacheManager:
    """Pages of each group by level: device, host, disk."""
    layers = tuple(
        LayerCacheSpec(
            layer_index=index, kind="attention", num_kv_heads=index + 1, head_dim=8, dtype="float32", window=window
        )
        for index, window in enumerate(windows)
    )
    layout = PageLayout.build(CacheRequirements(layers), BLOCK)
    levels = [[count] * len(layout.pools) for count in pages]
    storage = Storage(layout, levels, ("gpu", "host", "disk")[: len(levels)], CpuDevice(1 << 24), disk_path=directory)
    manager = KvCacheManager(layout, storage, levels, CacheSettings(**settings))
    manager.check = manager.check_integrity  # type: ignore[attr-defined]
    return manager


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_everybody_is_served(case: dict[str, Any], policy: str, tmp_path: Path) -> None:
    gave_way = sum(random_load(random.Random(seed), {**case}, policy, tmp_path) for seed in range(4))
    assert gave_way > 0 or policy == "guaranteed_no_evict"


def random_load(chance: random.Random, case: dict[str, Any], policy: str, directory: Path) -> int:
    """Serve a random load to its end; how often a sequence gave way."""
    manager = checked_manager(
        case.pop("windows"), case.pop("pages"), directory, max_util_for_resume=chance.choice([1.0, 0.9]), **case
    )
    bench = SchedulerBench(
        manager,  # type: ignore[arg-type]
        policy=policy,
        max_batch_size=chance.choice([3, 6]),
        max_num_tokens=chance.choice([8, 16]),
        prefix_aware=chance.random() < 0.7,
    )
    peak = PeakPages(manager.pages_needed, BLOCK, bench.limits.max_num_tokens)
    longest = longest_fitting(peak.of_context, manager.reservable_pages(), 60)
    leases = []
    idle = gave_way = 0
    for step in range(600):
        if step < 200 and chance.random() < 0.15:
            prompt, answer = chance.choice([3, 9, 17, 30]), chance.choice([1, 12, 24])
            if prompt + answer - 1 <= longest:
                received = chance.random() < 0.2
                bench.add(
                    f"s{len(bench.all)}",
                    prompt,
                    max_tokens=answer + received,
                    priority=chance.choice([0, 0, 1]),
                    first=100 * chance.randrange(12),
                    received=received and prompt + answer <= longest,
                )
        live = [seq for seq in bench.all if seq.phase not in (Phase.FINISHED, Phase.RECEIVING)]
        if live and chance.random() < 0.01:
            bench.finish(chance.choice(live))
        if chance.random() < 0.03 and not leases and all(s.phase is Phase.RUNNING for s in bench.scheduler.running):
            bench.scheduler.go_on(bench.scheduler.pause())
        if leases and chance.random() < 0.3:
            leases.pop().release()
        plan = bench.step()
        gave_way += len(plan.suspended) + len(plan.preempted)
        # An outgoing transfer now and then holds the pages of a sequence that may end meanwhile.
        running = [seq for seq in bench.scheduler.running if seq.phase is Phase.RUNNING and seq.num_computed]
        if running and len(leases) < 2 and chance.random() < 0.02:
            seq = chance.choice(running)
            assert seq.cache is not None
            leases.append(seq.cache.hold(seq.num_computed))
        for seq in bench.scheduler.running:
            if seq.phase is Phase.RECEIVING and chance.random() < 0.3:
                bench.arrive(seq)
        waits = leases or any(seq.phase is Phase.RECEIVING for seq in bench.scheduler.running)
        idle = idle + 1 if plan.is_idle and plan.refused and not waits else 0
        assert idle < 3, "nothing can go on"
        if step > 200 and all(seq.phase is Phase.FINISHED for seq in bench.all):
            break
    assert all(seq.phase is Phase.FINISHED for seq in bench.all), "somebody starves"
    while leases:
        leases.pop().release()
    assert manager.stats().open_sequences == 0
    manager.check_integrity()
    manager.close()
    return gave_way
