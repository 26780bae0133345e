"""Storages that leave nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from storages import two_pools

from kvmesh.cache.device import CpuDevice, Device
from kvmesh.cache.storage import Storage


def _descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def make_storage(tmp_path: Path) -> Iterator[Callable[..., Storage]]:
    """Makes storages; at the end nothing of them may be left: no device memory, descriptor or file."""
    made: list[tuple[Storage, Device, int]] = []
    descriptors = _descriptors()

    def make(
        pages: Sequence[Sequence[int]] = ((8, 8), (8, 8), (8, 8)),
        tiers: Sequence[str] = ("gpu", "host", "disk"),
        device: Device | None = None,
        **options: object,
    ) -> Storage:
        device = device or CpuDevice(1 << 24)
        free_bytes = device.free_bytes
        storage = Storage(two_pools(), pages, tiers, device, **{"disk_path": tmp_path, **options})  # type: ignore[arg-type]
        made.append((storage, device, free_bytes))
        return storage

    yield make
    for storage, device, free_bytes in made:
        storage.close()
        storage.close()
        assert device.free_bytes == free_bytes
    assert _descriptors() == descriptors
    assert [path for path in tmp_path.iterdir() if path.name.startswith("kvmesh-")] == []
