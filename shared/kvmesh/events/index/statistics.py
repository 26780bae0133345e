"""What an index holds and what it has been through."""

from __future__ import annotations

import msgspec

__all__ = ["IndexStatistics"]


class IndexStatistics(msgspec.Struct, kw_only=True):
    """Sizes now, and counters since the start."""

    sources: int = 0
    scopes: int = 0
    blocks: int = 0
    """Distinct blocks."""
    residencies: int = 0
    """Blocks times the workers and tiers that hold them, predicted ones included."""
    predicted_blocks: int = 0
    """Blocks that are taken for held because a request was just sent there."""
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
    scope_changes_total: int = 0
    """Events that name another model, tenant, adapter or salt than their parent; left out."""
    ignored_group_blocks_total: int = 0
    """Blocks of groups whose presence does not mean that a prefix can be reused (windows, states)."""
    forgotten_blocks_total: int = 0
    """Blocks that the memory bound pushed out."""
    expired_blocks_total: int = 0
    """Predicted blocks whose time was over."""
    matches_total: int = 0
    matched_tokens_total: int = 0
    """Tokens that the best worker held, over all matches."""
