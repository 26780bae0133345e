"""How much of a found chain of blocks can really be reused (semantics §3.4); pure arithmetic on page coverage.

A chain has every block of a prompt that the tree knows, but not every page: windowed groups lose theirs first. A length
is reusable when, in every layer group, each page that a sequence of that length would attend to is there and holds
enough tokens. The search shortens the length until that is true everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.layout import LayerGroupLayout
from kvmesh.cache.windows import first_live_block

__all__ = ["reusable_length"]

Coverage = NDArray[np.int32]


def reusable_length(
    length: int,
    groups: Sequence[LayerGroupLayout],
    coverage: Sequence[Coverage],
    tokens_per_block: int,
    *,
    partial: bool,
) -> int:
    """The longest reusable prefix of at most ``length`` tokens.

    Args:
        length: tokens of the chain that match the prompt.
        groups: the layer groups.
        coverage: per group, int32 ``[blocks]``: tokens of each block of the chain that its page holds, 0 without a
            page; for a state group the position of the block's snapshot in it, 0 without one.
        tokens_per_block: tokens of a block.
        partial: whether the last block may be reused in part.
    """
    if not partial:
        length -= length % tokens_per_block
    searches = [
        _StateSearch(covered, tokens_per_block)
        if group.kind == "state"
        else _AttentionSearch(covered, tokens_per_block, group.window)
        for group, covered in zip(groups, coverage, strict=True)
    ]
    while True:
        before = length
        for search in searches:
            length = search.shorten(length)
            if not partial:
                length -= length % tokens_per_block
        if length == before:
            return length


class _AttentionSearch:
    """Full or windowed attention: pages of the active blocks must cover the length."""

    def __init__(self, covered: Coverage, size: int, window: int | None) -> None:
        self._covered = covered
        self._size = size
        self._window = window
        whole = covered >= size
        self._all = bool(whole.all())
        # Position of the last block up to each one that is not wholly covered.
        self._last_bad = _NO_BLOCKS if self._all else np.maximum.accumulate(np.where(whole, -1, np.arange(len(whole))))

    def shorten(self, length: int) -> int:
        """The longest length, at most ``length``, that this group can serve."""
        if self._all or not length:
            return length
        size = self._size
        while length:
            begin = 0 if self._window is None else first_live_block(length, size, self._window)
            full, rest = divmod(length, size)
            if rest and self._covered[full] < rest:
                # The tail is short; what it covers may do.
                length = full * size + int(self._covered[full])
                continue
            bad = int(self._last_bad[full - 1]) if full else -1
            if bad < begin:
                return length
            if self._window is None:
                bad = int(np.argmax(self._covered < size))
            length = bad * size + int(self._covered[bad])
        return 0


class _StateSearch:
    """Recurrent state: only the exact position of a snapshot will do."""

    def __init__(self, covered: Coverage, size: int) -> None:
        self._positions = np.arange(len(covered)) * size + covered
        self._positions[covered == 0] = 0

    def shorten(self, length: int) -> int:
        """The longest length, at most ``length``, that this group can serve."""
        fitting = self._positions[self._positions <= length]
        return int(fitting.max(initial=0))


_NO_BLOCKS = np.empty(0, dtype=np.intp)
