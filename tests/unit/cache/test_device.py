"""Device memory: budget, sharing through the file descriptor, page copies."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from kvmesh.cache.cuda_device import CudaDevice
from kvmesh.cache.device import CpuDevice, DeviceBuffer, DeviceMemoryError


def test_budget() -> None:
    device = CpuDevice(1000)
    first = device.allocate(600)
    assert device.free_bytes == 400
    with pytest.raises(DeviceMemoryError, match="401 bytes: the cpu device has 400"):
        device.allocate(401)
    device.free(first)
    assert device.free_bytes == 1000
    with pytest.raises(DeviceMemoryError):
        device.allocate(0)
    with pytest.raises(ValueError, match="negative"):
        CpuDevice(-1)


def test_memory_is_zeroed_aligned_and_shared_through_its_descriptor() -> None:
    device = CpuDevice(1 << 20)
    buffer = device.allocate(1 << 16)
    assert buffer.address % 4096 == 0
    assert not buffer.array.any()
    assert buffer.fd is not None
    assert not os.get_inheritable(buffer.fd)
    with mmap.mmap(buffer.fd, buffer.nbytes) as peer:
        peer[100] = 7
        assert buffer.array[100] == 7
        buffer.tensor[200] = 9
        assert peer[200] == 9
    device.free(buffer)
    assert buffer.fd is None
    with pytest.raises(TypeError):
        _ = buffer.array
    with pytest.raises(TypeError, match="freed"):
        _ = buffer.tensor


def test_views_outlive_the_buffer() -> None:
    device = CpuDevice(4096)
    buffer = device.allocate(4096)
    view = buffer.array
    device.free(buffer)
    view[:] = 3
    assert (view == 3).all()


def test_copy_pages_between_pools() -> None:
    device = CpuDevice(1 << 20)
    source, target = device.allocate(10 * 64), device.allocate(4 * 64)
    source.array.reshape(10, 64)[:] = np.arange(10, dtype=np.uint8)[:, None]
    device.copy_pages(target, np.array([3, 0], np.int32), source, np.array([5, 9], np.int32), 64)
    assert target.array.reshape(4, 64)[:, 0].tolist() == [9, 0, 0, 5]
    device.free(source)
    device.free(target)


def resident_bytes(buffer: DeviceBuffer) -> int:
    assert buffer.fd is not None
    return os.fstat(buffer.fd).st_blocks * 512


def test_a_reserve_takes_addresses_and_no_budget() -> None:
    device = CpuDevice(1 << 20)
    buffer = device.allocate(1 << 16, reserve_bytes=1 << 40)
    assert device.free_bytes == (1 << 20) - (1 << 16)
    assert (buffer.nbytes, buffer.reserve_bytes, len(buffer.array)) == (1 << 16, 1 << 40, 1 << 16)
    assert resident_bytes(buffer) == 0
    assert device.allocate(64, reserve_bytes=1).reserve_bytes == 64


def test_resize_keeps_the_address_and_returns_memory() -> None:
    device = CpuDevice(1 << 20)
    buffer = device.allocate(1 << 18, reserve_bytes=1 << 19)
    address = buffer.address
    buffer.array[:] = 7
    assert resident_bytes(buffer) == 1 << 18
    # 5,000 is inside the second page of the system: it stays, its end zeroed.
    device.resize(buffer, 5000)
    assert resident_bytes(buffer) == 8192
    assert device.free_bytes == (1 << 20) - 5000
    device.resize(buffer, 1 << 19)
    assert device.free_bytes == 1 << 19
    assert buffer.address == address == buffer.array.ctypes.data
    assert (buffer.array[:5000] == 7).all()
    assert not buffer.array[5000:].any()
    buffer.array[-1] = 9
    assert buffer.fd is not None
    with mmap.mmap(buffer.fd, 1 << 19) as peer:
        assert peer[(1 << 19) - 1] == 9
        device.resize(buffer, 4097)
        # A peer that still maps what is gone reads zeros.
        assert peer[4096] == 7
        assert not any(peer[4097:])
    device.free(buffer)
    assert device.free_bytes == 1 << 20


@pytest.mark.parametrize(("nbytes", "kept", "resident"), [(10_000, 100, 4096), (10_000, 9_000, 12_288), (5, 1, 4096)])
def test_resize_of_odd_sizes(nbytes: int, kept: int, resident: int) -> None:
    device = CpuDevice(nbytes)
    buffer = device.allocate(nbytes)
    buffer.array[:] = 7
    device.resize(buffer, kept)
    assert resident_bytes(buffer) == resident
    device.resize(buffer, nbytes)
    assert (buffer.array[:kept] == 7).all()
    assert not buffer.array[kept:].any()
    device.free(buffer)
    assert device.free_bytes == nbytes


def test_resize_is_refused_beyond_budget_and_reserve() -> None:
    device = CpuDevice(10_000)
    buffer = device.allocate(4096, reserve_bytes=1 << 20)
    with pytest.raises(DeviceMemoryError, match="grow by 5905 bytes: the cpu device has 5904"):
        device.resize(buffer, 10_001)
    with pytest.raises(DeviceMemoryError, match="1048576 bytes are reserved"):
        device.resize(buffer, (1 << 20) + 1)
    with pytest.raises(DeviceMemoryError):
        device.resize(buffer, 0)
    assert (buffer.nbytes, device.free_bytes) == (4096, 5904)


def test_pages_to_and_from_host_memory() -> None:
    device = CpuDevice(1 << 20)
    buffer = device.allocate(4 * 64)
    host = np.arange(3 * 64, dtype=np.uint8)
    device.register_host(host)
    device.upload(buffer, np.array([3, 0], np.int32), host, np.array([1, 2], np.int32), 64)
    assert np.array_equal(buffer.array[3 * 64 :], host[64:128])
    device.download(host, np.array([0], np.int32), buffer, np.array([3], np.int32), 64)
    assert np.array_equal(host[:64], host[64:128])
    device.unregister_host(host)


@pytest.mark.gpu
def test_cuda_device() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = CudaDevice(0)
    free = device.free_bytes
    buffer = device.allocate(1 << 26)
    assert device.free_bytes < free
    assert buffer.tensor.data_ptr() == buffer.address
    pages = buffer.tensor.view(-1, 1 << 20)
    pages[3] = 5
    device.copy_pages(buffer, np.array([7], np.int32), buffer, np.array([3], np.int32), 1 << 20)
    assert bool((pages[7] == 5).all())
    with pytest.raises(TypeError):
        _ = buffer.array
    with pytest.raises(DeviceMemoryError, match="reserve"):
        device.allocate(64, reserve_bytes=65)
    with pytest.raises(DeviceMemoryError, match="rebalancing"):
        device.resize(buffer, 64)
    host = np.zeros(2 << 20, dtype=np.uint8)
    device.register_host(host)
    device.download(host, np.array([1], np.int32), buffer, np.array([7], np.int32), 1 << 20).synchronize()
    assert (host.reshape(2, -1) == [[0], [5]]).all()
    host[:] = 6
    device.upload(buffer, np.array([0, 9], np.int32), host, np.array([0, 1], np.int32), 1 << 20).synchronize()
    assert bool((pages[[0, 9]] == 6).all())
    device.unregister_host(host)
    device.free(buffer)
