"""How many pages fit on each level (semantics §2, §2.2, §3.8)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_layouts import GroupOf, layout_of

from kvmesh.cache.demand import Limits, longest_request, pages_bytes
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.sizing import (
    LevelPlan,
    SizingError,
    auto_host_bytes,
    device_quota_bytes,
    device_reserve_pages,
    plan_levels,
)
from kvmesh.config import KvCacheConfig

FULL, NARROW = GroupOf(10), GroupOf(5, window=64)


def plan(layout: PageLayout, free: int = 1 << 30, *, host: int = 1 << 30, **config: Any) -> LevelPlan:
    """A plan without a host tier, unless the configuration says otherwise."""
    limits = {
        name: config.pop(name, value)
        for name, value in {"max_seq_len": 4096, "max_batch_size": 8, "max_num_tokens": 512}.items()
    }
    machine = {name: config.pop(name) for name in ("ranks_per_host", "memlock_bytes", "page_locked") if name in config}
    settings = KvCacheConfig.model_validate({"host_cache_size": 0, "free_gpu_memory_fraction": 1.0, **config})
    return plan_levels(settings, layout, free_device_bytes=free, available_host_bytes=host, **limits, **machine)


def test_the_smallest_limit_wins() -> None:
    # §2.2 CHECK: fraction .5 of 1000 B, max_gpu_total_bytes 300 B, max_tokens -> 400 B.
    assert device_quota_bytes(fraction_bytes=500, max_bytes=300, token_bytes=400) == 300
    assert device_quota_bytes(fraction_bytes=None, max_bytes=None, token_bytes=400) == 400
    with pytest.raises(SizingError, match="quota not set"):
        device_quota_bytes(fraction_bytes=None, max_bytes=None, token_bytes=None)


def device_pages(config: KvCacheConfig, layout: PageLayout, free_bytes: int) -> tuple[int, ...]:
    """Pages by pool on the device, for one short request at a time."""
    limits = {"max_seq_len": layout.tokens_per_block, "max_batch_size": 1, "max_num_tokens": layout.tokens_per_block}
    sizes = {"free_device_bytes": free_bytes, "available_host_bytes": 0}
    return plan_levels(config, layout, **sizes, **limits).num_pages[0]


def test_max_tokens_can_be_resumed(make_layout) -> None:
    # §2 max_tokens CHECK: 1000 tokens, blocks of 32, utilisation .95: 1000 tokens are still resumable.
    layout = make_layout(32)
    config = KvCacheConfig(max_tokens=1000, free_gpu_memory_fraction=None)
    (pages,) = device_pages(config, layout, 1 << 30)
    assert pages == 34
    assert layout.num_blocks(1000) / pages <= config.max_util_for_resume


def test_limits_of_bytes(make_layout) -> None:
    layout = make_layout(4)
    block = layout.bytes_per_block
    assert device_pages(KvCacheConfig(free_gpu_memory_fraction=0.5), layout, 20 * block) == (10,)
    assert device_pages(KvCacheConfig(max_gpu_total_bytes=3 * block + 1), layout, 20 * block) == (3,)
    config = KvCacheConfig(free_gpu_memory_fraction=None, max_gpu_total_bytes=100 * block)
    assert device_pages(config, layout, 20 * block) == (20,)


def test_no_limit_is_a_clear_error(make_layout) -> None:
    with pytest.raises(SizingError, match="quota not set"):
        device_pages(KvCacheConfig(free_gpu_memory_fraction=None), make_layout(4), 100)


def test_settings_from_the_public_configuration() -> None:
    config = KvCacheConfig.model_validate(
        {"enable_partial_reuse": False, "max_util_for_resume": 0.5, "block_reuse_config": {"policy": "per_request"}}
    )
    assert CacheSettings.from_config(config) == CacheSettings(True, False, 0.5, "per_request")
    assert CacheSettings.from_config(KvCacheConfig()) == CacheSettings()
    other = KvCacheConfig.model_validate({"block_reuse_config": {"policy": "per_conversation", "max_num_turns": 3}})
    assert CacheSettings.from_config(other) == CacheSettings(policy="per_conversation", max_num_turns=3)


class TestDeviceLevel:
    """The split between pools, and what it is when there is one pool only."""

    def test_one_pool_gets_all_of_it(self) -> None:
        got = plan(layout_of(FULL), 10_019)
        assert got.num_pages == ((1001,),)
        assert (got.tiers, got.device_bytes, got.ratio) == (("gpu",), 10_019, (1.0,))

    def test_the_smallest_limit_wins(self) -> None:
        """§2.2: fraction .5 of 1000 B, max_gpu_total_bytes 300 B, max_tokens 400 B -> 300 B."""
        limits = {"free_gpu_memory_fraction": 0.5, "max_util_for_resume": 1.0, "max_tokens": 160}
        layout = layout_of(FULL)
        assert plan(layout, 1000, **limits, max_gpu_total_bytes=300).device_bytes == 300
        assert plan(layout, 1000, **limits).device_bytes == 400
        assert plan(layout, 600, **limits).device_bytes == 300
        assert plan(layout, 100, free_gpu_memory_fraction=None, max_gpu_total_bytes=300).device_bytes == 100

    def test_max_tokens_can_be_resumed(self) -> None:
        """§2 max_tokens CHECK: 1000 tokens, blocks of 32, utilisation .95: 1000 tokens are still resumable."""
        got = plan(layout_of(FULL, tokens_per_block=32), max_tokens=1000)
        assert got.num_pages == ((34,),)
        assert 32 / 34 <= 0.95

    def test_v1_knows_no_utilisation(self) -> None:
        """§2 max_util_for_resume is V2's."""
        got = plan(layout_of(FULL, tokens_per_block=32), max_tokens=1000, use_kv_cache_manager_v2=False)
        assert got.num_pages == ((32,),)

    @given(
        max_tokens=st.integers(1, 20_000),
        window=st.integers(1, 5000),
        batch=st.integers(1, 100),
        util=st.sampled_from([1.0, 0.95, 0.5]),
        choice=st.sampled_from([{}, {"avg_seq_len": 300}, {"pool_ratio": [0.2, 0.8]}, {"pool_ratio": [1.0]}]),
    )
    def test_max_tokens_can_be_resumed_beside_a_window(
        self, max_tokens: int, window: int, batch: int, util: float, choice: dict[str, Any]
    ) -> None:
        """§2 max_tokens, with windows: whatever the ratio and the floors, the tokens fit and can be resumed."""
        layout = layout_of(FULL, GroupOf(5, window=window))
        got = plan(layout, max_tokens=max_tokens, max_batch_size=batch, max_util_for_resume=util, **choice)
        (full, _), *_ = got.num_pages
        assert layout.num_blocks(max_tokens) <= full * Fraction(str(util))
        assert got.longest_request_tokens >= min(max_tokens, 4096)

    def test_pool_ratio(self) -> None:
        """§2.2: ratios (.75, .25) of 1000 B with 10 B and 5 B slots -> 75 and 50 slots; cold tiers keep 75:50."""
        got = plan(
            layout_of(FULL, NARROW),
            1000,
            pool_ratio=[0.75, 0.25],
            host_cache_size=2000,
            disk_cache_size=500,
            disk_cache_path="/",
        )
        assert got.tiers == ("gpu", "host", "disk")
        assert got.num_pages == ((75, 50), (150, 100), (37, 25))
        assert got.level_bytes == (1000, 2000, 500)
        assert got.ratio == (0.75, 0.25)

    def test_pool_ratio_where_the_constraints_do_not_fit(self) -> None:
        """It is kept, and the pools keep what the longest request then needs: 50 blocks, all in the window's chunk."""
        got = plan(layout_of(FULL, NARROW), 1000, pool_ratio=[0.75, 0.25])
        assert got.num_pages == ((75, 50),)
        assert got.longest_request_tokens == 200
        assert got.floors == ((50, 50),)
        assert "one request of at most 200 tokens; max_seq_len is 4096" in got.notes[0]

    def test_floors_outweigh_pool_ratio(self) -> None:
        """§2 pool_ratio: constraints stay as floors."""
        got = plan(layout_of(FULL, NARROW), 20_000, pool_ratio=[0.99, 0.01])
        assert got.floors == ((1086, 153),)
        assert got.num_pages == (((20_000 - 153 * 5) // 10, 153),)
        assert got.ratio == (0.99, 0.01)

    def test_a_pool_ratio_that_does_not_fit_the_model(self) -> None:
        got = plan(layout_of(FULL, NARROW), 20_000, pool_ratio=[1.0])
        # The default batch asks for 513 and 17 pages; the floor of the window is higher.
        assert got.num_pages == (((20_000 - 153 * 5) // 10, 153),)
        assert "pool_ratio has 1 values" in got.notes[0]

    def test_less_than_the_constraints(self) -> None:
        """The longest request that fits, and a page for every request of the batch as long as that fits."""
        got = plan(layout_of(FULL, NARROW), 3000)
        assert pages_bytes(got.num_pages[0], layout_of(FULL, NARROW)) <= 3000
        assert got.num_pages[0][1] >= 8
        longest = got.longest_request_tokens
        assert longest == longest_request(got.floors[0], layout_of(FULL, NARROW), Limits(4096, 8, 512, Fraction(1)))
        (note,) = got.notes
        assert f"of 3000 bytes holds one request of at most {longest} tokens; max_seq_len is 4096" in note
        assert 600 < longest < 1000

    def test_less_than_the_batch(self) -> None:
        got = plan(layout_of(FULL), 70)
        assert got.num_pages == ((7,),)
        assert got.notes[1] == "a KV cache of 70 bytes has pages for 7 requests at a time; max_batch_size is 8"

    def test_one_block_is_enough(self) -> None:
        layout = layout_of(FULL, NARROW, GroupOf(10, window=8))
        assert plan(layout, 25, max_batch_size=64).num_pages == ((2, 1),)
        with pytest.raises(SizingError, match=r"of 24 bytes has no room for one block of 4 tokens \(25 bytes\)"):
            plan(layout, 24)

    def test_no_limit(self) -> None:
        with pytest.raises(SizingError, match="quota not set"):
            plan(layout_of(FULL), free_gpu_memory_fraction=None)

    def test_an_average_above_the_maximum(self) -> None:
        with pytest.raises(SizingError, match="avg_seq_len 4097"):
            plan(layout_of(FULL), avg_seq_len=4097)

    @given(
        free=st.integers(0, 30_000),
        groups=st.lists(
            st.builds(GroupOf, page_bytes=st.integers(1, 9), window=st.none() | st.integers(1, 99)),
            min_size=1,
            max_size=4,
        ),
        host=st.none() | st.integers(0, 3000),
        util=st.sampled_from([1.0, 0.95]),
    )
    def test_no_level_takes_more_than_it_may(
        self, free: int, groups: list[GroupOf], host: int | None, util: float
    ) -> None:
        layout = layout_of(*groups)
        try:
            got = plan(layout, free, host=4000, host_cache_size=host, max_util_for_resume=util)
        except SizingError:
            assert layout.bytes_per_block > min(free, free if host in (None, 0) else host)
            return
        assert got.level_bytes[0] == free
        limits = Limits(4096, 8, 512, Fraction(1))
        assert longest_request(got.floors[0], layout, limits) == got.longest_request_tokens
        for pages, size, floors in zip(got.num_pages, got.level_bytes, got.floors, strict=True):
            assert pages_bytes(pages, layout) <= size
            assert all(count >= floor for count, floor in zip(pages, floors, strict=True))
            assert all(floor >= len(pool.groups) for floor, pool in zip(floors, layout.pools, strict=True))


class TestColdTiers:
    def test_automatic_host_tier(self) -> None:
        """§2 host_cache_size CHECK: memory 100, 4 ranks, quota 50 -> int(100 / 4 * 0.5) = 12."""
        assert auto_host_bytes(50, 100, ranks_per_host=4) == 12
        assert auto_host_bytes(10, 100, ranks_per_host=4) == 10
        got = plan(layout_of(FULL), 50, host=100, host_cache_size=None, ranks_per_host=4)
        assert got.tiers == ("gpu", "host")
        assert got.level_bytes == (50, 12)
        assert got.num_pages == ((5,), (1,))

    def test_memlock_counts_for_page_locked_memory_only(self) -> None:
        """decisions.md 11."""
        assert auto_host_bytes(50, 100, memlock_bytes=10) == 50
        assert auto_host_bytes(50, 100, memlock_bytes=11, page_locked=True) == 8
        assert auto_host_bytes(50, 100, page_locked=True) == 50
        got = plan(layout_of(FULL), 90, host=200, host_cache_size=None, memlock_bytes=30, page_locked=True)
        assert got.level_bytes == (90, 24)

    @pytest.mark.parametrize(
        ("config", "host", "note"),
        [
            ({"host_cache_size": None}, 0, "an automatic host_cache_size of 0 bytes is not positive"),
            ({"host_cache_size": -1}, 100, "host_cache_size of -1 bytes is not positive"),
        ],
    )
    def test_not_positive_is_the_quota_of_the_device(self, config: dict[str, Any], host: int, note: str) -> None:
        """§2 host_cache_size: non-positive -> device quota with a warning."""
        got = plan(layout_of(FULL), 200, host=host, max_seq_len=8, **config)
        assert got.level_bytes == (200, 200)
        assert got.notes == (f"{note}: the host tier gets the device's 200 bytes",)

    def test_zero_is_no_host_tier(self) -> None:
        """§2 host_cache_size CHECK: 0 -> tiers = [GPU]."""
        assert plan(layout_of(FULL), host_cache_size=0).tiers == ("gpu",)

    def test_disk_comes_second_without_a_host_tier(self) -> None:
        """§2.2: host 0 and a disk of 10 pages -> levels [GPU, disk]."""
        got = plan(layout_of(FULL), 1000, host_cache_size=0, disk_cache_size=100, disk_cache_path="/")
        assert got.tiers == ("gpu", "disk")
        assert got.num_pages == ((100,), (10,))

    def test_too_small_for_a_page_of_every_group(self) -> None:
        layout = layout_of(FULL, NARROW)
        with pytest.raises(SizingError, match=r"a host tier of 14 bytes has no room .* \(15 bytes\).*host_cache_size"):
            plan(layout, host_cache_size=14)
        with pytest.raises(SizingError, match=r"a disk tier of 14 bytes has no room .*; raise disk_cache_size"):
            plan(layout, disk_cache_size=14, disk_cache_path="/")
        got = plan(layout, host=28, host_cache_size=None)
        assert got.tiers == ("gpu",)
        assert "a host tier of 14 bytes has no room for one page of every layer group" in got.notes[-1]

    def test_every_group_has_a_page_on_every_level(self) -> None:
        got = plan(layout_of(FULL, NARROW), 100_000, pool_ratio=[0.999, 0.001], max_seq_len=4, host_cache_size=500)
        assert got.num_pages[1] == (49, 1)

    def test_v1_has_a_host_tier_only_where_it_is_stated(self) -> None:
        """§2 host_cache_size: V1: None or 0 means no offload."""
        v1 = {"use_kv_cache_manager_v2": False, "free": 1000, "max_seq_len": 8}
        layout = layout_of(FULL)
        assert plan(layout, **v1, host_cache_size=None).tiers == ("gpu",)
        assert plan(layout, **v1, host_cache_size=-5).tiers == ("gpu",)
        assert plan(layout, **v1, host_cache_size=100).num_pages == ((100,), (10,))


def test_a_pool_can_grow_until_the_others_have_their_floors() -> None:
    layout = layout_of(FULL, NARROW)
    got = plan(layout, 20_000)
    assert got.floors[0] == (1086, 153)
    reserve = device_reserve_pages(got, layout, got.device_bytes)
    assert reserve == [(20_000 - 153 * 5) // 10, (20_000 - 1086 * 10) // 5]
