"""Blocks and their pages together: match, allocate, forget; :mod:`kvmesh.cache.commits` adds them.

A block of the tree offers at most one page in each layer group. A full-attention group's page is never missing while
the block is there (when it goes, the block and everything that continues it go), a windowed group's page may be; what
a match may use is decided by :mod:`kvmesh.cache.matching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from kvmesh.cache.announcer import Announcer
from kvmesh.cache.commits import Commits
from kvmesh.cache.events import EventSink
from kvmesh.cache.flows import PageFlows
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.matching import reusable_length
from kvmesh.cache.pages import DEVICE_LEVEL, NO_PAGE, Pages, PageTable
from kvmesh.cache.placement import Placement
from kvmesh.cache.stats import CacheCounters
from kvmesh.cache.storage import Storage
from kvmesh.cache.tallies import Tallies
from kvmesh.cache.tree import MAX_SCANNED_CHILDREN, BlockTree, Nodes
from kvmesh.hashing import ReuseScope, TokenIds, v2_root

__all__ = ["BlockMatch", "BlockStore"]


class BlockMatch(NamedTuple):
    """What of a prompt is cached; valid until the next change of the store."""

    nodes: Nodes
    """The full blocks."""
    partial_node: int | None
    """The block whose first tokens continue them."""
    partial_tokens: int
    """How many tokens of it match; 0 without a partial block."""


NO_MATCH = BlockMatch(np.empty(0, dtype=np.int32), None, 0)


class BlockStore:
    """Tree, page tables and storage of one cache.

    Args:
        layout: layer groups and pools.
        storage: the bytes of all levels.
        num_pages: ``num_pages[level][pool]``.
        max_pages: by pool, the most pages that there may ever be on all levels together.
        partial_reuse: match the leading tokens of a block, too.
        offload_min_priority: lowest priority of an unreferenced page that may move to a colder level.
        sink: told of every change of what is reusable.
    """

    def __init__(
        self,
        layout: PageLayout,
        storage: Storage,
        num_pages: Sequence[Sequence[int]],
        *,
        max_pages: Sequence[int] | None = None,
        partial_reuse: bool,
        offload_min_priority: int,
        sink: EventSink | None,
    ) -> None:
        self.layout = layout
        self.tokens_per_block = layout.tokens_per_block
        self.tables = [
            PageTable([counts[pool] for counts in num_pages], max_slots=max_pages[pool] if max_pages else None)
            for pool in range(len(layout.pools))
        ]
        self.group_tables = [self.tables[group.pool] for group in layout.groups]
        self.tree = BlockTree(layout.tokens_per_block, len(layout.groups))
        self.counters = CacheCounters()
        self.flows = PageFlows(len(num_pages), len(layout.groups))
        self.tallies = Tallies(len(layout.groups), self.flows)
        self.announcer = Announcer(layout, self.tree, self.tables, sink)
        self.placement = Placement(
            self.tables,
            storage,
            [pool.page_bytes for pool in layout.pools],
            min_priority=offload_min_priority,
            counters=self.counters,
            flows=self.flows,
            drop=self.drop_pages,
            moved=self.announcer.moved,
        )
        self._pool_of_group = [group.pool for group in layout.groups]
        self.whole_chain = [group.has_every_page for group in layout.groups]
        """By group: whether a block cannot be without its page."""
        self.all_whole = all(self.whole_chain)
        """Whether every group has full attention: then no page of a block is ever missing."""
        self._partial_reuse = partial_reuse
        self.commits = Commits(self)

    @property
    def num_groups(self) -> int:
        """Layer groups; the length of every list of pages below."""
        return len(self.group_tables)

    @property
    def num_blocks(self) -> int:
        """Reusable blocks, partial ones included."""
        return self.counters.stored_blocks - self.counters.removed_blocks

    def match(self, scope: ReuseScope, keys: Sequence[bytes], token_ids: TokenIds, limit: int) -> BlockMatch:
        """Find the longest cached prefix of ``token_ids``, at most ``limit`` tokens. Changes nothing.

        Args:
            scope: where to look.
            keys: V2 keys of the full blocks of ``token_ids``.
            token_ids: int32 ``[T]``.
            limit: upper bound in tokens.
        """
        size = self.tokens_per_block
        chain = self.tree.walk(keys)
        length = min(len(chain) * size, limit)
        if length == len(chain) * size and self._partial_reuse:
            child, shared = self._best_child(scope, chain, token_ids[length:limit])
            if child is not None:
                chain = np.append(chain, np.int32(child))
                length += shared
        if not length:
            return NO_MATCH
        chain = chain[: -(-length // size)]
        if not self.all_whole:  # Else every block's page is there and covers it.
            coverage = [self._coverage(group, chain) for group in range(self.num_groups)]
            length = reusable_length(length, self.layout.groups, coverage, size, partial=self._partial_reuse)
        elif not self._partial_reuse:
            length -= length % size
        full, rest = divmod(length, size)
        return BlockMatch(chain[:full], int(chain[full]) if rest else None, rest)

    def pages_of(self, nodes: Nodes | list[int]) -> list[Pages]:
        """Pages of ``nodes`` in each layer group, ``NO_PAGE`` where there is none."""
        return [self.tree.pages(group)[nodes] for group in range(self.num_groups)]

    def copy_sources(self, match: BlockMatch) -> list[Pages]:
        """By layer group, the page (an array of one, or empty) that a sequence with this match must copy.

        The page of the partial block in attention groups, the snapshot at the matched position in state groups.
        """
        full = match.nodes[-1:]
        partial = full[:0] if match.partial_node is None else np.array([match.partial_node], dtype=np.int32)
        return [
            self.tree.pages(index)[(partial if len(partial) else full) if group.kind == "state" else partial]
            for index, group in enumerate(self.layout.groups)
        ]

    def copy_to_fresh(self, group: int, source: Pages, num_tokens: int, priority: np.ndarray | int) -> Pages | None:
        """A held copy of the device page ``source`` in the first level with room, None if there is none.

        Args:
            group: of the page.
            source: an array of one.
            num_tokens: what the copy covers, once a block offers it.
            priority: of the copy.
        """
        pool = self._pool_of_group[group]
        table = self.group_tables[group]
        for level, usable in enumerate(self.placement.usable):
            if not usable or not self.placement.make_room(pool, level, 1):
                continue
            page = table.place(1, level, group, priority)
            table.hold(page)
            table.num_tokens[page] = num_tokens
            if self.placement.copy_out(pool, source, page):
                return page
            table.unhold(page)
        return None

    def allocate(self, counts: Sequence[int], priorities: Sequence[np.ndarray | int]) -> list[Pages] | None:
        """Take ``counts[group]`` pages for each layer group, locked once, on the device; what has to goes elsewhere.

        Args:
            counts: by layer group.
            priorities: by layer group, uint8 ``[count]`` or one number for all.

        Returns:
            The pages, or None when there are not enough; then no page was taken.
        """
        needs = self.by_pool(counts)
        if not self.can_allocate(needs):
            return None
        if not all(self.placement.make_room(pool, DEVICE_LEVEL, need) for pool, need in enumerate(needs)):
            return None
        return [
            table.allocate(count, group, priority)
            for group, (table, count, priority) in enumerate(zip(self.group_tables, counts, priorities, strict=True))
        ]

    def can_allocate(self, needs: Sequence[int], extra: Sequence[int] | None = None) -> bool:
        """Whether ``needs[pool]`` device pages can be had now, counting ``extra[pool]`` that are about to be free."""
        return all(
            need <= self.placement.available(pool) + (extra[pool] if extra else 0) for pool, need in enumerate(needs)
        )

    def drop_pages(self, pool: int, pages: Pages) -> None:
        """Make the tree forget ``pages`` of one pool, and what cannot be reached without them."""
        table = self.tables[pool]
        pages = pages[table.node[pages] >= 0]
        if not len(pages):
            return
        emptied: list[int] = []
        for group in np.unique(table.group[pages]).tolist():
            own = pages[table.group[pages] == group]
            own = own[table.node[own] >= 0]  # Removing blocks of a group before may have taken these along.
            if self.whole_chain[group]:
                self.remove(table.node[own].tolist())
                continue
            nodes = table.node[own]
            self.tree.clear_pages(group, nodes)
            self.announcer.removed(group, self.tree.index.keys(nodes), own)
            table.detach(own)
            emptied += nodes.tolist()
        if emptied:
            self.remove(self.tree.empty_leaves(emptied))

    def remove(self, nodes: list[int]) -> None:
        """Forget blocks and everything that continues them."""
        if not nodes:
            return
        removed, keys = self.tree.remove_subtrees(nodes)
        for group, table in enumerate(self.group_tables):
            pages = self.tree.clear_pages(group, removed)
            here = pages != NO_PAGE
            if here.all():
                offered, offered_keys = pages, keys
            else:
                offered = pages[here]
                offered_keys = [key for key, there in zip(keys, here.tolist(), strict=True) if there]
            if len(offered):
                self.announcer.removed(group, offered_keys, offered)
                table.detach(offered)
        self.counters.removed_blocks += len(keys)

    def clear(self) -> None:
        """Forget every block. Pages that are still in use outlive this and are freed by their last user."""
        self.remove([child for root in self.tree.roots() for child in self.tree.children(root)])

    def by_pool(self, counts: Sequence[int]) -> list[int]:
        """Sums over the layer groups of each pool."""
        needs = [0] * len(self.tables)
        for pool, count in zip(self._pool_of_group, counts, strict=True):
            needs[pool] += count
        return needs

    def _coverage(self, group: int, chain: Nodes) -> np.ndarray:
        pages = self.tree.pages(group)[chain]
        coverage: np.ndarray = self.group_tables[group].num_tokens[pages]
        coverage[pages == NO_PAGE] = 0
        return coverage

    def _best_child(self, scope: ReuseScope, chain: Nodes, rest: TokenIds) -> tuple[int | None, int]:
        """The block after ``chain`` that shares the most leading tokens with ``rest``, and how many."""
        if not len(rest):
            return None, 0
        tip = int(chain[-1]) if len(chain) else self.tree.find(v2_root(scope))
        if tip is None or not 0 < self.tree.num_children(tip) < MAX_SCANNED_CHILDREN:
            return None, 0
        child, shared = max(self.tree.shared_prefixes(tip, rest), key=itemgetter(1))
        return (child, shared) if shared else (None, 0)
