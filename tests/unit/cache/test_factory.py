"""A manager from the public configuration: which one, and what happens when a tier cannot be had."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvmesh.cache import factory
from kvmesh.cache.device import CpuDevice
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


def test_without_memory_for_a_host_tier_there_is_none(make_layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """§2 host_cache_size: when the host's memory cannot be registered, the cache is built without that tier."""

    class RefusedHost(factory.Storage):
        def __init__(self, layout: PageLayout, num_pages: Any, tiers: Any, *arguments: Any, **options: Any) -> None:
            if "host" in tiers:
                raise TierFailedError(1, "refused")
            super().__init__(layout, num_pages, tiers, *arguments, **options)

    monkeypatch.setattr(factory, "Storage", RefusedHost)
    manager = make(make_layout(), host_cache_size=1 << 16)
    assert manager.tiers == ("gpu",)
    manager.close()


def test_a_disk_tier_that_cannot_be_made_is_an_error(
    make_layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RefusedDisk(factory.Storage):
        def __init__(self, layout: PageLayout, num_pages: Any, tiers: Any, *arguments: Any, **options: Any) -> None:
            raise TierFailedError(len(tiers) - 1, "refused")

    monkeypatch.setattr(factory, "Storage", RefusedDisk)
    with pytest.raises(TierFailedError, match="refused"):
        make(make_layout(), host_cache_size=0, disk_cache_size=1 << 16, disk_cache_path=str(tmp_path))


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
