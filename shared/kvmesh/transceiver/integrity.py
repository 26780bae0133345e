"""Per-page checksums: computed by the owner, compared by the receiver before it trusts a page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmesh.kernels import ops
from kvmesh.transceiver.types import PageIds, PoolMemory

__all__ = ["ChecksumMismatchError", "PageChecksums"]


class ChecksumMismatchError(Exception):
    """A page arrived with other bytes than its owner had."""


class PageChecksums:
    """Checksums of pages in host memory; 64 bits each, against accidents and not against attackers.

    Args:
        pools: this engine's pools.
        pool_of_group: for every layer group the index of its pool.
    """

    def __init__(self, pools: Sequence[PoolMemory], pool_of_group: Sequence[int]) -> None:
        self._pools = [pools[pool] for pool in pool_of_group]

    def of(self, pages: Sequence[PageIds]) -> list[bytes]:
        """Per layer group the little-endian uint64 checksums of ``pages``."""
        return [
            ops.checksum_pages(pool.address, ids, pool.page_bytes).astype("<u8", copy=False).tobytes()
            for pool, ids in zip(self._pools, pages, strict=True)
        ]

    def verify(self, pages: Sequence[PageIds], expected: Sequence[bytes]) -> None:
        """Compare ``pages`` here with what their owner computed.

        Raises:
            ChecksumMismatchError: they differ; names the first page that does.
        """
        for group, (ids, ours, theirs) in enumerate(zip(pages, self.of(pages), expected, strict=True)):
            if ours == theirs:
                continue
            if len(ours) != len(theirs):
                raise ChecksumMismatchError(f"group {group}: {len(theirs) // 8} checksums came for {len(ids)} pages")
            wrong = np.flatnonzero(np.frombuffer(ours, "<u8") != np.frombuffer(theirs, "<u8"))
            raise ChecksumMismatchError(
                f"group {group}: {len(wrong)} of {len(ids)} pages arrived damaged, the first at index {int(wrong[0])}"
            )
