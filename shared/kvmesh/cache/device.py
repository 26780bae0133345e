"""Where pages live: the seam between the cache and the memory of a CPU or a GPU.

A device allocates page pools and copies pages inside and between them, and between them and host memory. The CPU device
is a stated byte budget backed by ``memfd_create``: anonymous memory that a peer on the same host can map through the
file descriptor, and that vanishes with its last user, however that user ends.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.shared_memory import map_shared
from kvmesh.kernels import ops

if TYPE_CHECKING:
    import torch

__all__ = ["CpuDevice", "Device", "DeviceBuffer", "DeviceMemoryError", "Fence"]


class DeviceMemoryError(MemoryError):
    """The device cannot provide the bytes asked for; the message carries both numbers."""


class Fence(Protocol):
    """A moment in the order of a device's work."""

    def synchronize(self) -> None:
        """Return once everything that was enqueued before the fence has finished."""
        ...


class DeviceBuffer:
    """One allocation: ``address`` and ``nbytes``, valid until :meth:`Device.free`.

    Attributes:
        nbytes: its present size; :meth:`Device.resize` changes it, and never the address.
        reserve_bytes: how large it may grow.
        fd: a file descriptor that maps the same memory (CPU), the reserve included, or None. It belongs to the buffer.
    """

    def __init__(self, address: int, nbytes: int, *, fd: int | None, owner: object, reserve_bytes: int = 0) -> None:
        self.address = address
        self.nbytes = nbytes
        self.reserve_bytes = max(nbytes, reserve_bytes)
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
        view: NDArray[np.uint8] = self._owner[: self.nbytes]
        return view

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a uint8 tensor that shares the memory.

        Raises:
            TypeError: the buffer was freed.
        """
        import torch

        if isinstance(self._owner, np.ndarray):
            return torch.from_numpy(self._owner[: self.nbytes])
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

    is_host_memory: ClassVar[bool]
    """Whether its buffers are ordinary memory of this process: their ``array`` works, and nothing is asynchronous."""

    @property
    def name(self) -> str:
        """Name as torch spells it: ``cpu``, ``cuda:0``."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""
        ...

    def allocate(self, nbytes: int, reserve_bytes: int | None = None) -> DeviceBuffer:
        """A new buffer, zeroed, at least 64-byte aligned.

        Args:
            nbytes: its size.
            reserve_bytes: how large :meth:`resize` may make it; only addresses are taken for what exceeds ``nbytes``.

        Raises:
            DeviceMemoryError: there is not enough memory, or the device cannot reserve addresses.
        """
        ...

    def resize(self, buffer: DeviceBuffer, nbytes: int) -> None:
        """Make ``buffer`` larger (the new bytes are zero) or smaller (their memory goes back); its address stays.

        Raises:
            DeviceMemoryError: there is not enough memory, or more than the reserve is asked for.
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

    def register_host(self, memory: NDArray[np.uint8]) -> None:
        """Make host memory fit for :meth:`upload` and :meth:`download`: page-locked where that matters.

        Raises:
            DeviceMemoryError: the system does not let so much memory be locked.
        """
        ...

    def unregister_host(self, memory: NDArray[np.uint8]) -> None:
        """Undo :meth:`register_host`, before the memory is freed."""
        ...

    def download(
        self,
        dst: NDArray[np.uint8],
        dst_rows: NDArray[np.int32],
        src: DeviceBuffer,
        src_slots: NDArray[np.int32],
        page_bytes: int,
    ) -> Fence | None:
        """Copy pages to registered host memory, in order with the kernels that wrote them before.

        Args:
            dst: host memory, row ``i`` at ``i * page_bytes``.
            dst_rows: rows that take the pages.
            src: pages of the device.
            src_slots: pages to copy.
            page_bytes: bytes of a page and of a row.

        Returns:
            What to wait for before the rows are read; None when they are there already.
        """
        ...

    def upload(
        self,
        dst: DeviceBuffer,
        dst_slots: NDArray[np.int32],
        src: NDArray[np.uint8],
        src_rows: NDArray[np.int32],
        page_bytes: int,
    ) -> Fence | None:
        """Copy pages from registered host memory, in order with the kernels that read them later.

        Returns:
            What to wait for before the rows are written again; None when they have been read already.
        """
        ...


class CpuDevice:
    """Host memory up to a stated budget.

    Args:
        budget_bytes: how much may be allocated in all.
    """

    name = "cpu"
    is_host_memory: ClassVar[bool] = True

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"the budget must not be negative: {budget_bytes}")
        self._free_bytes = budget_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""
        return self._free_bytes

    def allocate(self, nbytes: int, reserve_bytes: int | None = None) -> DeviceBuffer:
        """A zeroed buffer backed by an anonymous file; the reserve is a sparse end of the file.

        Raises:
            DeviceMemoryError: the budget is too small.
            OSError: the system refuses the memory.
        """
        if not 0 < nbytes <= self._free_bytes:
            raise DeviceMemoryError(f"cannot allocate {nbytes} bytes: the cpu device has {self._free_bytes} bytes left")
        reserve = max(nbytes, reserve_bytes or 0)
        fd, mapping = map_shared("kvmesh-kv-cache", reserve)
        array = np.frombuffer(mapping, dtype=np.uint8)
        self._free_bytes -= nbytes
        return DeviceBuffer(array.ctypes.data, nbytes, fd=fd, owner=array, reserve_bytes=reserve)

    def resize(self, buffer: DeviceBuffer, nbytes: int) -> None:
        """See :meth:`Device.resize`; a hole in the file gives memory back.

        Raises:
            DeviceMemoryError: the budget or the reserve is too small.
        """
        if not 0 < nbytes <= buffer.reserve_bytes:
            raise DeviceMemoryError(f"cannot resize to {nbytes} bytes: {buffer.reserve_bytes} bytes are reserved")
        if nbytes - buffer.nbytes > self._free_bytes:
            raise DeviceMemoryError(
                f"cannot grow by {nbytes - buffer.nbytes} bytes: the cpu device has {self._free_bytes} bytes left"
            )
        if nbytes < buffer.nbytes:
            _release(buffer, nbytes)
        self._free_bytes -= nbytes - buffer.nbytes
        buffer.nbytes = nbytes

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
        """See :meth:`Device.copy_pages`."""
        ops.copy_pages(dst.address, dst_slots, src.address, src_slots, page_bytes)

    def register_host(self, memory: NDArray[np.uint8]) -> None:
        """Any memory will do."""

    def unregister_host(self, memory: NDArray[np.uint8]) -> None:
        """See :meth:`register_host`."""

    def download(
        self,
        dst: NDArray[np.uint8],
        dst_rows: NDArray[np.int32],
        src: DeviceBuffer,
        src_slots: NDArray[np.int32],
        page_bytes: int,
    ) -> None:
        """See :meth:`Device.download`."""
        ops.copy_pages(dst.ctypes.data, dst_rows, src.address, src_slots, page_bytes)

    def upload(
        self,
        dst: DeviceBuffer,
        dst_slots: NDArray[np.int32],
        src: NDArray[np.uint8],
        src_rows: NDArray[np.int32],
        page_bytes: int,
    ) -> None:
        """See :meth:`Device.upload`."""
        ops.copy_pages(dst.address, dst_slots, src.ctypes.data, src_rows, page_bytes)


def _release(buffer: DeviceBuffer, nbytes: int) -> None:
    """Give back the memory of the bytes from ``nbytes`` on: whole pages of the system go, the rest is zeroed."""
    hole = min(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, buffer.nbytes)
    buffer.array[nbytes:hole] = 0
    if hole < buffer.nbytes and buffer.fd is not None:
        with mmap.mmap(buffer.fd, buffer.nbytes - hole, offset=hole) as tail:
            tail.madvise(mmap.MADV_REMOVE)
