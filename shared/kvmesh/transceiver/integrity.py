"""Per-page checksums: computed by the owner, compared by the receiver before it trusts a page.

Neither waits for the other: the owner sums its pages while the receiver copies. What the receiver sums is what arrived:
where it copies from shared memory, the very bytes that it writes, in the same pass; elsewhere its own pages, read back
after they have landed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.kernels import ops
from kvmesh.transceiver.types import PageIds, PoolMemory

__all__ = ["PageChecksums", "RunningChecksums", "checksum_difference"]


class RunningChecksums:
    """Checksums of a list of pages, computed slice by slice.

    Args:
        pools: for every layer group its pool.
        pages: for every layer group the pages.
    """

    def __init__(self, pools: Sequence[PoolMemory], pages: Sequence[PageIds]) -> None:
        self._pools = pools
        self._pages = pages
        self._sums: list[NDArray[np.uint64]] = [np.zeros(len(ids), dtype=np.uint64) for ids in pages]

    def add(self, group: int, part: slice) -> None:
        """Compute those of ``pages[group][part]``."""
        pool = self._pools[group]
        self._sums[group][part] = ops.checksum_pages(pool.address, self._pages[group][part], pool.page_bytes)

    def put(self, group: int, part: slice, sums: NDArray[np.uint64]) -> None:
        """Take those of ``pages[group][part]`` from whoever wrote the pages and summed what was written."""
        self._sums[group][part] = sums

    def encoded(self) -> list[bytes]:
        """Per layer group the little-endian uint64 checksums; zero for pages that were not added."""
        return [sums.astype("<u8", copy=False).tobytes() for sums in self._sums]


class PageChecksums:
    """Checksums of pages in host memory; 64 bits each, against accidents and not against attackers.

    Args:
        pools: this engine's pools.
        pool_of_group: for every layer group the index of its pool.
    """

    def __init__(self, pools: Sequence[PoolMemory], pool_of_group: Sequence[int]) -> None:
        self._pools = [pools[pool] for pool in pool_of_group]

    def running(self, pages: Sequence[PageIds]) -> RunningChecksums:
        """Begin to sum ``pages``."""
        return RunningChecksums(self._pools, pages)

    def of(self, pages: Sequence[PageIds]) -> list[bytes]:
        """Per layer group the little-endian uint64 checksums of ``pages``."""
        sums = self.running(pages)
        for group in range(len(pages)):
            sums.add(group, slice(None))
        return sums.encoded()


def checksum_difference(ours: Sequence[bytes], theirs: Sequence[bytes]) -> str | None:
    """What is wrong with pages that have the checksums ``ours`` here and ``theirs`` at their owner; None if nothing."""
    if len(ours) != len(theirs):
        return f"checksums of {len(theirs)} layer groups came for {len(ours)}"
    for group, (here, there) in enumerate(zip(ours, theirs, strict=True)):
        if len(here) != len(there):
            return f"group {group}: {len(there) // 8} checksums came for {len(here) // 8} pages"
        wrong = np.flatnonzero(np.frombuffer(here, "<u8") != np.frombuffer(there, "<u8"))
        if len(wrong):
            pages = len(here) // 8
            return f"group {group}: {len(wrong)} of {pages} pages arrived damaged, the first at index {int(wrong[0])}"
    return None
