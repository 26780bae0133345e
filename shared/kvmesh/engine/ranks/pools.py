"""A follower's view of the KV pages, which the leader allocates for all ranks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from kvmesh.cache.layout import PageLayout
from kvmesh.models.base import KvPools

__all__ = ["MappedPools", "pools_of", "split_groups_of"]


def pools_of(layout: PageLayout, rank: int) -> list[int]:
    """The pools in which a rank's layer groups have their pages."""
    return [index for index, pool in enumerate(layout.pools) if pool.rank == rank]


def split_groups_of(layout: PageLayout, *, swa_scratch_reuse: bool) -> list[int]:
    """The layer groups, of all ranks, that may use scratch slots."""
    return [group.group_id for group in layout.groups if swa_scratch_reuse and group.window is not None]


class MappedPools:
    """The pools of a rank, mapped from descriptors of the leader's memory; valid while this object lives.

    Args:
        layout: of the engine's pages.
        rank: whose pools.
        fds: of each of :func:`pools_of`, in order; closed here.
        sizes: bytes of each, what it may grow to included.
    """

    def __init__(self, layout: PageLayout, rank: int, fds: Sequence[int], sizes: Sequence[int]) -> None:
        self._layout = layout
        self._rank = rank
        self._maps: list[mmap.mmap] = []
        self._addresses: dict[int, int] = {}
        for pool, fd, nbytes in zip(pools_of(layout, rank), fds, sizes, strict=True):
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            os.close(fd)
            self._maps.append(mapping)
            self._addresses[pool] = np.frombuffer(mapping, dtype=np.uint8).ctypes.data

    def view(self, split_groups: Sequence[int] = ()) -> KvPools:
        """As :meth:`kvmesh.models.base.KvPools.build` makes it."""
        return KvPools.build(self._layout, self._addresses, split_groups, self._rank)
