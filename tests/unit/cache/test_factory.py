"""A manager from the public configuration: which one, and what happens when a tier cannot be had."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvmesh.cache import factory
from kvmesh.cache.device import CpuDevice, DeviceMemoryError
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.factory import create_manager, resolve_manager
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.sizing import SizingError
from kvmesh.cache.v1 import V1CacheManager
from kvmesh.config import ConfigError, KvCacheConfig
from kvmesh.net.clock import SystemClock


def make(layout: PageLayout, **fields: Any) -> Any:
    return create_manager(
        KvCacheConfig.model_validate(fields),
        layout,
        CpuDevice(1 << 20),
        event_sink=None,
        clock=SystemClock(),
        max_seq_len=64,
        max_batch_size=2,
        max_num_tokens=64,
    )


@pytest.mark.parametrize(
    ("fields", "tiers"),
    [
        ({"host_cache_size": 0}, ("gpu",)),
        ({"host_cache_size": 1 << 16}, ("gpu", "host")),
        ({}, ("gpu", "host")),
        ({"disk_cache_size": 1 << 16}, ("gpu", "host", "disk")),
        ({"host_cache_size": 0, "disk_cache_size": 1 << 16}, ("gpu", "disk")),
    ],
    ids=str,
)
def test_tiers(make_layout: Any, tmp_path: Path, fields: dict[str, Any], tiers: tuple[str, ...]) -> None:
    """§2 host_cache_size, disk_cache_size."""
    path = {"disk_cache_path": str(tmp_path)} if "disk_cache_size" in fields else {}
    manager = make(make_layout(), **fields, **path)
    assert isinstance(manager, KvCacheManager)
    assert manager.tiers == tiers
    assert manager.can_suspend is (len(tiers) > 1)
    manager.close()


@pytest.mark.parametrize(("choice", "kind"), [(True, KvCacheManager), (False, V1CacheManager)])
def test_the_manager_is_chosen(make_layout: Any, choice: bool, kind: type) -> None:
    manager = make(make_layout(), use_kv_cache_manager_v2=choice)
    assert isinstance(manager, kind)
    manager.close()


@pytest.mark.parametrize("preference", [True, False])
def test_auto_asks_the_model(preference: bool) -> None:
    """§2 use_kv_cache_manager_v2."""
    auto = KvCacheConfig(use_kv_cache_manager_v2="auto")
    assert resolve_manager(auto, model_prefers_v2=preference).use_kv_cache_manager_v2 is preference
    assert resolve_manager(KvCacheConfig(), model_prefers_v2=False).use_kv_cache_manager_v2 is True


def test_v1_refuses_before_anything_is_allocated(make_layout: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk_cache_size"):
        make(make_layout(), use_kv_cache_manager_v2=False, disk_cache_size=1 << 16, disk_cache_path=str(tmp_path))
    assert not list(tmp_path.iterdir())


def refuse_tier(monkeypatch: pytest.MonkeyPatch, tier: str, cause: Exception) -> None:
    """Storage fails like the real one where ``tier`` is asked for."""

    class RefusedTier(factory.Storage):
        def __init__(self, layout: PageLayout, num_pages: Any, tiers: Any, *arguments: Any, **options: Any) -> None:
            if tier in tiers:
                raise TierFailedError(tiers.index(tier), str(cause)) from cause
            super().__init__(layout, num_pages, tiers, *arguments, **options)

    monkeypatch.setattr(factory, "Storage", RefusedTier)


@pytest.mark.parametrize(
    ("size", "cause"),
    [
        (1 << 16, DeviceMemoryError("cannot be page-locked")),
        (None, DeviceMemoryError("cannot be page-locked")),
        (None, OSError(errno.ENOMEM, "Cannot allocate memory")),
        (-1, MemoryError("no room")),
    ],
)
def test_a_host_tier_is_left_out(
    make_layout: Any, monkeypatch: pytest.MonkeyPatch, size: int | None, cause: Exception
) -> None:
    """§2 host_cache_size: when the host's memory cannot be registered, the cache is built without that tier."""
    refuse_tier(monkeypatch, "host", cause)
    manager = make(make_layout(), host_cache_size=size)
    assert manager.tiers == ("gpu",)
    manager.close()


@pytest.mark.parametrize("v2", [True, False])
@pytest.mark.parametrize("cause", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError("no room")])
def test_a_stated_host_tier_without_memory_is_an_error(
    make_layout: Any, monkeypatch: pytest.MonkeyPatch, v2: bool, cause: Exception
) -> None:
    refuse_tier(monkeypatch, "host", cause)
    monkeypatch.setattr(factory, "available_host_bytes", lambda: 3_000_000)
    problem = r"host_cache_size of 65536 bytes cannot be had: .*(allocate|no room).* 3000000 bytes"
    with pytest.raises(ConfigError, match=problem):
        make(make_layout(), host_cache_size=1 << 16, use_kv_cache_manager_v2=v2)


def test_a_disk_cache_path_that_cannot_be_used_is_named(make_layout: Any) -> None:
    """Nobody can make a file in /proc, whatever the user's rights."""
    with pytest.raises(ConfigError, match=r"kv_cache_config\.disk_cache_path /proc cannot be used: \[Errno ") as caught:
        make(make_layout(), host_cache_size=0, disk_cache_size=1 << 16, disk_cache_path="/proc")
    assert "takes no more pages" not in str(caught.value)


def test_memory_that_a_disk_tier_needs_is_no_fault_of_its_path(
    make_layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_tier(monkeypatch, "disk", MemoryError("no room"))
    with pytest.raises(ConfigError, match=r"disk_cache_size of 65536 bytes cannot be had: .*no room"):
        make(make_layout(), disk_cache_size=1 << 16, disk_cache_path=str(tmp_path))


def test_sizes_above_the_machines_are_warned_about(
    make_layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "available_host_bytes", lambda: (1 << 20) + 60_000)
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with capture_logs() as logs:
        disk = {"disk_cache_size": 1 << 16, "disk_cache_path": str(tmp_path)}
        make(make_layout(64), free_gpu_memory_fraction=1.0, host_cache_size=1 << 16, **disk).close()
    notes = [entry["note"] for entry in logs if "note" in entry]
    assert len([note for note in notes if "host_cache_size of 65536 bytes is above the 60000 bytes" in note]) == 1
    assert len([note for note in notes if "disk_cache_size of 65536 bytes is above the 40960 bytes" in note]) == 1


def test_a_file_system_that_cannot_be_asked_is_not_judged(
    make_layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: str) -> None:
        raise OSError("no statistics")

    monkeypatch.setattr(os, "statvfs", refuse)
    with capture_logs() as logs:
        make(make_layout(), disk_cache_size=1 << 16, disk_cache_path=str(tmp_path)).close()
    assert not [entry for entry in logs if "disk_cache_size" in entry.get("note", "")]


def test_too_many_pages_are_refused_before_anything_is_allocated(make_layout: Any, tmp_path: Path) -> None:
    with pytest.raises(SizingError, match=r"disk tier of 1000000000000 bytes would have \d+ pages"):
        make(make_layout(), disk_cache_size=10**12, disk_cache_path=str(tmp_path))
    assert not list(tmp_path.iterdir())
