"""A device whose memory cannot be addressed and whose copies happen later than they are called: a GPU without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.device import DeviceBuffer, DeviceMemoryError

Bytes = NDArray[np.uint8]
Slots = NDArray[np.int32]


class FakeRemoteDevice:
    """Enqueues copies in one stream; a fence, or :meth:`finish`, performs those before it.

    Copies to and from host memory that is not registered fail.

    Args:
        lockable_bytes: host memory that may be registered in all.
    """

    name = "fake:0"
    is_host_memory: ClassVar[bool] = False

    def __init__(self, lockable_bytes: int = 1 << 30) -> None:
        self.free_bytes = 1 << 30
        self.registered: dict[int, int] = {}
        self.lockable_bytes = lockable_bytes
        self._memory: dict[int, Bytes] = {}
        self._stream: list[Callable[[], None]] = []
        self._hosts_in_flight: list[int | None] = []

    def allocate(self, nbytes: int, reserve_bytes: int | None = None) -> DeviceBuffer:
        """Memory that only :meth:`pages` shows."""
        if reserve_bytes is not None and reserve_bytes > nbytes:
            raise DeviceMemoryError("cannot reserve addresses")
        address = (len(self._memory) + 1) << 40
        self._memory[address] = np.zeros(nbytes, dtype=np.uint8)
        self.free_bytes -= nbytes
        return DeviceBuffer(address, nbytes, fd=None, owner=self)

    def resize(self, buffer: DeviceBuffer, nbytes: int) -> None:
        """Refuse."""
        if nbytes != buffer.nbytes:
            raise DeviceMemoryError("cannot reserve addresses")

    def free(self, buffer: DeviceBuffer) -> None:
        """Forget the memory once nothing enqueued needs it, as a stream-ordered allocator does."""
        self.finish()
        self.free_bytes += buffer.nbytes
        buffer.drop()

    def pages(self, buffer: DeviceBuffer, page_bytes: int) -> Bytes:
        """All pages of a buffer as they are when everything enqueued has happened."""
        self.finish()
        return self._memory[buffer.address].reshape(-1, page_bytes)

    def finish(self) -> None:
        """Perform everything that is enqueued."""
        self._perform(len(self._stream))

    def copy_pages(
        self, dst: DeviceBuffer, dst_slots: Slots, src: DeviceBuffer, src_slots: Slots, page_bytes: int
    ) -> None:
        """Copy inside the device, in the stream's order."""
        source, target = self._rows(src, page_bytes), self._rows(dst, page_bytes)
        self._enqueue(lambda: target.__setitem__(dst_slots, source[src_slots]), None)

    def register_host(self, memory: Bytes) -> None:
        """Remember the memory."""
        if memory.nbytes + sum(self.registered.values()) > self.lockable_bytes:
            raise DeviceMemoryError("cannot page-lock so much")
        self.registered[memory.ctypes.data] = memory.nbytes

    def unregister_host(self, memory: Bytes) -> None:
        """Forget the memory, with nothing of it in flight."""
        assert memory.ctypes.data not in self._hosts_in_flight, "unregistered while a copy is in flight"
        assert self.registered.pop(memory.ctypes.data) == memory.nbytes

    def download(self, dst: Bytes, dst_rows: Slots, src: DeviceBuffer, src_slots: Slots, page_bytes: int) -> _Fence:
        """Copy to host memory, in the stream's order."""
        assert dst.ctypes.data in self.registered
        source, target = self._rows(src, page_bytes), dst.reshape(-1, page_bytes)
        return self._enqueue(lambda: target.__setitem__(dst_rows, source[src_slots]), dst)

    def upload(self, dst: DeviceBuffer, dst_slots: Slots, src: Bytes, src_rows: Slots, page_bytes: int) -> _Fence:
        """Copy from host memory, in the stream's order."""
        assert src.ctypes.data in self.registered
        source, target = src.reshape(-1, page_bytes), self._rows(dst, page_bytes)
        return self._enqueue(lambda: target.__setitem__(dst_slots, source[src_rows]), src)

    def _rows(self, buffer: DeviceBuffer, page_bytes: int) -> Bytes:
        return self._memory[buffer.address].reshape(-1, page_bytes)

    def _enqueue(self, copy: Callable[[], None], host: Bytes | None) -> _Fence:
        self._stream.append(copy)
        self._hosts_in_flight.append(None if host is None else host.ctypes.data)
        return _Fence(self, copy)

    def _perform(self, count: int) -> None:
        for copy in self._stream[:count]:
            copy()
        del self._stream[:count], self._hosts_in_flight[:count]

    def perform_until(self, last: Callable[[], None]) -> None:
        """Perform everything up to and including ``last``, if it is still to come."""
        if last in self._stream:
            self._perform(self._stream.index(last) + 1)


class _Fence:
    def __init__(self, device: FakeRemoteDevice, last: Callable[[], None]) -> None:
        self._device = device
        self._last = last

    def synchronize(self) -> None:
        """Wait."""
        self._device.perform_until(self._last)
