"""Blocks and their pages together: match, allocate, commit, evict. The only module that changes tree and pages at once.

Under the rules of this module every block of the tree offers a page in every layer group that covers all its tokens,
and whoever uses a block's page uses the pages of all blocks before it. So a match is a walk, and evicting the oldest
pages takes leaves first by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvmesh.cache.events import EventSink, StoredBlocks
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.pages import DEVICE_LEVEL, Pages, PageTable
from kvmesh.cache.stats import CacheCounters
from kvmesh.cache.tree import MAX_SCANNED_CHILDREN, BlockTree
from kvmesh.hashing import ReuseScope, TokenIds, v2_partial_key, v2_root

__all__ = ["BlockMatch", "BlockStore"]


class BlockMatch(NamedTuple):
    """What of a prompt is cached; valid until the next change of the store."""

    nodes: list[int]
    """The full blocks."""
    partial_node: int | None
    """The block whose first tokens continue them."""
    partial_tokens: int
    """How many tokens of it match; 0 without a partial block."""


class BlockStore:
    """Tree and page tables of one cache.

    Args:
        layout: layer groups and pools.
        num_pages: pages of each pool.
        partial_reuse: match the leading tokens of a block, too.
        sink: told of every change of what is reusable.
    """

    def __init__(
        self, layout: PageLayout, num_pages: list[int], *, partial_reuse: bool, sink: EventSink | None
    ) -> None:
        self.tokens_per_block = layout.tokens_per_block
        self.tables = [PageTable(count) for count in num_pages]
        self.group_tables = [self.tables[group.pool] for group in layout.groups]
        self.tree = BlockTree(layout.tokens_per_block, len(layout.groups))
        self.counters = CacheCounters()
        self._pool_of_group = [group.pool for group in layout.groups]
        self._partial_reuse = partial_reuse
        self._sink = sink

    @property
    def num_groups(self) -> int:
        """Layer groups; the length of every list of pages below."""
        return len(self.group_tables)

    @property
    def num_blocks(self) -> int:
        """Reusable blocks, partial ones included."""
        return self.counters.stored_blocks - self.counters.removed_blocks

    def match(self, scope: ReuseScope, keys: list[bytes], token_ids: TokenIds, limit: int) -> BlockMatch:
        """Find the longest cached prefix of ``token_ids``, at most ``limit`` tokens. Changes nothing.

        Args:
            scope: where to look.
            keys: V2 keys of the full blocks of ``token_ids``.
            token_ids: int32 ``[T]``.
            limit: upper bound in tokens.
        """
        size = self.tokens_per_block
        nodes = self.tree.walk(keys)
        count = min(len(nodes), limit // size)
        rest = token_ids[count * size : min(limit, (count + 1) * size)]
        if not self._partial_reuse or not len(rest):
            return BlockMatch(nodes[:count], None, 0)
        if count < len(nodes):
            return BlockMatch(nodes[:count], nodes[count], len(rest))
        tip = nodes[-1] if nodes else self.tree.find(v2_root(scope))
        if tip is not None and 0 < self.tree.num_children(tip) < MAX_SCANNED_CHILDREN:
            children = self.tree.children(tip)
            shared = self.tree.common_prefix(children, rest)
            best = int(shared.argmax())
            if shared[best]:
                return BlockMatch(nodes, children[best], int(shared[best]))
        return BlockMatch(nodes, None, 0)

    def pages_of(self, nodes: list[int]) -> list[Pages]:
        """Pages of ``nodes`` in each layer group."""
        return [self.tree.pages(group)[nodes] for group in range(self.num_groups)]

    def allocate(self, counts: list[int], priority: int) -> list[Pages] | None:
        """Take ``counts[group]`` pages for each layer group, locked once, evicting what has to go.

        Returns:
            The pages, or None when there are not enough; then nothing has changed.
        """
        needs = [0] * len(self.tables)
        for pool, count in zip(self._pool_of_group, counts, strict=True):
            needs[pool] += count
        if any(need > table.num_available for need, table in zip(needs, self.tables, strict=True)):
            return None
        for need, table in zip(needs, self.tables, strict=True):
            self._evict(table, need - len(table.free_pages))
        self.counters.allocated_pages += sum(counts)
        return [
            table.allocate(count, group, priority)
            for group, (table, count) in enumerate(zip(self.group_tables, counts, strict=True))
        ]

    def commit_full(
        self, scope: ReuseScope, parent_key: bytes, keys: list[bytes], token_ids: TokenIds, pages: list[Pages]
    ) -> bool:
        """Make full blocks reusable. A block that is in the tree already is shared instead: ``pages`` are replaced.

        Args:
            scope: scope of the sequence.
            parent_key: key of the block before the first one, or the scope's root key.
            keys: their keys.
            token_ids: int32 ``[len(keys), tokens_per_block]``.
            pages: per layer group the locked private pages of the blocks; changed in place where the tree's page is
                shared instead.

        Returns:
            False when the block before is not in the tree any more, so that these cannot be reached.
        """
        parent = self._parent(scope, parent_key)
        if parent is None:
            return False
        existing = self.tree.walk(keys)
        known = len(existing)
        if known:
            self._share(existing, [held[:known] for held in pages])
            parent, parent_key = existing[-1], keys[known - 1]
        if known == len(keys):
            return True
        tokens = np.ascontiguousarray(token_ids[known:])
        covered = self._partial_prefixes(parent, tokens[0])
        nodes = self.tree.add_chain(parent, keys[known:], tokens)
        self._attach(nodes, [held[known:] for held in pages], self.tokens_per_block)
        self._remove(covered)
        self._announce(scope, parent_key, keys[known:], tokens, [held[known:] for held in pages])
        return True

    def commit_partial(self, scope: ReuseScope, parent_key: bytes, token_ids: TokenIds, pages: list[Pages]) -> bool:
        """Make a partial block reusable as a leaf, unless a block that covers it is there already.

        Args:
            scope: scope of the sequence.
            parent_key: key of the block before, or the scope's root key.
            token_ids: the block's tokens, fewer than ``tokens_per_block``.
            pages: per layer group the one private page.

        Returns:
            Whether the tree offers these pages now.
        """
        key = v2_partial_key(token_ids, parent_key)
        if self.tree.find(key) is not None:
            return False
        parent = self._parent(scope, parent_key)
        if parent is None:
            return False
        if 0 < self.tree.num_children(parent) < MAX_SCANNED_CHILDREN:
            shared = self.tree.common_prefix(self.tree.children(parent), token_ids)
            if int(shared.max()) == len(token_ids):
                return False
        covered = self._partial_prefixes(parent, token_ids)
        tokens = token_ids.copy()
        node = self.tree.add_partial(parent, key, tokens)
        self._attach(np.array([node], dtype=np.int32), pages, len(tokens))
        self._remove(covered)
        self._announce(scope, parent_key, [key], tokens[np.newaxis], pages)
        return True

    def clear(self) -> None:
        """Forget every block. Pages that are still held outlive this and are freed by their last user."""
        self._remove([child for root in self.tree.roots() for child in self.tree.children(root)])

    def _parent(self, scope: ReuseScope, key: bytes) -> int | None:
        node = self.tree.find(key)
        if node is None and key == v2_root(scope):
            return self.tree.add_root(key)
        return node

    def _share(self, nodes: list[int], pages: list[Pages]) -> None:
        for table, mine, theirs in zip(self.group_tables, pages, self.pages_of(nodes), strict=True):
            table.lock(theirs)
            table.unlock(mine)
            mine[:] = theirs
            self.counters.rebased_pages += len(theirs)

    def _attach(self, nodes: np.ndarray[tuple[int], np.dtype[np.int32]], pages: list[Pages], num_tokens: int) -> None:
        for group, (table, mine) in enumerate(zip(self.group_tables, pages, strict=True)):
            table.attach(mine, nodes, num_tokens)
            self.tree.pages(group)[nodes] = mine

    def _partial_prefixes(self, parent: int, token_ids: TokenIds) -> list[int]:
        """Children of ``parent`` that a new block of ``token_ids`` makes useless: partial, and a prefix of it."""
        if not 0 < self.tree.num_children(parent) < MAX_SCANNED_CHILDREN:
            return []
        children = self.tree.children(parent)
        shared = self.tree.common_prefix(children, token_ids).tolist()
        return [
            child
            for child, length in zip(children, shared, strict=True)
            if length == self.tree.num_tokens(child) < self.tokens_per_block
        ]

    def _evict(self, table: PageTable, count: int) -> None:
        while count > 0:
            before = len(table.free_pages)
            victims = table.queue.pop(count)
            assert len(victims)
            self._remove(table.node[victims].tolist())
            freed = len(table.free_pages) - before
            self.counters.evicted_pages += freed
            count -= freed

    def _remove(self, nodes: list[int]) -> None:
        if not nodes:
            return
        removed, keys = self.tree.remove_subtrees(nodes)
        for group, table in enumerate(self.group_tables):
            table.detach(self.tree.clear_pages(group, removed))
        self.counters.removed_blocks += len(keys)
        if self._sink is not None:
            for group in range(self.num_groups):
                self._sink.on_removed(group, keys, DEVICE_LEVEL)

    def _announce(
        self, scope: ReuseScope, parent_key: bytes, keys: list[bytes], token_ids: TokenIds, pages: list[Pages]
    ) -> None:
        self.counters.stored_blocks += len(keys)
        if self._sink is None:
            return
        parent = None if parent_key == v2_root(scope) else parent_key
        for group, (table, held) in enumerate(zip(self.group_tables, pages, strict=True)):
            priorities = table.priority[held].astype(np.uint8)
            self._sink.on_stored(group, StoredBlocks(scope, parent, keys, token_ids, DEVICE_LEVEL, priorities))
