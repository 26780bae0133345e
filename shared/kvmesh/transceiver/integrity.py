"""Checksums of every piece that moves: computed by the owner, compared by the receiver before it trusts a page.

Neither waits for the other: the owner sums its pages while the receiver copies. What the receiver sums is what arrived:
where it copies from shared memory, the very bytes that it writes, in the same pass; elsewhere its own pages, read back
after they have landed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.kernels import ops
from kvmesh.transceiver.planes.base import Part
from kvmesh.transceiver.types import PoolMemory

__all__ = ["PageChecksums", "RunningChecksums", "checksum_difference"]


class RunningChecksums:
    """Checksums of the local pieces of some parts, computed slice by slice.

    Args:
        pools: this engine's pools.
        parts: what moves.
    """

    def __init__(self, pools: Sequence[PoolMemory], parts: Sequence[Part]) -> None:
        self._pools = pools
        self._parts = parts
        self._sums: list[NDArray[np.uint64]] = [np.zeros(len(part.local), dtype=np.uint64) for part in parts]

    def add(self, part: int, pieces: slice) -> None:
        """Compute those of ``pieces`` of ``parts[part]``."""
        of = self._parts[part]
        pool = self._pools[of.local_pool]
        self._sums[part][pieces] = ops.checksum_pages(
            pool.address + of.local_offset, of.local[pieces], of.nbytes, pool.page_bytes
        )

    def put(self, part: int, pieces: slice, sums: NDArray[np.uint64]) -> None:
        """Take those of ``pieces`` of ``parts[part]`` from whoever wrote them and summed what was written."""
        self._sums[part][pieces] = sums

    def add_all(self) -> None:
        """Compute all."""
        for part in range(len(self._parts)):
            self.add(part, slice(None))

    def encoded(self) -> list[bytes]:
        """By part the little-endian uint64 checksums; zero for pieces that were not added."""
        return [sums.astype("<u8", copy=False).tobytes() for sums in self._sums]


class PageChecksums:
    """Checksums of what is in host memory; 64 bits each, against accidents and not against attackers.

    Args:
        pools: this engine's pools.
    """

    def __init__(self, pools: Sequence[PoolMemory]) -> None:
        self._pools = pools

    def running(self, parts: Sequence[Part]) -> RunningChecksums:
        """Begin to sum the local pieces of ``parts``."""
        return RunningChecksums(self._pools, parts)

    def of(self, parts: Sequence[Part]) -> list[bytes]:
        """By part the little-endian uint64 checksums of its local pieces."""
        sums = self.running(parts)
        sums.add_all()
        return sums.encoded()


def checksum_difference(ours: Sequence[bytes], theirs: Sequence[bytes]) -> str | None:
    """What is wrong with pieces of checksums ``ours`` here and ``theirs`` at their owner; None if nothing."""
    if ours == theirs:
        return None
    if len(ours) != len(theirs):
        return f"checksums of {len(theirs)} parts came for {len(ours)}"
    for part, (here, there) in enumerate(zip(ours, theirs, strict=True)):
        if len(here) != len(there):
            return f"part {part}: {len(there) // 8} checksums came for {len(here) // 8} pages"
        wrong = np.flatnonzero(np.frombuffer(here, "<u8") != np.frombuffer(there, "<u8"))
        if len(wrong):
            pages = len(here) // 8
            return f"part {part}: {len(wrong)} of {pages} pages arrived damaged, the first at index {int(wrong[0])}"
    return None
