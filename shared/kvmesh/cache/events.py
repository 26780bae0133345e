"""What the cache tells about itself: blocks that became reusable and blocks that went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvmesh.hashing import ReuseScope, TokenIds

__all__ = ["EventSink", "StoredBlock"]


class StoredBlock(NamedTuple):
    """One block that became reusable."""

    key: bytes
    """32-byte V2 key."""
    token_ids: TokenIds
    """Fewer than ``tokens_per_block`` for a partial block."""
    level: int
    """Cache level: 0 is the device."""
    priority: int


class EventSink(Protocol):
    """Receives every change of what is reusable, synchronously, inside the engine's step: it must be quick.

    Every stored key is removed exactly once before it is stored again, at the latest when the cache is closed.
    """

    def on_stored(self, scope: ReuseScope, parent_key: bytes | None, blocks: Sequence[StoredBlock]) -> None:
        """Consecutive blocks became reusable; the first one continues ``parent_key`` (None: it starts a sequence)."""
        ...

    def on_removed(self, keys: Sequence[bytes]) -> None:
        """Blocks are not reusable any more; a block always comes after the blocks that continue it."""
        ...
