"""What the cache tells about itself: blocks that became reusable, moved between tiers, and went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmesh.hashing import ReuseScope, TokenIds

__all__ = ["EventSink", "StoredBlocks"]


class StoredBlocks(NamedTuple):
    """Consecutive blocks of one layer group that became reusable; each continues the one before."""

    scope: ReuseScope
    parent_key: bytes | None
    """Key of the block that the first one continues; None: it starts a sequence."""
    keys: Sequence[bytes]
    """V2: 32 bytes each. V1: the 64-bit hash, 8 bytes big-endian."""
    token_ids: TokenIds
    """int32 ``[n, tokens_per_block]``, or ``[1, k]`` with fewer for one partial block. Valid during the call only."""
    level: int
    """Cache level: 0 is the device; which tier the others are is told by :meth:`EventSink.on_created`."""
    priorities: NDArray[np.uint8]
    """``[n]``: retention priority of each block's page."""
    covered_tokens: int | None = None
    """Tokens of every block that the group's pages hold, when that is fewer than the block has."""


class EventSink(Protocol):
    """Receives every change of what is reusable, synchronously, inside the engine's step: it must be quick.

    Everything is told per layer group: a block that has pages in two groups is stored twice, first in the group with
    the smaller id. Within a group every stored key is removed exactly once before it is stored again, at the latest
    when the cache is closed.
    """

    def on_created(self, tiers: Sequence[str], num_pages: Sequence[Sequence[int]]) -> None:
        """The cache begins.

        Args:
            tiers: ``gpu``, ``host`` or ``disk`` by level.
            num_pages: ``num_pages[group][level]``: slots of the pool that holds the group's pages.
        """
        ...

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        """Blocks became reusable in ``group``."""
        ...

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:
        """Blocks, last seen on ``level``, are not reusable any more; a block comes after those that continue it."""
        ...

    def on_moved(self, group: int, keys: Sequence[bytes], old_level: int, new_level: int) -> None:
        """Blocks stay reusable, but their pages moved between levels."""
        ...

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        """The retention priority of blocks changed."""
        ...
