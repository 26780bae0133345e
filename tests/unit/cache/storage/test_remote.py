"""A device whose memory this process cannot address: every page passes through registered host memory, in order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from remote_device import FakeRemoteDevice
from storages import PAGE_BYTES, slots, two_pools

from kvmesh.cache.cuda_device import CudaDevice
from kvmesh.cache.device import DeviceMemoryError
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.storage import Storage, storage

MakeStorage = Callable[..., Storage]
EVERY = np.arange(8, dtype=np.int32)


def fill(device: FakeRemoteDevice, made: Storage, pool: int = 0) -> np.ndarray:
    pages = device.pages(made.pools[pool], PAGE_BYTES[pool])
    pages[:] = np.random.default_rng(pool).integers(0, 256, pages.shape, dtype=np.uint8)
    return pages.copy()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("pool", [0, 1])
def test_pages_go_and_come_back(make_storage: MakeStorage, level: int, pool: int) -> None:
    device = FakeRemoteDevice()
    made = make_storage(device=device)
    before = fill(device, made, pool)
    assert made.move(pool, 0, slots(4, 5, 7, 0), level, slots(2, 3, 0, 5)).all()
    device.pages(made.pools[pool], PAGE_BYTES[pool])[:] = 0
    assert made.move(pool, level, slots(2, 3, 0, 4), 0, slots(1, 2, 3, 4)).tolist() == [True, True, True, False]
    assert np.array_equal(device.pages(made.pools[pool], PAGE_BYTES[pool])[[1, 2, 3]], before[[4, 5, 7]])


def test_a_copy_in_flight_is_seen_by_what_comes_after_it(make_storage: MakeStorage) -> None:
    device = FakeRemoteDevice()
    made = make_storage(device=device)
    before = fill(device, made)
    made.copy(0, slots(0), slots(7))
    made.move(0, 0, slots(7), 1, slots(0))
    assert made.move(0, 1, slots(0), 0, slots(3)).all()
    made.copy(0, slots(3), slots(4))
    assert np.array_equal(device.pages(made.pools[0], 512)[4], before[0])


@pytest.mark.parametrize("origin", [0, 2])
def test_a_host_slot_is_not_written_while_it_is_being_read(make_storage: MakeStorage, origin: int) -> None:
    device = FakeRemoteDevice()
    made = make_storage(device=device)
    before = fill(device, made)
    made.move(0, 0, slots(1), 2, slots(1))
    made.move(0, 0, slots(0), 1, slots(0))
    made.move(0, 1, slots(0), 0, slots(5))  # in flight
    made.move(0, origin, slots(1), 1, slots(0))  # takes the same host slot
    assert np.array_equal(device.pages(made.pools[0], 512)[5], before[0])


def test_disk_moves_larger_than_the_staging_memory(make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_STAGING_BYTES", 1600)  # three pages of pool 0, one of pool 1
    device = FakeRemoteDevice()
    made = make_storage(device=device)
    for pool in (0, 1):
        before = fill(device, made, pool)
        assert made.move(pool, 0, EVERY, 2, EVERY[::-1]).all()
        device.pages(made.pools[pool], PAGE_BYTES[pool])[:] = 0
        assert made.move(pool, 2, EVERY[::-1], 0, EVERY).all()
        assert np.array_equal(device.pages(made.pools[pool], PAGE_BYTES[pool]), before)


def test_damage_is_found(make_storage: MakeStorage) -> None:
    device = FakeRemoteDevice()
    made = make_storage(device=device)
    fill(device, made)
    made.move(0, 0, EVERY, 1, EVERY)
    made._cold[0][0].array[3 * 512] ^= 1  # type: ignore[union-attr]
    assert made.move(0, 1, EVERY, 0, EVERY).tolist() == [slot != 3 for slot in range(8)]


def test_host_memory_that_cannot_be_locked_fails_its_tier(tmp_path: Path) -> None:
    device = FakeRemoteDevice(lockable_bytes=8 * 512 + 100)
    free = device.free_bytes
    with pytest.raises(TierFailedError, match="page-lock") as raised:
        Storage(two_pools(), [[8, 8], [8, 8]], ("gpu", "host"), device)
    assert raised.value.level == 1
    assert device.registered == {}
    assert device.free_bytes == free


def test_host_memory_is_locked_as_it_changes_and_unlocked_at_the_end(make_storage: MakeStorage) -> None:
    device = FakeRemoteDevice()
    made = make_storage(((4, 4), (8, 8)), ("gpu", "host"), device=device)
    before = fill(device, made)
    made.move(0, 0, slots(0, 1), 1, slots(0, 1))
    made.move(0, 1, slots(0), 0, slots(3))  # in flight
    made.resize(1, 0, 4000)
    assert sorted(device.registered.values()) == [8 * 1024, 4000 * 512]
    assert made.move(0, 1, slots(1), 0, slots(2)).all()
    made.resize(1, 0, 0)
    assert list(device.registered.values()) == [8 * 1024]
    assert np.array_equal(device.pages(made.pools[0], 512)[[3, 2]], before[:2])
    made.close()
    assert device.registered == {}


@pytest.mark.gpu
def test_a_real_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    made = Storage(two_pools(), [[8, 8]] * 3, ("gpu", "host", "disk"), CudaDevice(0), disk_path=tmp_path)
    pages = made.pools[0].tensor.view(8, -1)
    pages[:] = torch.randint(0, 256, pages.shape, dtype=torch.uint8, device=pages.device)
    before = pages.clone()
    assert made.move(0, 0, EVERY, 1, EVERY[::-1]).all()
    assert made.move(0, 0, EVERY, 2, EVERY).all()
    for level, order in ((1, EVERY[::-1]), (2, EVERY)):
        pages.zero_()
        assert made.move(0, level, order, 0, EVERY).all()
        assert torch.equal(pages, before)
    made.close()


def test_no_reserve_no_rebalance(tmp_path: Path) -> None:
    with pytest.raises(DeviceMemoryError, match="reserve"):
        Storage(two_pools(), [[8, 8]], ("gpu",), FakeRemoteDevice(), device_reserve=[8, 9])
