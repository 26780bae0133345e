"""When memory moves between pools, and how much (semantics §3.9)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_layouts import GroupOf, layout_of

from kvmesh.cache.demand import pages_bytes
from kvmesh.cache.ratios import byte_ratio
from kvmesh.cache.rebalance import MovingAverage, RebalanceTuner, mismatched
from kvmesh.config import KvPoolRebalanceConfig

LAYOUT = layout_of(GroupOf(10), GroupOf(5, window=16))
AT_ONCE = {"min_sampled_kv_caches": 0, "cooldown_secs": 0, "target_ratio_update_interval": 1}
HALVES = (0.5, 0.5)

Make = Callable[..., RebalanceTuner]


@pytest.fixture
def make() -> Make:
    def make(levels: int = 3, *, floors: tuple[int, ...] = (1, 1), **config: Any) -> RebalanceTuner:
        return RebalanceTuner(
            KvPoolRebalanceConfig(**{**AT_ONCE, **config}),
            LAYOUT,
            now_s=100.0,
            level_bytes=[10_000] * levels,
            floors=[floors] * levels,
        )

    return make


class TestThreshold:
    def test_the_bound_itself_is_a_mismatch(self) -> None:
        """§3.9 CHECK: threshold 1.25, current (.5, .5), target (.6, .4): .4 / .5 = 1 / 1.25, strictly -> adjust."""
        assert mismatched(HALVES, (0.6, 0.4), 1.25)
        assert not mismatched(HALVES, (0.6, 0.4), 1.2501)
        assert not mismatched(HALVES, (0.59, 0.41), 1.25)

    def test_the_upper_bound_is_one_too(self) -> None:
        assert mismatched((0.4, 0.6), (0.5, 0.5), 1.25)
        assert not mismatched((0.41, 0.59), (0.5, 0.5), 1.25)

    @pytest.mark.parametrize("tenths", range(1, 10))
    def test_exactly(self, tenths: int) -> None:
        """Quotients of floats would fall on either side of the bound."""
        current = Fraction(tenths, 10)
        assert mismatched([float(current)], [current / Fraction(11, 10)], 1.1)
        assert mismatched([float(current)], [current * Fraction(11, 10)], 1.1)

    def test_a_pool_without_memory(self) -> None:
        assert mismatched((0.0, 1.0), (0.1, 0.9), 1.25)

    @given(st.lists(st.integers(1, 100), min_size=1, max_size=5), st.floats(1.001, 4))
    def test_a_ratio_matches_itself(self, shares: list[int], threshold: float) -> None:
        ratio = [Fraction(share, sum(shares)) for share in shares]
        assert not mismatched(ratio, ratio, threshold)


class TestTargets:
    def test_the_first_sample_is_the_average(self) -> None:
        average = MovingAverage(0.75)
        assert average.value is None
        average.add(8)
        assert average.value == 8
        average.add(16)
        assert average.value == 10

    def test_none_before_the_interval_is_over(self, make: Make) -> None:
        tuner = make(target_ratio_update_interval=2)
        tuner.on_create(0)
        tuner.on_close(100.0, 100.0)
        assert tuner.targets() is None
        assert not tuner.need_adjustment(1e9, [HALVES] * 3)
        tuner.on_close(100.0, 100.0)
        assert tuner.targets() is not None

    def test_the_device_follows_capacity_and_history_and_cold_levels_what_is_reused(self, make: Make) -> None:
        tuner = make()
        tuner.on_create(16)
        tuner.on_close(401.0**2, 400.0**2)
        # Device: 101 blocks, of which the window of 16 has left behind floor((400 + 1 - 16) / 4) = 96.
        # Cold: 4 blocks, all in the window: floor((16 + 1 - 16) / 4) = 0.
        device, host, disk = tuner.targets() or ()
        pages = tuner.target_pages() or ()
        assert pages[0] == (int(10_000 * 1010 / 1035) // 10, 10_000 * 25 // 1035 // 5)
        assert pages[1] == pages[2] == (int(10_000 * 40 / 60) // 10, int(10_000 * 20 / 60) // 5)
        assert device == byte_ratio(pages[0], LAYOUT)
        assert host == disk == byte_ratio(pages[1], LAYOUT)

    def test_root_mean_square(self, make: Make) -> None:
        """Long requests weigh more than in a mean: (100 and 700) are as two of 500."""
        mixed, equal = (make(1, moving_average_decay=0.5, target_ratio_update_interval=2) for _ in range(2))
        for tokens in (100.0, 700.0):
            mixed.on_close(tokens**2, tokens**2)
        for _ in range(2):
            equal.on_close(500.0**2, 500.0**2)
        assert mixed.target_pages() == equal.target_pages()

    def test_floors_bound_the_targets(self, make: Make) -> None:
        tuner = make(1, floors=(1, 500))
        tuner.on_close(4000.0**2, 4000.0**2)
        assert tuner.target_pages() == ((750, 500),)

    def test_what_cannot_be_reached_is_not_asked_for(self, make: Make) -> None:
        tuner = make(1, floors=(1, 500))
        tuner.on_close(4000.0**2, 4000.0**2)
        assert not tuner.need_adjustment(1e9, [byte_ratio([750, 500], LAYOUT)])

    def test_sequences_without_capacity_do_not_count(self, make: Make) -> None:
        tuner = make()
        tuner.on_close(0.0, 0.0)
        assert tuner.targets() is None

    def test_nothing_is_reused(self, make: Make) -> None:
        """One page of each group is the least that a request has."""
        tuner = make(2)
        tuner.on_create(0)
        tuner.on_close(100.0**2, 100.0**2)
        assert (tuner.target_pages() or ())[1] == (int(10_000 * 10 / 15) // 10, 10_000 * 5 // 15 // 5)

    @given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), min_size=1, max_size=30))
    def test_targets_keep_quota_and_floors(self, requests: list[tuple[int, int]]) -> None:
        tuner = RebalanceTuner(
            KvPoolRebalanceConfig(**AT_ONCE, moving_average_decay=0.9),
            LAYOUT,
            now_s=0.0,
            level_bytes=[2000, 700],
            floors=[(20, 30), (1, 1)],
        )
        for reused, capacity in requests:
            tuner.on_create(reused)
            tuner.on_close(float(capacity**2), float((capacity - 1) ** 2))
            device, cold = tuner.target_pages() or ()
            assert pages_bytes(device, LAYOUT) <= 2000
            assert pages_bytes(cold, LAYOUT) <= 700
            assert device[0] >= 20
            assert device[1] >= 30
            assert min(cold) >= 1
            targets = tuner.targets() or ()
            assert [sum(ratio) for ratio in targets] == [1, 1]
            assert not tuner.need_adjustment(1.0, targets)


class TestTime:
    def test_enough_samples(self, make: Make) -> None:
        """§1.1 min_sampled_kv_caches."""
        tuner = make(1, min_sampled_kv_caches=3)
        for number in range(3):
            assert not tuner.need_adjustment(200.0, [HALVES]), number
            tuner.on_close(4000.0**2, 4000.0**2)
        assert tuner.need_adjustment(200.0, [HALVES])

    def test_the_cooldown_starts_with_the_manager_and_after_each_adjustment(self, make: Make) -> None:
        """§1.1 cooldown_secs."""
        tuner = make(1, cooldown_secs=120.0)
        tuner.on_close(4000.0**2, 4000.0**2)
        assert not tuner.need_adjustment(219.9, [HALVES])
        assert tuner.need_adjustment(220.0, [HALVES])
        tuner.adjusted(230.0)
        assert not tuner.need_adjustment(349.9, [HALVES])
        assert tuner.need_adjustment(350.0, [HALVES])

    def test_the_device_and_the_coldest_level_count(self, make: Make) -> None:
        """§3.9: GPU or last level mismatch; the level in between is moved along but asks for nothing."""
        tuner = make()
        tuner.on_create(16)
        tuner.on_close(401.0**2, 400.0**2)
        device, host, disk = tuner.targets() or ()
        assert not tuner.need_adjustment(200.0, [device, host, disk])
        assert not tuner.need_adjustment(200.0, [device, (0.1, 0.9), disk])
        assert tuner.need_adjustment(200.0, [(0.1, 0.9), host, disk])
        assert tuner.need_adjustment(200.0, [device, host, (0.1, 0.9)])
