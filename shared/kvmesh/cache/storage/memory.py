"""Pools in memory: addressable ones (of a CPU device, of the host tier, for staging) and those of a remote device."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.device import Device, DeviceBuffer, Fence
from kvmesh.cache.shared_memory import map_shared
from kvmesh.kernels import ops

__all__ = ["HostPool", "PageMemory", "RemotePool", "Slots"]

Slots = NDArray[np.int32]
"""Page numbers inside a pool: int32, contiguous."""


class PageMemory:
    """Equal pages in memory that this process can address; page ``i`` begins at ``address + i * page_bytes``.

    Args:
        array: uint8, one page after the other.
        page_bytes: bytes of a page.
    """

    def __init__(self, array: NDArray[np.uint8], page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._readers: list[Fence] = []
        self.bind(array)

    def bind(self, array: NDArray[np.uint8]) -> None:
        """Be the pages of ``array`` from now on."""
        self.array = array
        self.address = array.ctypes.data

    def checksums(self, slots: Slots) -> NDArray[np.uint64]:
        """XXH3-64 of each page, uint64 ``[n]``."""
        return ops.checksum_pages(self.address, slots, self.page_bytes)

    def copy_from(self, slots: Slots, source: PageMemory, source_slots: Slots) -> NDArray[np.uint64]:
        """Copy pages of ``source`` to ``slots`` and return the XXH3-64 of each as it arrived, uint64 ``[n]``."""
        self.await_readers()
        return ops.copy_pages_checksummed(self.address, slots, source.address, source_slots, self.page_bytes)

    def being_read(self, fence: Fence | None) -> None:
        """A device reads pages until ``fence``."""
        if fence is not None:
            self._readers.append(fence)

    def await_readers(self) -> None:
        """Wait until no device reads pages any more; for whoever is about to write some."""
        while self._readers:
            self._readers.pop().synchronize()


class HostPool(PageMemory):
    """Anonymous memory of this process, made ready for the copies of a device.

    Attributes:
        fd: a memfd through which a peer on the same host can map it, reserve included; None where it is private.

    Args:
        num_pages: pages, 0 or more.
        page_bytes: bytes of a page.
        device: where its pages come from and go to.
        reserve_pages: make it shareable, at an address that never changes, and let it grow to so many pages; None: keep
            it private, with large pages where the system has them.

    Raises:
        DeviceMemoryError: the memory cannot be page-locked.
        OSError: the system refuses the memory.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: Device, reserve_pages: int | None = None) -> None:
        self._device = device
        nbytes = num_pages * page_bytes
        self.fd: int | None = None
        if reserve_pages is None:
            # Private, for a shared mapping could not grow.
            self._mapping = mmap.mmap(-1, _mapped_bytes(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self.fd, self._mapping = map_shared(
                "kvmesh-host-tier", _mapped_bytes(max(num_pages, reserve_pages) * page_bytes)
            )
        super().__init__(self._view(nbytes), page_bytes)
        self._registered = False
        self._register()

    @property
    def reserve_bytes(self) -> int:
        """How large a shareable pool may become."""
        return len(self._mapping)

    def resize(self, num_pages: int) -> None:
        """Have ``num_pages`` pages; those that stay keep their content. The address of a private pool may change.

        Raises:
            DeviceMemoryError: the memory cannot be page-locked.
            OSError: the system refuses the memory; the pool is as before.
        """
        nbytes = num_pages * self.page_bytes
        before = self.array.nbytes
        if self.fd is not None:
            self._resize_shared(nbytes)
            return
        self._unbind()
        try:
            self._mapping.resize(_mapped_bytes(nbytes))
        except OSError:
            nbytes = before
            raise
        finally:
            self.bind(self._view(nbytes))
            self._register()

    def close(self) -> None:
        """Give the memory back. Closing twice is harmless."""
        self._unbind()
        with contextlib.suppress(BufferError):  # else it goes with the last view
            self._mapping.close()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _resize_shared(self, nbytes: int) -> None:
        if nbytes > len(self._mapping):
            raise OSError(f"{nbytes} bytes are more than the reserve of {len(self._mapping)}")
        before = self.array.nbytes
        self._unbind()
        if nbytes < before:
            # What is not used any more goes back to the system; the addresses stay.
            first = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if first < len(self._mapping):
                self._mapping.madvise(mmap.MADV_REMOVE, first, len(self._mapping) - first)
        self.bind(np.frombuffer(self._mapping, dtype=np.uint8)[:nbytes])
        self._register()

    def _view(self, nbytes: int) -> NDArray[np.uint8]:
        # Large pages: fewer faults when the tier fills, fewer table look-ups when it moves.
        with contextlib.suppress(OSError):  # a kernel without them
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(self._mapping, dtype=np.uint8)[:nbytes]

    def _register(self) -> None:
        if self.array.nbytes:
            self._device.register_host(self.array)
            self._registered = True

    def _unbind(self) -> None:
        """Let go of the mapping, which can neither move nor end while an array refers to it."""
        self.await_readers()
        if self._registered:
            self._device.unregister_host(self.array)
            self._registered = False
        self.bind(np.empty(0, dtype=np.uint8))


class RemotePool:
    """A pool on a device whose memory this process cannot address.

    Args:
        device: the device.
        buffer: the pool's memory on it.
        page_bytes: bytes of a page.
    """

    def __init__(self, device: Device, buffer: DeviceBuffer, page_bytes: int) -> None:
        self._device = device
        self._buffer = buffer
        self._page_bytes = page_bytes

    def load(self, slots: Slots, memory: PageMemory, rows: Slots) -> NDArray[np.bool_]:
        """Copy pages from the device to ``rows`` of registered ``memory``; returns when they are there, all of them."""
        memory.await_readers()
        fence = self._device.download(memory.array, rows, self._buffer, slots, self._page_bytes)
        if fence is not None:
            fence.synchronize()
        return np.ones(len(slots), dtype=np.bool_)

    def store(self, slots: Slots, memory: PageMemory, rows: Slots) -> None:
        """Enqueue the copy of ``rows`` of registered ``memory`` to pages of the device."""
        memory.being_read(self._device.upload(self._buffer, slots, memory.array, rows, self._page_bytes))


def _mapped_bytes(nbytes: int) -> int:
    """A mapping cannot be empty."""
    return max(nbytes, mmap.PAGESIZE)
