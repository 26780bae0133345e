"""The bytes of all cache levels: who made them, and whether they are still what they were when they left the device."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.device import Device, DeviceBuffer
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.storage.disk import PageFile, sweep
from kvmesh.cache.storage.memory import HostPool, PageMemory, RemotePool, Slots
from kvmesh.cache.storage.moving import move_pages

__all__ = ["Storage"]

_STAGING_BYTES: Final = 8 << 20
"""Memory of a pool through which pages pass that go neither from nor to memory (at least one page)."""

_ColdPool = HostPool | PageFile


class Storage:
    """Device pools, host pools and disk files by level; knows nothing of who uses a slot.

    Every page that leaves the device gets an XXH3-64 checksum, which travels with it. One thread uses a storage.

    Args:
        layout: page sizes.
        num_pages: ``num_pages[level][pool]``; at least 1 on the device.
        tiers: what each level is: ``gpu`` first (whatever the device is), then ``host`` and ``disk`` in any order.
        device: level 0.
        disk_path: an existing directory for the files of a disk level.
        device_reserve: by pool, how many pages :meth:`resize` may give it on the device; the present number if None.
        host_reserve: by pool, how many pages :meth:`resize` may give it in the host tier, at addresses that stay, can
            and be shared with peers; None: the host tier is private memory.

    Raises:
        DeviceMemoryError: the device has too little memory, or cannot reserve addresses.
        OSError: the system refuses the memory of a CPU device.
        TierFailedError: a colder level cannot be made.
        ValueError: the arguments do not fit each other.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: Sequence[Sequence[int]],
        tiers: Sequence[str],
        device: Device,
        *,
        disk_path: Path | None = None,
        device_reserve: Sequence[int] | None = None,
        host_reserve: Sequence[int] | None = None,
    ) -> None:
        _check(layout, num_pages, tiers, disk_path)
        self.tiers = tuple(tiers)
        self._host_reserve = host_reserve
        self.pools: list[DeviceBuffer] = []
        self._page_bytes = [pool.page_bytes for pool in layout.pools]
        self._num_pages = [list(counts) for counts in num_pages]
        self._device = device
        self._hot: list[PageMemory | RemotePool] = []
        self._cold: list[list[_ColdPool]] = []
        self._sums: list[list[NDArray[np.uint64]]] = []
        self._staging: list[HostPool] = []
        try:
            self._make_device_pools(device_reserve or num_pages[0])
            for level in range(1, len(tiers)):
                self._make_cold_level(level, disk_path)
        except BaseException:
            self.close()
            raise

    def copy(self, pool: int, src_slots: Slots, dst_slots: Slots) -> None:
        """Copy pages inside the device, in order with the kernels that read them later.

        Args:
            pool: index of the pool.
            src_slots: int32 ``[n]``.
            dst_slots: int32 ``[n]``, none of them in ``src_slots``.

        Raises:
            IndexError: there is no such slot.
        """
        src, dst = self._slots(0, pool, src_slots), self._slots(0, pool, dst_slots)
        self._device.copy_pages(self.pools[pool], dst, self.pools[pool], src, self._page_bytes[pool])

    def move(self, pool: int, src_level: int, src_slots: Slots, dst_level: int, dst_slots: Slots) -> NDArray[np.bool_]:
        """Copy pages from one level to another, or inside one.

        Args:
            pool: index of the pool.
            src_level: where the pages are.
            src_slots: int32 ``[n]``.
            dst_level: where they go.
            dst_slots: int32 ``[n]``, none twice; apart from ``src_slots`` inside one level.

        Returns:
            bool ``[n]``: which pages arrived intact. The others' destinations hold nothing of use.

        Raises:
            IndexError: there is no such slot.
            TierFailedError: the destination cannot take pages; the sources are untouched, and nothing counts as moved.
        """
        src, dst = self._slots(src_level, pool, src_slots), self._slots(dst_level, pool, dst_slots)
        if len(src) != len(dst):
            raise ValueError(f"{len(src)} pages cannot go to {len(dst)} slots")
        if not len(src):
            return np.ones(0, dtype=np.bool_)
        if src_level == dst_level == 0:
            self.copy(pool, src, dst)
            return np.ones(len(src), dtype=np.bool_)
        staging = self._staging[pool] if self._staging else None
        with _tier_failures(dst_level):
            moved = move_pages(self._place(src_level, pool), src, self._place(dst_level, pool), dst, staging)
        if src_level == 0:
            self._sums[dst_level - 1][pool][dst] = moved.checksums
            return moved.read
        expected = self._sums[src_level - 1][pool][src]
        intact: NDArray[np.bool_] = moved.read & (moved.checksums == expected)
        if dst_level > 0:
            # A lost page stays lost: what is in its place now matches no checksum, not even if it is the page.
            self._sums[dst_level - 1][pool][dst] = np.where(intact, expected, ~moved.checksums)
        return intact

    @property
    def host_pools(self) -> list[HostPool]:
        """The pools of the host tier, in the layout's order; none where there is no such tier."""
        return [pool for level in self._cold for pool in level if isinstance(pool, HostPool)]

    def resize(self, level: int, pool: int, num_pages: int) -> None:
        """Give a pool more or fewer slots; those from ``num_pages`` on must be unused.

        Raises:
            DeviceMemoryError: the device has too little memory, or reserved less.
            TierFailedError: a colder level cannot change; it has the smaller of the two numbers then.
        """
        if level == 0:
            self._device.resize(self.pools[pool], num_pages * self._page_bytes[pool])
            hot = self._hot[pool]
            if isinstance(hot, PageMemory):
                hot.bind(self.pools[pool].array)
        else:
            self._num_pages[level][pool] = min(self._num_pages[level][pool], num_pages)
            with _tier_failures(level):
                self._cold[level - 1][pool].resize(num_pages)
            sums = self._sums[level - 1][pool]
            kept = sums[:num_pages]
            self._sums[level - 1][pool] = np.concatenate((kept, np.zeros(num_pages - len(kept), dtype=np.uint64)))
        self._num_pages[level][pool] = num_pages

    def close(self) -> None:
        """Give all memory back and remove the files. Closing twice is harmless."""
        for staging in self._staging:
            staging.close()
        for level in self._cold:
            for pool in level:
                pool.close()
        for buffer in self.pools:
            self._device.free(buffer)
        self.pools, self._hot, self._cold, self._staging = [], [], [], []

    def _make_device_pools(self, reserve: Sequence[int]) -> None:
        for page_bytes, count, most in zip(self._page_bytes, self._num_pages[0], reserve, strict=True):
            buffer = self._device.allocate(count * page_bytes, max(count, most) * page_bytes)
            self.pools.append(buffer)
            if self._device.is_host_memory:
                self._hot.append(PageMemory(buffer.array, page_bytes))
            else:
                self._hot.append(RemotePool(self._device, buffer, page_bytes))

    def _make_cold_level(self, level: int, disk_path: Path | None) -> None:
        pools: list[_ColdPool] = []
        self._cold.append(pools)
        with _tier_failures(level):
            self._sums.append([np.zeros(count, dtype=np.uint64) for count in self._num_pages[level]])
            if self.tiers[level] == "host":
                reserves: Sequence[int | None] = self._host_reserve or [None] * len(self._page_bytes)
                for page_bytes, count, most in zip(self._page_bytes, self._num_pages[level], reserves, strict=True):
                    pools.append(HostPool(count, page_bytes, self._device, most))
                return
            assert disk_path is not None
            sweep(disk_path)
            for page_bytes in self._page_bytes:
                pools.append(PageFile(disk_path, page_bytes))
                self._staging.append(HostPool(max(1, _STAGING_BYTES // page_bytes), page_bytes, self._device))

    def _place(self, level: int, pool: int) -> PageMemory | RemotePool | PageFile:
        return self._hot[pool] if level == 0 else self._cold[level - 1][pool]

    def _slots(self, level: int, pool: int, slots: Slots) -> Slots:
        """The slots as the native code wants them; a wrong one would be written to wherever it points."""
        count = self._num_pages[level][pool]
        slots = np.ascontiguousarray(slots, dtype=np.int32)
        # As unsigned numbers the negative ones are too large, too.
        if len(slots) and int(slots.view(np.uint32).max()) >= count:
            raise IndexError(f"pool {pool} of level {level} has slots 0 to {count - 1}, asked for {slots.tolist()}")
        return slots


@contextmanager
def _tier_failures(level: int) -> Iterator[None]:
    try:
        yield
    except (OSError, MemoryError) as error:
        # The traceback is kept, without the views of pools that its frames hold: those could not be resized then.
        traceback.clear_frames(error.__traceback__)
        raise TierFailedError(level, str(error)) from error


def _check(
    layout: PageLayout, num_pages: Sequence[Sequence[int]], tiers: Sequence[str], disk_path: Path | None
) -> None:
    if not tiers or tiers[0] != "gpu" or not set(tiers[1:]) <= {"host", "disk"}:
        raise ValueError(f"the tiers are gpu, then host and disk; not {', '.join(tiers)}")
    if [len(counts) for counts in num_pages] != [len(layout.pools)] * len(tiers):
        raise ValueError(f"num_pages needs {len(tiers)} levels of {len(layout.pools)} pools, not {num_pages}")
    if "disk" in tiers and disk_path is None:
        raise ValueError("a disk tier needs disk_path")
