"""The blocks of one sequence in one layer group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.v1.block import Block
from kvmesh.cache.v1.tree import Node

__all__ = ["GroupView"]

_NO_PAGE = -1
_BLOCK_SLACK = 8
"""Room for the blocks of generated tokens in the first block table."""


class GroupView:
    """Block by block, what a sequence uses in a layer group.

    Args:
        group: layer group.
        window: its attention window in tokens, None for full attention.
        storing: whether its blocks are to become reusable.
        blocks: those found at creation; None where the window has passed.
        tip: node of the last of them, or the root; anchored by the sequence.
        tail: a further block whose leading tokens are to be used, too.
    """

    def __init__(
        self,
        group: int,
        window: int | None,
        *,
        storing: bool,
        blocks: list[Block | None],
        tip: Node,
        tail: Block | None,
    ) -> None:
        self.group = group
        self.window = window
        self.storing = storing
        self.blocks = blocks
        self.tip = tip
        """Node of the last stored block."""
        self.tail = tail
        self.passed = next((i for i, block in enumerate(blocks) if block is not None), len(blocks))
        """Leading blocks that the window has passed."""
        self._table: NDArray[np.int32] = np.empty(len(blocks) + _BLOCK_SLACK, dtype=np.int32)

    @property
    def table(self) -> NDArray[np.int32]:
        """Device slots by block, -1 where there is none; a view."""
        return self._table[: len(self.blocks)]

    def live(self, begin: int = 0) -> Iterator[Block]:
        """The blocks from number ``begin`` on that are there."""
        return (block for block in self.blocks[max(begin, self.passed) :] if block is not None)

    def append(self, blocks: Sequence[Block | None]) -> None:
        """More blocks at the end."""
        begin = len(self.blocks)
        self.blocks += blocks
        if len(self.blocks) > len(self._table):
            grown = np.empty(max(len(self.blocks) + _BLOCK_SLACK, 2 * len(self._table)), dtype=np.int32)
            grown[:begin] = self._table[:begin]
            self._table = grown
        self.refresh(begin)

    def refresh(self, begin: int, end: int | None = None) -> None:
        """Blocks ``begin .. end - 1`` may be others now, or elsewhere: rewrite their part of the table."""
        blocks = self.blocks[begin:end]
        self._table[begin : begin + len(blocks)] = [_NO_PAGE if block is None else block.slot for block in blocks]

    def cut(self, count: int) -> list[Block]:
        """Leave ``count`` blocks and return the others, last one first."""
        gone = [block for block in self.blocks[count:] if block is not None]
        del self.blocks[count:]
        return gone[::-1]

    def pass_until(self, end: int) -> list[Block]:
        """The window has passed the blocks before ``end``; returns those that were still there, first one first."""
        begin, end = self.passed, min(end, len(self.blocks))
        if end <= begin:
            return []
        gone = [block for block in self.blocks[begin:end] if block is not None]
        self.blocks[begin:end] = [None] * (end - begin)
        self.refresh(begin, end)
        self.passed = end
        return gone
