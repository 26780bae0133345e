"""What an index holds and what it has been through."""

from __future__ import annotations

import msgspec

__all__ = ["BLOCK_BYTES", "RESIDENCY_BYTES", "IndexStatistics"]

BLOCK_BYTES = 208
"""Memory of one block in a tree: its node, its prefix hash and the entry that finds it."""

RESIDENCY_BYTES = 88
"""Memory of one block at one worker: the engine's hash and the entry that finds the node.

Both measured as resident memory with 1 worker (296 bytes a block), and above tracemalloc's count with 1 to 40 workers.
"""


class IndexStatistics(msgspec.Struct, kw_only=True):
    """Sizes now, and counters since the start."""

    sources: int = 0
    scopes: int = 0
    blocks: int = 0
    """Distinct blocks."""
    residencies: int = 0
    """Blocks times the workers and tiers that hold them."""
    parked_runs: int = 0
    """Stored events whose parent has not been heard of."""
    stored_blocks_total: int = 0
    removed_blocks_total: int = 0
    duplicate_blocks_total: int = 0
    unknown_removals_total: int = 0
    unknown_moves_total: int = 0
    """Blocks said to be in another tier that nobody had stored."""
    orphan_blocks_total: int = 0
    """Blocks that came without their parent."""
    dropped_orphan_blocks_total: int = 0
    block_size_changes_total: int = 0
    """Events whose block size is not that of their parent; left out."""
    ignored_group_blocks_total: int = 0
    """Blocks of groups whose presence does not mean that a prefix can be reused (windows, states)."""
    forgotten_blocks_total: int = 0
    """Blocks that the memory bound pushed out."""
    matches_total: int = 0
    matched_tokens_total: int = 0
    """Tokens that the best worker held, over all matches."""
