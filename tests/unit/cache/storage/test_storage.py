"""Pages between levels: what arrives is what left, or is reported as lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from storages import PAGE_BYTES, content, fill, slots, two_pools

from kvmesh.cache.device import CpuDevice, DeviceMemoryError
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.storage import Storage

MakeStorage = Callable[..., Storage]


@pytest.mark.parametrize("pool", [0, 1])
@pytest.mark.parametrize("path", [(0, 1, 0), (0, 2, 0), (0, 1, 2, 0), (0, 2, 1, 0), (0, 1, 1, 0), (0, 2, 2, 1, 1, 0)])
def test_pages_survive_a_way_through_the_levels(make_storage: MakeStorage, pool: int, path: tuple[int, ...]) -> None:
    storage = make_storage()
    before = fill(storage, pool)
    here = start = np.array([6, 1, 2, 3], dtype=np.int32)
    for step, (src, dst) in enumerate(pairwise(path)):
        there = slots(0, 5, 4, 7) if step % 2 == 0 else slots(1, 2, 3, 6)
        if dst == 0:
            content(storage, pool)[:] = 0
        assert storage.move(pool, src, here, dst, there).all()
        here = there
    assert np.array_equal(content(storage, pool)[here], before[start])
    others = np.setdiff1d(np.arange(8), here)
    assert not content(storage, pool)[others].any()


def test_pools_and_levels_are_apart(make_storage: MakeStorage) -> None:
    storage = make_storage()
    before = [fill(storage, pool, seed=pool) for pool in (0, 1)]
    everything = np.arange(8, dtype=np.int32)
    for pool in (0, 1):
        storage.move(pool, 0, everything, 1, everything)
        storage.move(pool, 0, everything, 2, everything[::-1])
        content(storage, pool)[:] = 0
    for level, order in ((1, everything), (2, everything[::-1])):
        for pool in (0, 1):
            assert storage.move(pool, level, order, 0, everything).all()
            assert np.array_equal(content(storage, pool), before[pool])


def test_a_gpu_and_disk_storage_has_no_host_level(make_storage: MakeStorage) -> None:
    storage = make_storage([[4, 4], [9, 9]], ("gpu", "disk"))
    before = fill(storage)
    assert storage.move(0, 0, slots(0, 3), 1, slots(8, 2)).all()
    content(storage)[:] = 0
    assert storage.move(0, 1, slots(8, 2), 0, slots(1, 2)).all()
    assert np.array_equal(content(storage)[[1, 2]], before[[0, 3]])


def test_copies_inside_the_device(make_storage: MakeStorage) -> None:
    storage = make_storage([[8, 8]], ("gpu",))
    before = fill(storage, 1)
    storage.copy(1, slots(0, 7), slots(3, 2))
    assert storage.move(1, 0, slots(4), 0, slots(5)).tolist() == [True]
    assert np.array_equal(content(storage, 1)[[3, 2, 5]], before[[0, 7, 4]])


@pytest.mark.parametrize("level", [1, 2])
def test_a_slot_that_never_was_written_holds_nothing(make_storage: MakeStorage, level: int) -> None:
    storage = make_storage()
    fill(storage)
    storage.move(0, 0, slots(0), level, slots(5))
    assert storage.move(0, level, slots(4, 5, 6), 0, slots(1, 2, 3)).tolist() == [False, True, False]
    assert storage.move(0, level, slots(4), 3 - level, slots(0)).tolist() == [False]
    assert storage.move(0, 3 - level, slots(0), 0, slots(0)).tolist() == [False]


def test_nothing_to_move(make_storage: MakeStorage) -> None:
    storage = make_storage()
    for src in range(3):
        for dst in range(3):
            assert storage.move(0, src, slots(), dst, slots()).tolist() == []


def test_slots_are_checked(make_storage: MakeStorage) -> None:
    storage = make_storage()
    with pytest.raises(IndexError, match="slots 0 to 7"):
        storage.move(0, 0, slots(8), 1, slots(0))
    with pytest.raises(IndexError):
        storage.move(0, 0, slots(0), 1, slots(-1))
    with pytest.raises(IndexError):
        storage.copy(0, slots(0), slots(9))
    with pytest.raises(ValueError, match="2 pages"):
        storage.move(0, 0, slots(0, 1), 1, slots(0))


def test_the_shape_is_checked(tmp_path: Path) -> None:
    device = CpuDevice(1 << 20)
    with pytest.raises(ValueError, match="2 levels of 2 pools"):
        Storage(two_pools(), [[1, 1], [1]], ("gpu", "host"), device)
    with pytest.raises(ValueError, match="the tiers are"):
        Storage(two_pools(), [[1, 1]], ("host",), device)
    with pytest.raises(ValueError, match="disk_path"):
        Storage(two_pools(), [[1, 1], [1, 1]], ("gpu", "disk"), device)
    assert device.free_bytes == 1 << 20


def test_a_tier_that_cannot_be_made_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    device = CpuDevice(1 << 20)
    pages = [[1, 1], [1, 1], [1, 1]]
    with pytest.raises(TierFailedError, match="nowhere") as raised:
        Storage(two_pools(), pages, ("gpu", "host", "disk"), device, disk_path=tmp_path / "nowhere")
    assert raised.value.level == 2
    with pytest.raises(TierFailedError) as raised:
        Storage(two_pools(), [[1, 1], [1 << 38, 1]], ("gpu", "host"), device)
    assert raised.value.level == 1
    with pytest.raises(DeviceMemoryError):
        Storage(two_pools(), [[1, 1 << 20]], ("gpu",), device)
    assert device.free_bytes == 1 << 20


@pytest.mark.parametrize("level", [0, 1, 2])
def test_resize_keeps_what_stays(make_storage: MakeStorage, level: int) -> None:
    device = CpuDevice(32 * sum(PAGE_BYTES))
    storage = make_storage(device=device, device_reserve=[16, 8])
    before = fill(storage)
    if level:
        storage.move(0, 0, np.arange(8, dtype=np.int32), level, np.arange(8, dtype=np.int32))
    address = storage.pools[0].address
    storage.resize(level, 0, 3)
    with pytest.raises(IndexError):
        storage.move(0, level, slots(3), 3 - level if level else 1, slots(0))
    storage.resize(level, 0, 16)
    assert storage.pools[0].address == address
    if level:
        content(storage)[:] = 0
        kept = storage.move(0, level, np.arange(8, dtype=np.int32), 0, np.arange(8, dtype=np.int32))
        assert kept.tolist() == [True] * 3 + [False] * 5
    assert np.array_equal(content(storage)[:3], before[:3])
    storage.move(0, 0, slots(0), 1, slots(0))
    assert storage.move(0, 1, slots(0), level, slots(15)).all()
    assert storage.move(0, level, slots(15), 0, slots(2)).all()
    assert np.array_equal(content(storage)[2], before[0])


def test_the_device_level_moves_memory_between_its_pools(make_storage: MakeStorage) -> None:
    device = CpuDevice(8 * 512 + 8 * 1024)
    storage = make_storage([[8, 8]], ("gpu",), device=device, device_reserve=[16, 8])
    with pytest.raises(DeviceMemoryError, match="0 bytes left"):
        storage.resize(0, 0, 16)
    storage.resize(0, 1, 4)
    storage.resize(0, 0, 16)
    fill(storage)
    storage.copy(0, slots(0), slots(15))
    assert np.array_equal(content(storage)[0], content(storage)[15])
    with pytest.raises(DeviceMemoryError, match="reserved"):
        storage.resize(0, 0, 17)
