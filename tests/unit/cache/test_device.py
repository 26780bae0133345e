"""Device memory: budget, sharing through the file descriptor, page copies."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from kvmesh.cache.cuda_device import CudaDevice
from kvmesh.cache.device import CpuDevice, DeviceMemoryError


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
    device.free(buffer)
