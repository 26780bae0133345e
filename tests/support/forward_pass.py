"""Writes into pages what a forward pass would write, and reads what it would read; the content tells whose it is.

Every token of every layer has one number in its place in the K buffer: its fingerprint times an odd constant of the
layer. A layer writes the tokens of a step and then reads all that they attend to, before the next layer begins, since
layers may use the same scratch slots one after the other (semantics §3.7).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from reference_cache import fingerprints

from kvmesh.cache.base import Scratch
from kvmesh.cache.layout import LayerGroupLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.sequence import KvCache
from kvmesh.hashing import ReuseScope

__all__ = ["ForwardPass"]

Pages = NDArray[np.int32]

_WORD = 8
_ODD = 0x9E3779B97F4A7C15


class ForwardPass:
    """Reads and writes the device pages of one cache."""

    def __init__(self, manager: KvCacheManager) -> None:
        self._manager = manager
        self._size = manager.layout.tokens_per_block
        self._groups = manager.layout.groups
        self._places = [_places(group, self._size) for group in self._groups]
        self._factors = [
            np.array([(_ODD * (2 * (64 * g + j) + 1)) % (1 << 64) for j in range(len(group.layers))], dtype=np.uint64)
            for g, group in enumerate(self._groups)
        ]

    def words(self, group: int) -> NDArray[np.uint64]:
        """The device pages of the group's pool, uint64 ``[slots, words of a page]``."""
        pool = self._groups[group].pool
        page_bytes = self._manager.layout.pools[pool].page_bytes
        return self._manager.pools[pool].array.view(np.uint64).reshape(-1, page_bytes // _WORD)

    def compute(self, cache: KvCache, tokens: Sequence[int], begin: int) -> None:
        """Compute ``tokens[begin:]``: write them, and read what they attend to."""
        values = fingerprints(cache.scope, tuple(tokens))
        written = np.arange(begin, len(tokens))
        for g, group in enumerate(self._groups):
            first = 0 if group.window is None else max(0, begin + 1 - group.window)
            read = np.arange(first, len(tokens))
            slots, scratch, words = cache.page_ids(g), cache.scratch(g), self.words(g)
            for j in range(len(group.layers)):
                row, word = self._address(g, j, slots, scratch, written)
                assert (row >= 0).all(), f"group {g} has no page for what is computed"
                words[row, word] = values[written] * self._factors[g][j]
                row, word = self._address(g, j, slots, scratch, read)
                assert (row >= 0).all(), f"group {g} has no page for what is attended to"
                assert (words[row, word] == values[read] * self._factors[g][j]).all(), f"group {g} reads other content"

    def receive(self, cache: KvCache, tokens: Sequence[int], begin: int) -> None:
        """Write ``tokens[begin:]`` wherever there is a page, as a peer that sends them does."""
        values = fingerprints(cache.scope, tuple(tokens))
        positions = np.arange(begin, len(tokens))
        for g, group in enumerate(self._groups):
            slots, words = cache.page_ids(g), self.words(g)
            there = positions[slots[positions // self._size] >= 0]
            for j in range(len(group.layers)):
                row, word = self._address(g, j, slots, None, there)
                words[row, word] = values[there] * self._factors[g][j]

    def check(self, group: int, slots: Pages, scope: ReuseScope, tokens: Sequence[int], first: int = 0) -> None:
        """The pages ``slots`` of the blocks of ``tokens`` hold what was written for ``tokens[first:]``.

        Blocks without a page are passed over.
        """
        positions = np.arange(first, len(tokens))
        positions = positions[slots[positions // self._size] >= 0]
        values, words = fingerprints(scope, tuple(tokens)), self.words(group)
        for j in range(len(self._groups[group].layers)):
            row, word = self._address(group, j, slots, None, positions)
            good = words[row, word] == values[positions] * self._factors[group][j]
            assert good.all(), f"group {group}, layer {j}: other content at tokens {positions[~good].tolist()}"

    def check_blocks(
        self, group: int, slots: Pages, prefixes: list[tuple[ReuseScope, tuple[int, ...]]], covered: Pages
    ) -> None:
        """Each of the pages ``slots`` holds the first ``covered`` tokens of the last block of its prefix."""
        if not prefixes:
            return
        size, words = self._size, self.words(group)
        values = np.zeros((len(prefixes), size), dtype=np.uint64)
        for row, (scope, prefix) in enumerate(prefixes):
            tail = fingerprints(scope, prefix)[(len(prefix) - 1) // size * size :]
            values[row, : len(tail)] = tail
        counted = np.arange(size) < covered[:, None]
        for j in range(len(self._groups[group].layers)):
            found = words[slots[:, None], self._places[group][j][None, :]]
            good = (found == values * self._factors[group][j]) | ~counted
            assert good.all(), f"group {group}, layer {j}: other content in {np.flatnonzero(~good.all(axis=1))}"

    def spoil(self, group: int, slots: Pages) -> None:
        """Overwrite whole pages with something that is nobody's."""
        self.words(group)[slots] = np.uint64(0x6666666666666666)

    def _address(
        self, group: int, layer: int, slots: Pages, scratch: Scratch | None, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slot and word of each position for one layer; slot -1 where there is none."""
        blocks, places = positions // self._size, self._places[group]
        row, buffer = slots[blocks].astype(np.int64), np.full(len(positions), layer)
        if scratch is not None:
            inside = (scratch.begin <= blocks) & (blocks < scratch.end)
            index = blocks[inside] - scratch.begin
            row[inside] = scratch.slots[index // len(places)]
            buffer[inside] = index % len(places)
        return row, places[buffer, positions % self._size]


def _places(group: LayerGroupLayout, size: int) -> NDArray[np.int64]:
    """Word of a page where each layer has the number of each token of a block, ``[layers, size]``."""
    rows = []
    for layer in group.layers:
        buffer = group.buffer(layer, "k")
        stride = buffer.nbytes // (buffer.num_kv_heads * size)
        rows.append((buffer.offset_bytes + stride * np.arange(size)) // _WORD)
    return np.stack(rows)
