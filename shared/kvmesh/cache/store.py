"""Blocks and their pages together: match, allocate, commit, forget. Only here do tree and pages change at once.

A block of the tree offers at most one page in each layer group. A full-attention group's page is never missing while
the block is there (when it goes, the block and everything that continues it go), a windowed group's page may be; what
a match may use is decided by :mod:`kvmesh.cache.matching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from kvmesh.cache.events import EventSink, StoredBlocks
from kvmesh.cache.flows import PageFlows
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.matching import reusable_length
from kvmesh.cache.pages import DEVICE_LEVEL, NO_PAGE, Pages, PageTable
from kvmesh.cache.placement import Placement
from kvmesh.cache.stats import CacheCounters
from kvmesh.cache.storage import Storage
from kvmesh.cache.tree import MAX_SCANNED_CHILDREN, BlockTree, Nodes
from kvmesh.hashing import ReuseScope, TokenIds, v2_partial_key, v2_root

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
        self.placement = Placement(
            self.tables,
            storage,
            [pool.page_bytes for pool in layout.pools],
            min_priority=offload_min_priority,
            counters=self.counters,
            flows=self.flows,
            drop=self.drop_pages,
            moved=self._tell_moved,
        )
        self._pool_of_group = [group.pool for group in layout.groups]
        self._whole_chain = [group.kind == "attention" and group.window is None for group in layout.groups]
        """By group: whether a block cannot be without its page."""
        self.all_whole = all(self._whole_chain)
        """Whether every group has full attention: then no page of a block is ever missing."""
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
        self.counters.allocated_pages += sum(counts)
        return [
            table.allocate(count, group, priority)
            for group, (table, count, priority) in enumerate(zip(self.group_tables, counts, priorities, strict=True))
        ]

    def can_allocate(self, needs: Sequence[int], extra: Sequence[int] | None = None) -> bool:
        """Whether ``needs[pool]`` device pages can be had now, counting ``extra[pool]`` that are about to be free."""
        return all(
            need <= self.placement.available(pool) + (extra[pool] if extra else 0) for pool, need in enumerate(needs)
        )

    def commit_full(
        self, scope: ReuseScope, parent_key: bytes, keys: Sequence[bytes], token_ids: TokenIds, pages: list[Pages]
    ) -> int | None:
        """Make full blocks reusable. A block that is in the tree already is shared instead: ``pages`` are replaced.

        Args:
            scope: scope of the sequence.
            parent_key: key of the block before the first one, or the scope's root key.
            keys: their keys.
            token_ids: int32 ``[len(keys), tokens_per_block]``.
            pages: per layer group the private pages of the blocks, ``NO_PAGE`` where there is none; changed in place
                where the tree's page is shared instead.

        Returns:
            How many of the blocks the tree has now: trailing blocks without any page can only be stored together with a
            later one that has one. None when the block before is not in the tree any more, so that these cannot be
            reached.
        """
        existing = self.tree.walk(keys)
        known = len(existing)
        if known:
            self._share(scope, parent_key, keys[:known], token_ids[:known], existing, [own[:known] for own in pages])
        known_end = len(keys) if self.all_whole else _last_with_page(pages)
        if known_end <= known:
            return known
        parent = int(existing[-1]) if known else self._parent(scope, parent_key)
        if parent is None:
            return None
        parent_key = keys[known - 1] if known else parent_key
        keys = keys[:known_end]
        tokens = np.ascontiguousarray(token_ids[known:known_end])
        covered = self._partial_prefixes(parent, tokens[0])
        nodes = self.tree.add_chain(parent, keys[known:], tokens)
        own = [held[known:known_end] for held in pages]
        self._adopt(covered, int(nodes[0]), own)
        self._attach(nodes, own, self.tokens_per_block)
        self.remove(covered)
        self.counters.stored_blocks += len(nodes)
        self._tell_stored(scope, parent_key, keys[known:], tokens, nodes)
        return known_end

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
        if self.tree.find(key) is not None or not _last_with_page(pages):
            return False
        parent = self._parent(scope, parent_key)
        if parent is None:
            return False
        scanned = 0 < self.tree.num_children(parent) < MAX_SCANNED_CHILDREN
        if scanned and any(shared == len(token_ids) for _, shared in self.tree.shared_prefixes(parent, token_ids)):
            return False
        covered = self._partial_prefixes(parent, token_ids)
        tokens = token_ids.copy()
        nodes = self.tree.add_partial(parent, key, tokens)
        self._adopt(covered, int(nodes[0]), pages)
        self._attach(nodes, pages, len(tokens))
        self.remove(covered)
        self.counters.stored_blocks += 1
        self._tell_stored(scope, parent_key, [key], tokens.reshape(1, -1), nodes)
        return True

    def attach_page(self, node: int, group: int, page: Pages, num_tokens: int) -> None:
        """Let a block of the tree offer ``page`` (an array of one), instead of what it had in ``group``.

        The caller tells of it: what was there before is neither told as removed nor as moved here.
        """
        nodes = np.array([node], dtype=np.int32)
        table = self.group_tables[group]
        old = self.tree.pages(group)[nodes]
        self.tree.pages(group)[nodes] = page
        table.attach(page, nodes, num_tokens)
        if old[0] != NO_PAGE:
            table.detach(old)

    def drop_pages(self, pool: int, pages: Pages) -> None:
        """Make the tree forget ``pages`` of one pool, and what cannot be reached without them."""
        table = self.tables[pool]
        pages = pages[table.node[pages] >= 0]
        if not len(pages):
            return
        emptied: list[int] = []
        for group in np.unique(table.group[pages]).tolist():
            own = pages[table.group[pages] == group]
            if self._whole_chain[group]:
                self.remove(table.node[own].tolist())
                continue
            own = own[table.node[own] >= 0]
            nodes = table.node[own]
            self.tree.clear_pages(group, nodes)
            self._tell_removed(group, self.tree.index.keys(nodes), own)
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
                self._tell_removed(group, offered_keys, offered)
                table.detach(offered)
        self.counters.removed_blocks += len(keys)

    def clear(self) -> None:
        """Forget every block. Pages that are still in use outlive this and are freed by their last user."""
        self.remove([child for root in self.tree.roots() for child in self.tree.children(root)])

    def announce_priority(self, table: PageTable, page: Pages, old: int) -> None:
        """Tell that the priority of one committed page changed."""
        if self._sink is not None:
            key = self.tree.index.key(int(table.node[page[0]]))
            self._sink.on_priority(int(table.group[page[0]]), [key], old, int(table.priority[page[0]]))

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

    def _parent(self, scope: ReuseScope, key: bytes) -> int | None:
        node = self.tree.find(key)
        if node is None and key == v2_root(scope):
            return self.tree.add_root(key)
        return node

    def _share(
        self,
        scope: ReuseScope,
        parent_key: bytes,
        keys: Sequence[bytes],
        token_ids: TokenIds,
        nodes: Nodes,
        pages: list[Pages],
    ) -> None:
        """Blocks are in the tree already: use its pages where they are as good as ours, else offer ours."""
        for group, (table, own, theirs) in enumerate(zip(self.group_tables, pages, self.pages_of(nodes), strict=True)):
            mine = own != NO_PAGE
            there = theirs != NO_PAGE
            if self.layout.groups[group].kind == "state":
                self._add_snapshots(group, scope, parent_key, keys, token_ids, nodes, own, theirs)
                continue
            # A page that only waits to be committed may itself be on a colder level.
            as_good = (
                there & (table.num_tokens[theirs] >= self.tokens_per_block) & (table.level[theirs] <= table.level[own])
            )
            same = mine & as_good & (own != theirs)
            if same.any():
                # Ours may be only held: the window has passed it already, and nothing else will be read of it.
                locked = table.uses(own[same])[0] > 0
                self._exchange(table, own, np.flatnonzero(same)[locked], theirs)
                self.counters.rebased_pages += int(np.count_nonzero(locked))
            for at in np.flatnonzero(mine & ~as_good & (own != theirs)).tolist():
                old = theirs[at : at + 1]
                level, whole = int(table.level[old[0]]), int(table.num_tokens[old[0]]) >= self.tokens_per_block
                priority = int(table.priority[old[0]])
                if there[at] and not whole:
                    self._tell_removed(group, [keys[at]], old)
                self.attach_page(int(nodes[at]), group, own[at : at + 1], self.tokens_per_block)
                if there[at] and whole:
                    if self._sink is not None:
                        self._sink.on_moved(group, [keys[at]], level, int(table.level[own[at]]))
                        if priority != table.priority[own[at]]:
                            self.announce_priority(table, own[at : at + 1], priority)
                    continue
                parent = parent_key if at == 0 else keys[at - 1]
                self._tell(scope, parent, [keys[at]], token_ids[at : at + 1], group, own[at : at + 1])

    def _add_snapshots(
        self,
        group: int,
        scope: ReuseScope,
        parent_key: bytes,
        keys: Sequence[bytes],
        token_ids: TokenIds,
        nodes: Nodes,
        own: Pages,
        theirs: Pages,
    ) -> None:
        """Offer snapshots at blocks that are in the tree already; one block keeps the later position."""
        table = self.group_tables[group]
        for at in np.flatnonzero(own != NO_PAGE).tolist():
            old, page = theirs[at : at + 1], own[at : at + 1]
            tokens = int(table.num_tokens[page[0]])
            if old[0] != NO_PAGE:
                if table.num_tokens[old[0]] >= tokens:
                    continue
                self._tell_removed(group, [keys[at]], old)
            self.attach_page(int(nodes[at]), group, page, tokens)
            parent = parent_key if at == 0 else keys[at - 1]
            self._tell(scope, parent, [keys[at]], token_ids[at : at + 1], group, page)

    def _exchange(self, table: PageTable, own: Pages, at: np.ndarray, theirs: Pages) -> None:
        table.lock(theirs[at])
        table.unlock(own[at])
        own[at] = theirs[at]

    def _adopt(self, covered: list[int], node: int, pages: list[Pages]) -> None:
        """Where the new block has no page, take over one of a block that it makes useless."""
        for group, own in enumerate(pages):
            if own[0] != NO_PAGE or self._whole_chain[group]:
                continue
            column, table = self.tree.pages(group), self.group_tables[group]
            offers = [int(column[child]) for child in covered if column[child] != NO_PAGE]
            if not offers:
                continue
            best = max(offers, key=lambda page: int(table.num_tokens[page]))
            one = np.array([best], dtype=np.int32)
            former = table.node[one]
            self._tell_removed(group, self.tree.index.keys(former), one)
            column[former] = NO_PAGE
            column[node] = best
            table.node[best] = node

    def _attach(self, nodes: Nodes, pages: list[Pages], num_tokens: int) -> None:
        for group, (table, own) in enumerate(zip(self.group_tables, pages, strict=True)):
            if self._whole_chain[group]:
                table.attach(own, nodes, num_tokens)
                self.tree.pages(group)[nodes] = own
                continue
            here = own != NO_PAGE
            if self.layout.groups[group].kind == "state":
                table.attach(own[here], nodes[here], table.num_tokens[own[here]])
                self.tree.pages(group)[nodes[here]] = own[here]
            elif here.all():
                table.attach(own, nodes, num_tokens)
                self.tree.pages(group)[nodes] = own
            else:
                table.attach(own[here], nodes[here], num_tokens)
                self.tree.pages(group)[nodes[here]] = own[here]

    def _partial_prefixes(self, parent: int, token_ids: TokenIds) -> list[int]:
        """Children of ``parent`` that a new block of ``token_ids`` makes useless: partial, and a prefix of it."""
        if not 0 < self.tree.num_children(parent) < MAX_SCANNED_CHILDREN:
            return []
        return [
            child
            for child, length in self.tree.shared_prefixes(parent, token_ids)
            if length and length == self.tree.num_tokens(child) < self.tokens_per_block
        ]

    def _tell_stored(
        self, scope: ReuseScope, parent_key: bytes, keys: Sequence[bytes], tokens: TokenIds, nodes: Nodes
    ) -> None:
        if self._sink is None:
            return
        for group in range(self.num_groups):
            pages = self.tree.pages(group)[nodes]
            if self._whole_chain[group]:
                self._tell(scope, parent_key, keys, tokens, group, pages)
                continue
            here = pages != NO_PAGE
            # The first page may be an adopted one: it covers less, and may be on a colder level.
            adopted = here[0] and self.group_tables[group].num_tokens[pages[0]] < tokens.shape[1]
            levels = self.group_tables[group].level[pages]
            if here.all() and not adopted and (levels == levels[0]).all():
                self._tell(scope, parent_key, keys, tokens, group, pages)
                continue
            runs = [(0, 1)] if adopted else []
            here[0] = here[0] and not adopted
            # Pages that only waited to be committed may be on colder levels.
            for level in np.unique(levels[here]).tolist():
                runs += _runs(here & (levels == level))
            runs.sort()
            if self.layout.groups[group].kind == "state":  # Each covers as much as it does.
                runs = [(at, at + 1) for begin, end in runs for at in range(begin, end)]
            for begin, end in runs:
                before = parent_key if begin == 0 else keys[begin - 1]
                self._tell(scope, before, keys[begin:end], tokens[begin:end], group, pages[begin:end])

    def _tell(
        self, scope: ReuseScope, parent_key: bytes, keys: Sequence[bytes], tokens: TokenIds, group: int, pages: Pages
    ) -> None:
        if self._sink is None:
            return
        table = self.group_tables[group]
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

    def _tell_removed(self, group: int, keys: Sequence[bytes], pages: Pages) -> None:
        if self._sink is None or not keys:
            return
        table = self.group_tables[group]
        if not table.last_level:
            self._sink.on_removed(group, keys, DEVICE_LEVEL)
            return
        levels = table.level[pages].tolist()
        begin = 0
        for level, run in groupby(levels):
            end = begin + sum(1 for _ in run)
            self._sink.on_removed(group, keys[begin:end], level)
            begin = end

    def _tell_moved(self, pool: int, pages: Pages, old: int, new: int) -> None:
        if self._sink is None:
            return
        table = self.tables[pool]
        pages = pages[table.node[pages] >= 0]
        for group in np.unique(table.group[pages]).tolist():
            keys = self.tree.index.keys(table.node[pages[table.group[pages] == group]])
            self._sink.on_moved(group, keys, old, new)


def _last_with_page(pages: Sequence[Pages]) -> int:
    """Number of blocks up to the last one that has a page in some group."""
    ends = [int(own.nonzero()[0][-1]) + 1 for own in (pages_of + 1 for pages_of in pages) if own.any()]
    return max(ends, default=0)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Ranges of consecutive true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
