"""Tells the event sink what changed in the tree and in the levels, in the batches that it wants."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from kvmesh.cache.events import EventSink, StoredBlocks
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.pages import DEVICE_LEVEL, NO_PAGE, Pages, PageTable
from kvmesh.cache.tree import BlockTree, Nodes
from kvmesh.hashing import ReuseScope, TokenIds, v2_root

__all__ = ["Announcer"]


class Announcer:
    """Does nothing without a sink.

    Args:
        layout: layer groups.
        tree: the blocks.
        pools: page tables by pool.
        sink: who is told, or None.
    """

    def __init__(self, layout: PageLayout, tree: BlockTree, pools: Sequence[PageTable], sink: EventSink | None) -> None:
        self._groups = layout.groups
        self._tree = tree
        self._pools = pools
        self._tables = [pools[group.pool] for group in layout.groups]
        self._sink = sink

    def stored(
        self, scope: ReuseScope, parent_key: bytes, keys: Sequence[bytes], tokens: TokenIds, nodes: Nodes
    ) -> None:
        """New blocks of the tree, each continuing the one before, offer their pages in every group that has one.

        Args:
            scope: of the blocks.
            parent_key: key of the block before the first one, or the scope's root key.
            keys: their keys.
            tokens: int32 ``[len(keys), tokens_per_block]``, or ``[1, k]`` for a partial block.
            nodes: the blocks.
        """
        if self._sink is None:
            return
        for group in range(len(self._groups)):
            pages = self._tree.pages(group)[nodes]
            if self._groups[group].has_every_page:
                self.blocks(scope, parent_key, keys, tokens, group, pages)
                continue
            here = pages != NO_PAGE
            # The first page may be an adopted one: it covers less, and may be on a colder level.
            adopted = here[0] and self._tables[group].num_tokens[pages[0]] < tokens.shape[1]
            levels = self._tables[group].level[pages]
            if here.all() and not adopted and (levels == levels[0]).all():
                self.blocks(scope, parent_key, keys, tokens, group, pages)
                continue
            runs = [(0, 1)] if adopted else []
            here[0] = here[0] and not adopted
            # Pages that only waited to be committed may be on colder levels.
            for level in np.unique(levels[here]).tolist():
                runs += _runs(here & (levels == level))
            runs.sort()
            if self._groups[group].kind == "state":  # Each covers as much as it does.
                runs = [(at, at + 1) for begin, end in runs for at in range(begin, end)]
            for begin, end in runs:
                before = parent_key if begin == 0 else keys[begin - 1]
                self.blocks(scope, before, keys[begin:end], tokens[begin:end], group, pages[begin:end])

    def blocks(
        self, scope: ReuseScope, parent_key: bytes, keys: Sequence[bytes], tokens: TokenIds, group: int, pages: Pages
    ) -> None:
        """Consecutive blocks offer ``pages`` in ``group``, all on one level and covering as many tokens."""
        if self._sink is None:
            return
        table = self._tables[group]
        covered = int(table.num_tokens[pages[0]])
        blocks = StoredBlocks(
            scope=scope,
            parent_key=None if parent_key == v2_root(scope) else parent_key,
            keys=keys,
            token_ids=tokens,
            level=int(table.level[pages[0]]),
            priorities=table.priority[pages],
            covered_tokens=covered if covered < tokens.shape[1] else None,
        )
        self._sink.on_stored(group, blocks)

    def removed(self, group: int, keys: Sequence[bytes], pages: Pages) -> None:
        """Blocks with ``keys`` offer ``pages`` in ``group`` no more."""
        if self._sink is None or not keys:
            return
        table = self._tables[group]
        if not table.last_level:
            self._sink.on_removed(group, keys, DEVICE_LEVEL)
            return
        levels = table.level[pages].tolist()
        begin = 0
        for level, run in groupby(levels):
            end = begin + sum(1 for _ in run)
            self._sink.on_removed(group, keys[begin:end], level)
            begin = end

    def moved(self, pool: int, pages: Pages, old: int, new: int) -> None:
        """``pages`` of a pool went from one level to another; those that no block offers are nobody's business."""
        if self._sink is None:
            return
        table = self._pools[pool]
        pages = pages[table.node[pages] >= 0]
        for group in np.unique(table.group[pages]).tolist():
            keys = self._tree.index.keys(table.node[pages[table.group[pages] == group]])
            self._sink.on_moved(group, keys, old, new)

    def replaced(self, group: int, key: bytes, page: Pages, old_level: int, old_priority: int) -> None:
        """A block offers another ``page`` (an array of one) with the same content than it did."""
        if self._sink is None:
            return
        table = self._tables[group]
        self._sink.on_moved(group, [key], old_level, int(table.level[page[0]]))
        if old_priority != table.priority[page[0]]:
            self.priority(table, page, old_priority)

    def priority(self, table: PageTable, page: Pages, old: int) -> None:
        """Tell that the priority of one committed page changed."""
        if self._sink is not None:
            key = self._tree.index.key(int(table.node[page[0]]))
            self._sink.on_priority(int(table.group[page[0]]), [key], old, int(table.priority[page[0]]))


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of consecutive true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
