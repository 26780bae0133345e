"""Native copies between pages and a staging room, for the items of one piece."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.kernels import ops
from kvmesh.transceiver.planes.base import PageSums, Part, PlaneError
from kvmesh.transceiver.staged.pieces import ItemTable, Segment
from kvmesh.transceiver.types import PoolMemory

__all__ = ["PageCopier", "item_table"]


def item_table(parts: Sequence[Part]) -> ItemTable:
    """The items of a move."""
    return ItemTable([(len(part.local), part.nbytes) for part in parts])


class PageCopier:
    """Copies between this engine's pools and staging rooms.

    Args:
        pools: this engine's pools (host memory).
    """

    def __init__(self, pools: Sequence[PoolMemory]) -> None:
        self._pools = tuple(pools)

    def check(self, parts: Sequence[Part]) -> None:
        """Refuse parts that do not lie in the pools.

        Raises:
            PlaneError: a page or an offset is outside.
        """
        for part in parts:
            pool = self._pools[part.local_pool]
            if part.local_offset < 0 or part.local_offset + part.nbytes > pool.page_bytes:
                raise PlaneError(f"bytes outside pages of {pool.page_bytes} bytes")
            if len(part.local) and not 0 <= int(part.local.min()) <= int(part.local.max()) < pool.num_pages:
                raise PlaneError(f"pages outside the pool of {pool.num_pages} pages")

    def gather(self, address: int, parts: Sequence[Part], segments: Sequence[Segment]) -> None:
        """Copy the items of ``segments`` to ``address``, back to back."""
        ops.gather_lists(address, self._lists(parts, segments))

    def scatter(
        self, address: int, parts: Sequence[Part], segments: Sequence[Segment], sums: PageSums | None = None
    ) -> None:
        """Copy what lies at ``address`` to the items of ``segments``, and tell ``sums`` the checksums of each."""
        lists = self._lists(parts, segments)
        if sums is None:
            ops.scatter_lists(address, lists)
            return
        values = ops.scatter_lists_checksummed(address, lists)
        done = 0
        for part, start, stop in segments:
            sums.put(part, slice(start, stop), values[done : done + stop - start])
            done += stop - start

    def _lists(self, parts: Sequence[Part], segments: Sequence[Segment]) -> list[ops.PageList]:
        lists: list[ops.PageList] = []
        for number, start, stop in segments:
            part = parts[number]
            pool = self._pools[part.local_pool]
            ids = part.local[start:stop]
            lists.append(ops.PageList(pool.address + part.local_offset, ids, pool.page_bytes, part.nbytes))
        return lists
