"""Where pages live: the seam between the cache and the memory of a CPU or a GPU.

A device allocates page pools and copies pages inside and between them. The CPU device is a stated byte budget backed by
``memfd_create``: anonymous memory that a peer on the same host can map through the file descriptor, and that vanishes
with its last user, however that user ends.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["CpuDevice", "CudaDevice", "Device", "DeviceBuffer", "DeviceMemoryError"]


class DeviceMemoryError(MemoryError):
    """The device cannot provide the bytes asked for; the message carries both numbers."""


class DeviceBuffer:
    """One allocation: ``address`` and ``nbytes``, valid until :meth:`Device.free`.

    Attributes:
        fd: a file descriptor that maps the same memory (CPU), or None. It belongs to the buffer.
    """

    def __init__(self, address: int, nbytes: int, *, fd: int | None, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.fd = fd
        self._owner: object | None = owner

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes as a numpy array (host memory only).

        Raises:
            TypeError: the buffer is not host memory, or it was freed.
        """
        if not isinstance(self._owner, np.ndarray):
            raise TypeError("only a live host buffer has a numpy view")
        return self._owner

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a uint8 tensor that shares the memory.

        Raises:
            TypeError: the buffer was freed.
        """
        import torch

        if isinstance(self._owner, np.ndarray):
            return torch.from_numpy(self._owner)
        if isinstance(self._owner, torch.Tensor):
            return self._owner
        raise TypeError("the buffer was freed")

    def drop(self) -> None:
        """Forget the memory; the device's ``free`` calls it. Views that still live keep their mapping."""
        self._owner = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Device(Protocol):
    """Memory with a budget. One thread uses a device at a time."""

    @property
    def name(self) -> str:
        """Name as torch spells it: ``cpu``, ``cuda:0``."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """A new buffer, zeroed, at least 64-byte aligned.

        Raises:
            DeviceMemoryError: there is not enough memory.
        """
        ...

    def free(self, buffer: DeviceBuffer) -> None:
        """Give ``buffer`` back; its address must not be used any more."""
        ...

    def copy_pages(
        self,
        dst: DeviceBuffer,
        dst_slots: NDArray[np.int32],
        src: DeviceBuffer,
        src_slots: NDArray[np.int32],
        page_bytes: int,
    ) -> None:
        """Copy whole pages, ``src_slots[i]`` to ``dst_slots[i]``, in order with the kernels that read them later.

        Source and destination slots must not overlap.
        """
        ...


class CpuDevice:
    """Host memory up to a stated budget.

    Args:
        budget_bytes: how much may be allocated in all.
    """

    name = "cpu"

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"the budget must not be negative: {budget_bytes}")
        self._free_bytes = budget_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""
        return self._free_bytes

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """A zeroed buffer backed by an anonymous file.

        Raises:
            DeviceMemoryError: the budget is too small.
            OSError: the system refuses the memory.
        """
        if not 0 < nbytes <= self._free_bytes:
            raise DeviceMemoryError(f"cannot allocate {nbytes} bytes: the cpu device has {self._free_bytes} bytes left")
        fd = os.memfd_create("kvmesh-kv-cache", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            os.close(fd)
            raise
        array = np.frombuffer(mapping, dtype=np.uint8)
        self._free_bytes -= nbytes
        return DeviceBuffer(array.ctypes.data, nbytes, fd=fd, owner=array)

    def free(self, buffer: DeviceBuffer) -> None:
        """Give ``buffer`` back; the mapping goes with the last view of it."""
        buffer.drop()
        self._free_bytes += buffer.nbytes

    def copy_pages(
        self,
        dst: DeviceBuffer,
        dst_slots: NDArray[np.int32],
        src: DeviceBuffer,
        src_slots: NDArray[np.int32],
        page_bytes: int,
    ) -> None:
        """Copy whole pages; a slice copy per page is a plain memcpy, several times faster than fancy indexing."""
        source = src.array.reshape(-1, page_bytes)
        target = dst.array.reshape(-1, page_bytes)
        for to, frm in zip(dst_slots.tolist(), src_slots.tolist(), strict=True):
            target[to] = source[frm]


class CudaDevice:
    """Memory of one CUDA GPU, allocated through torch so that both share one context and one allocator.

    Args:
        index: the GPU's index.
    """

    def __init__(self, index: int = 0) -> None:
        import torch

        self._torch_device = torch.device("cuda", index)
        self.name = f"cuda:{index}"

    @property
    def free_bytes(self) -> int:
        """Free bytes as the driver reports them."""
        import torch

        free, _total = torch.cuda.mem_get_info(self._torch_device)
        return int(free)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """A zeroed buffer.

        Raises:
            DeviceMemoryError: the GPU has not enough free memory.
        """
        import torch

        try:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self._torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceMemoryError(f"cannot allocate {nbytes} bytes: {error}") from error
        return DeviceBuffer(tensor.data_ptr(), nbytes, fd=None, owner=tensor)

    def free(self, buffer: DeviceBuffer) -> None:
        """Give ``buffer`` back to torch's allocator."""
        buffer.drop()

    def copy_pages(
        self,
        dst: DeviceBuffer,
        dst_slots: NDArray[np.int32],
        src: DeviceBuffer,
        src_slots: NDArray[np.int32],
        page_bytes: int,
    ) -> None:
        """Copy whole pages on the current stream."""
        import torch

        source = src.tensor.view(-1, page_bytes)
        target = dst.tensor.view(-1, page_bytes)
        to = torch.from_numpy(dst_slots.astype(np.int64)).to(self._torch_device)
        frm = torch.from_numpy(src_slots.astype(np.int64)).to(self._torch_device)
        target[to] = source[frm]
