"""A block of the V1 cache: one page of one layer group, and who uses it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from kvmesh.protocol.retention import DEFAULT_PRIORITY

if TYPE_CHECKING:
    from kvmesh.cache.v1.tree import Node

__all__ = ["DEVICE", "HOST", "Block", "BlockState"]

DEVICE = 0
"""The primary pool's level."""

HOST = 1
"""The secondary pool's level."""


class BlockState(IntEnum):
    """What keeps a block from being given away; the first that applies."""

    LOCKED = 0
    """A running sequence uses it."""
    QUARANTINED = 1
    """A transfer into it has ended, but a peer may still write."""
    PINNED = 2
    """A lease needs it where it is."""
    HELD = 3
    """A sequence that does not run yet will need it."""
    EVICTABLE = 4
    """Only the tree knows it."""


@dataclass(slots=True, eq=False)
class Block:
    """One page and its users. It exists from its allocation until neither a user nor the tree knows it."""

    group: int
    level: int
    slot: int
    """In the level's pool."""
    priority: int = DEFAULT_PRIORITY
    duration_s: float = math.inf
    """How long the priority lasts from the next release on; inf also while that time is running."""
    locks: int = 0
    """Running sequences."""
    holds: int = 0
    """Sequences that were created but do not run yet."""
    pins: int = 0
    """Leases."""
    quarantines: int = 0
    """Leases whose peer may still write."""
    node: Node | None = None
    """The tree node that offers it; None: private."""
    damaged: bool = False
    """Its content was lost in a cold tier; it has left the tree, and who still holds it cannot use it."""
    counted_as: BlockState | None = None
    """The state under which it is counted."""
    released: int = 0
    """Number of its last release: a smaller one is older."""

    @property
    def users(self) -> int:
        """Sequences and leases together."""
        return self.locks + self.holds + self.pins

    @property
    def state(self) -> BlockState:
        """Why it stays."""
        if self.locks:
            return BlockState.LOCKED
        if self.quarantines:
            return BlockState.QUARANTINED
        if self.pins:
            return BlockState.PINNED
        return BlockState.HELD if self.holds else BlockState.EVICTABLE
