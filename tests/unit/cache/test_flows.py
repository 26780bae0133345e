"""§3.10: hits, offloads, onboards, drops and damage by level and layer group; their sums are the counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from v1_cache import SmallCache

from kvmesh.cache.flows import GroupFlows, PageFlows
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.stats import CacheStats
from kvmesh.hashing import ReuseScope

Factory = Callable[..., KvCacheManager]


def test_places_are_counted_apart() -> None:
    flows = PageFlows(2, 3)
    flows.note("offloaded", 1, np.array([2, 0, 2], dtype=np.uint8))
    flows.note("dropped", np.array([0, 1, 1], dtype=np.uint8), np.array([0, 1, 1], dtype=np.uint8))
    flows.note("dropped", np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8))
    flows.note("damaged", np.array([1, 1], dtype=np.uint8), 2)
    flows.add("reused_full", 0, 1, 7)
    assert flows.snapshot() == (
        GroupFlows(0, 0, dropped=1),
        GroupFlows(0, 1, reused_full=7),
        GroupFlows(0, 2),
        GroupFlows(1, 0, offloaded=1),
        GroupFlows(1, 1, dropped=2),
        GroupFlows(1, 2, offloaded=2, damaged=2),
    )


def test_many_levels_and_groups_do_not_overflow_a_byte() -> None:
    flows = PageFlows(3, 200)
    flows.note("onboarded", np.array([2], dtype=np.uint8), np.array([199], dtype=np.uint8))
    assert flows.snapshot()[-1] == GroupFlows(2, 199, onboarded=1)


def check_sums(stats: CacheStats) -> None:
    counters = stats.counters
    for name in ("copied", "offloaded", "onboarded", "dropped", "damaged"):
        assert sum(getattr(one, name) for one in stats.flows) == getattr(counters, f"{name}_pages"), name


def run(manager: KvCacheManager, prompt: np.ndarray) -> bool:
    """One request from its creation to its end; whether it got pages."""
    sequence = manager.create(ReuseScope(), prompt, "r")
    served = sequence.resume() and sequence.resize(len(prompt))
    if served:
        sequence.commit(prompt[sequence.committed :])
        sequence.stop_committing()
    sequence.close()
    return served


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_a_prompt_s_way_through_the_tiers(make_manager: Factory, windows: tuple[int | None, ...]) -> None:
    manager = make_manager(4, host=4, windows=windows, cold_tier_offload_min_priority=0)
    first, second = np.arange(16, dtype=np.int32), np.arange(100, 116, dtype=np.int32)
    assert run(manager, first)
    assert all(one == GroupFlows(one.level, one.group) for one in manager.stats().flows), "nothing has moved"
    assert run(manager, second)
    host = [one for one in manager.stats().flows if one.level == 1]
    assert all(one.offloaded > 0 for one in host)
    check_sums(manager.stats())
    assert run(manager, first)
    stats = manager.stats()
    check_sums(stats)
    host = [one for one in stats.flows if one.level == 1]
    full = host[0]
    assert (full.reused_full, full.reused_partial) == (3, 1), "15 of 16 tokens were on the host"
    assert full.onboarded == 3, "the partly matched block was copied, not moved"
    if len(host) > 1:
        assert (host[1].reused_full, host[1].reused_partial) == (1, 1), "blocks 2 and 3 are in the window of token 15"


def test_what_was_created_in_vain_is_not_counted(make_manager: Factory) -> None:
    """§3.10: an admission that gets no pages is tried again, and would count its hits each time."""
    manager = make_manager(6, host=4)
    prompt = np.arange(10, dtype=np.int32)
    run(manager, prompt)
    before = manager.stats()
    for resume in (False, True):
        cache = manager.create(ReuseScope(), prompt, "r")
        assert cache.num_cached_tokens == 9
        assert not resume or cache.resume()
        assert not resume or not cache.resize(100)
        cache.close()
    after = manager.stats()
    assert after.counters == replace(before.counters, copied_pages=1), "a copy was made"
    assert after.flows == (before.flows[0]._replace(copied=1), *before.flows[1:])
    assert run(manager, prompt)
    check_sums(manager.stats())
    assert manager.stats().counters.prompt_tokens == 20
    assert manager.stats().counters.cached_tokens == 9


def test_hits_on_the_device_alone(make_manager: Factory) -> None:
    manager = make_manager(16)
    prompt = np.arange(10, dtype=np.int32)
    run(manager, prompt)
    run(manager, np.concatenate([prompt, prompt[:4]]))
    [device] = manager.stats().flows
    assert (device.reused_full, device.reused_partial) == (2, 1)
    counters = manager.stats().counters
    assert (counters.reused_full_blocks, counters.reused_partial_blocks) == (2, 1)


@pytest.mark.parametrize("min_priority", [0, 40])
@pytest.mark.parametrize("seed", range(3))
def test_sums_are_the_counters_whatever_happens(make_manager: Factory, seed: int, min_priority: int) -> None:
    random = np.random.default_rng(seed)
    manager = make_manager(8, host=5, disk=4, windows=(None, 8), cold_tier_offload_min_priority=min_priority)
    prompts = [random.integers(0, 50, random.integers(1, 30)).astype(np.int32) for _ in range(6)]
    served = 0
    for _ in range(150):
        prompt = prompts[random.integers(len(prompts))]
        served += run(manager, prompt[: random.integers(1, len(prompt) + 1)])
        check_sums(manager.stats())
    assert served > 100
    totals = GroupFlows(0, 0, *np.sum([one[2:] for one in manager.stats().flows], axis=0).tolist())
    assert min(totals.reused_full, totals.reused_partial, totals.dropped) > 0
    assert (totals.offloaded > 0) == (totals.onboarded > 0) == (min_priority == 0)


@pytest.mark.parametrize("min_priority", [0, 40])
@pytest.mark.parametrize("seed", range(2))
def test_v1_counts_alike(seed: int, min_priority: int) -> None:
    random = np.random.default_rng(seed)
    cache = SmallCache(8, host=5, windows=(None, 8), cold_tier_offload_min_priority=min_priority)
    prompts = [random.integers(0, 50, random.integers(1, 30)).tolist() for _ in range(6)]
    for _ in range(100):
        prompt = prompts[random.integers(len(prompts))]
        cache.serve(prompt[: random.integers(1, len(prompt) + 1)])
        check_sums(cache.manager.stats())
    totals = GroupFlows(0, 0, *np.sum([one[2:] for one in cache.manager.stats().flows], axis=0).tolist())
    assert min(totals.reused_full, totals.reused_partial, totals.dropped) > 0
    assert (totals.offloaded > 0) == (totals.onboarded > 0) == (min_priority == 0)
    cache.finish()
