"""Which blocks of a sequence a sliding window has left behind (semantics §3.3, §3.7, §3.8); pure arithmetic.

A block range is ``[begin, end)`` in block numbers. ``history`` is the number of tokens whose KV is computed or being
computed; the token at position ``history`` is in flight, hence the ``+ 1`` of the formula.
"""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.cache.layout import LayerGroupLayout

__all__ = ["BlockRange", "blocks_needed", "first_live_block", "scratch_range", "stale_range"]


class BlockRange(NamedTuple):
    """Blocks ``begin .. end - 1``."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of blocks."""
        return self.end - self.begin


def stale_range(history: int, tokens_per_block: int, window: int | None, sink_blocks: int = 0) -> BlockRange:
    """Blocks that no query at position ``history`` or later attends to.

    Args:
        history: tokens.
        tokens_per_block: tokens of a block.
        window: attention window in tokens, None for full attention.
        sink_blocks: leading blocks that always stay.
    """
    begin = min(-(-history // tokens_per_block), sink_blocks)
    if window is None:
        return BlockRange(begin, begin)
    return BlockRange(begin, max(begin, (history + 1 - window) // tokens_per_block))


def first_live_block(history: int, tokens_per_block: int, window: int | None) -> int:
    """The first block that a query at ``history`` may still attend to, without sinks."""
    return stale_range(history, tokens_per_block, window).end


def scratch_range(
    history: int, capacity: int, tokens_per_block: int, window: int | None, *, max_rewind: int = 0
) -> BlockRange:
    """New blocks of a prefill step that are stale once it has been computed, so that they can share scratch slots.

    Args:
        history: tokens before the step.
        capacity: tokens after the step.
        tokens_per_block: tokens of a block.
        window: attention window in tokens, None for full attention.
        max_rewind: trailing tokens of the step that may be taken back.
    """
    stale = stale_range(capacity - max_rewind, tokens_per_block, window)
    new = BlockRange(-(-history // tokens_per_block), -(-capacity // tokens_per_block))
    begin, end = max(stale.begin, new.begin), min(stale.end, new.end)
    return BlockRange(begin, max(begin, end))


def blocks_needed(group: LayerGroupLayout, tokens_per_block: int, *, history: int, capacity: int) -> int:
    """Pages that a sequence with ``history`` and ``capacity`` has in ``group``, at least 1; a state group: always 1."""
    if group.kind == "state":
        return 1
    stale = stale_range(history, tokens_per_block, group.window)
    return max(1, -(-capacity // tokens_per_block) - stale.size)
