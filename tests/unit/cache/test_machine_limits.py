"""Stated sizes beside what the machine has (§2 host_cache_size, disk_cache_size)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from page_layouts import GroupOf, layout_of

from kvmesh.cache.layout import PageLayout
from kvmesh.cache.machine_limits import MAX_LEVEL_PAGES, PAGE_BOOKKEEPING_BYTES, check_bookkeeping, machine_notes
from kvmesh.cache.sizing import LevelPlan, SizingError, plan_levels
from kvmesh.config import KvCacheConfig

FULL = GroupOf(10)


def settings_of(**config: Any) -> KvCacheConfig:
    return KvCacheConfig.model_validate({"host_cache_size": 0, "free_gpu_memory_fraction": 1.0, **config})


def plan(layout: PageLayout, free: int, **config: Any) -> LevelPlan:
    return plan_levels(
        settings_of(**config),
        layout,
        free_device_bytes=free,
        available_host_bytes=1 << 30,
        max_seq_len=4096,
        max_batch_size=8,
        max_num_tokens=512,
    )


class TestMoreThanTheMachineHas:
    def notes(self, host_bytes: int | None, disk_free_bytes: int | None, **config: Any) -> list[str]:
        made = plan(layout_of(FULL), 10_000_000, **config)
        return machine_notes(settings_of(**config), made, host_bytes=host_bytes, disk_free_bytes=disk_free_bytes)

    def test_a_stated_host_tier_is_compared_with_the_memory_that_is_available(self) -> None:
        (note,) = self.notes(999_999, None, host_cache_size=1_000_000)
        assert all(part in note for part in ("1000000 bytes", "999999 bytes"))
        assert self.notes(1_000_000, None, host_cache_size=1_000_000) == []
        assert self.notes(None, None, host_cache_size=1_000_000) == []
        assert self.notes(0, None, host_cache_size=None) == [], "automatic"

    def test_a_disk_tier_is_compared_with_the_free_space(self, tmp_path: Path) -> None:
        disk = {"host_cache_size": 0, "disk_cache_size": 1_000_000, "disk_cache_path": str(tmp_path)}
        (note,) = self.notes(0, 999_999, **disk)
        assert all(part in note for part in ("1000000 bytes", "999999 bytes", str(tmp_path)))
        assert self.notes(0, 1_000_000, **disk) == []
        assert self.notes(0, None, **disk) == []


class TestBookkeeping:
    def test_a_level_of_too_many_pages_is_refused(self, tmp_path: Path) -> None:
        layout = layout_of(FULL)
        size = (MAX_LEVEL_PAGES + 1) * layout.pools[0].page_bytes
        made = plan(layout, 10_000_000, disk_cache_size=size, disk_cache_path=str(tmp_path))
        with pytest.raises(SizingError, match=rf"{size} bytes would have {MAX_LEVEL_PAGES + 1} pages.*disk_cache_size"):
            check_bookkeeping(made, layout, 0)

    @pytest.mark.parametrize(("tier", "setting"), [("gpu", "max_gpu_total_bytes"), ("host", "host_cache_size")])
    def test_the_setting_of_the_largest_level_is_named(self, tier: str, setting: str) -> None:
        layout = layout_of(FULL)
        made = plan(layout, 10_000_000, **({"host_cache_size": 20_000_000} if tier == "host" else {}))
        needed = sum(map(sum, made.num_pages)) * PAGE_BOOKKEEPING_BYTES
        with pytest.raises(SizingError, match=rf"a {tier} tier.*{needed} bytes.*{needed - 1} are available.*{setting}"):
            check_bookkeeping(made, layout, needed - 1)

    def test_what_fits_or_cannot_be_judged_is_not_refused(self) -> None:
        layout = layout_of(FULL)
        made = plan(layout, 10_000_000)
        for available in (0, sum(made.num_pages[0]) * PAGE_BOOKKEEPING_BYTES):
            check_bookkeeping(made, layout, available)
