"""Commits: computed blocks become reusable, or are found to be there already (semantics §3.4, §3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvmesh.cache.pages import NO_PAGE, Pages, PageTable
from kvmesh.cache.tree import MAX_SCANNED_CHILDREN, Nodes
from kvmesh.hashing import ReuseScope, TokenIds, v2_partial_key, v2_root

if TYPE_CHECKING:
    from kvmesh.cache.store import BlockStore

__all__ = ["Commits"]


class Commits:
    """What inserts blocks into a store's tree.

    Args:
        store: tree, pages and who is told.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._tree = store.tree
        self._announcer = store.announcer
        self._size = store.tokens_per_block

    def full(
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
        existing = self._tree.walk(keys)
        known = len(existing)
        if known:
            self._share(scope, parent_key, keys[:known], token_ids[:known], existing, [own[:known] for own in pages])
        known_end = len(keys) if self._store.all_whole else _last_with_page(pages)
        if known_end <= known:
            return known
        parent = int(existing[-1]) if known else self._parent(scope, parent_key)
        if parent is None:
            return None
        parent_key = keys[known - 1] if known else parent_key
        keys = keys[:known_end]
        tokens = np.ascontiguousarray(token_ids[known:known_end])
        covered = self._partial_prefixes(parent, tokens[0])
        nodes = self._tree.add_chain(parent, keys[known:], tokens)
        own = [held[known:known_end] for held in pages]
        self._adopt(covered, int(nodes[0]), own)
        self._attach(nodes, own, self._size)
        self._store.remove(covered)
        self._store.counters.stored_blocks += len(nodes)
        self._announcer.stored(scope, parent_key, keys[known:], tokens, nodes)
        return known_end

    def partial(self, scope: ReuseScope, parent_key: bytes, token_ids: TokenIds, pages: list[Pages]) -> bool:
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
        if self._tree.find(key) is not None or not _last_with_page(pages):
            return False
        parent = self._parent(scope, parent_key)
        if parent is None:
            return False
        scanned = 0 < self._tree.num_children(parent) < MAX_SCANNED_CHILDREN
        if scanned and any(shared == len(token_ids) for _, shared in self._tree.shared_prefixes(parent, token_ids)):
            return False
        covered = self._partial_prefixes(parent, token_ids)
        tokens = token_ids.copy()
        nodes = self._tree.add_partial(parent, key, tokens)
        self._adopt(covered, int(nodes[0]), pages)
        self._attach(nodes, pages, len(tokens))
        self._store.remove(covered)
        self._store.counters.stored_blocks += 1
        self._announcer.stored(scope, parent_key, [key], tokens.reshape(1, -1), nodes)
        return True

    def _attach_page(self, node: int, group: int, page: Pages, num_tokens: int) -> None:
        """Let a block of the tree offer ``page`` (an array of one), instead of what it had in ``group``.

        The caller tells of it: what was there before is neither told as removed nor as moved here.
        """
        nodes = np.array([node], dtype=np.int32)
        table = self._store.group_tables[group]
        old = self._tree.pages(group)[nodes]
        self._tree.pages(group)[nodes] = page
        table.attach(page, nodes, num_tokens)
        if old[0] != NO_PAGE:
            table.detach(old)

    def _parent(self, scope: ReuseScope, key: bytes) -> int | None:
        node = self._tree.find(key)
        if node is None and key == v2_root(scope):
            return self._tree.add_root(key)
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
        for group, (table, own, theirs) in enumerate(
            zip(self._store.group_tables, pages, self._store.pages_of(nodes), strict=True)
        ):
            mine = own != NO_PAGE
            there = theirs != NO_PAGE
            if self._store.layout.groups[group].kind == "state":
                self._add_snapshots(group, scope, parent_key, keys, token_ids, nodes, own, theirs)
                continue
            # A page that only waits to be committed may itself be on a colder level.
            as_good = there & (table.num_tokens[theirs] >= self._size) & (table.level[theirs] <= table.level[own])
            same = mine & as_good & (own != theirs)
            if same.any():
                # Ours may be only held: the window has passed it already, and nothing else will be read of it.
                locked = table.uses(own[same])[0] > 0
                self._exchange(table, own, np.flatnonzero(same)[locked], theirs)
                self._store.counters.rebased_pages += int(np.count_nonzero(locked))
            for at in np.flatnonzero(mine & ~as_good & (own != theirs)).tolist():
                old = theirs[at : at + 1]
                level, whole = int(table.level[old[0]]), int(table.num_tokens[old[0]]) >= self._size
                priority = int(table.priority[old[0]])
                if there[at] and not whole:
                    self._announcer.removed(group, [keys[at]], old)
                self._attach_page(int(nodes[at]), group, own[at : at + 1], self._size)
                if there[at] and whole:
                    self._announcer.replaced(group, keys[at], own[at : at + 1], level, priority)
                    continue
                parent = parent_key if at == 0 else keys[at - 1]
                self._announcer.blocks(scope, parent, [keys[at]], token_ids[at : at + 1], group, own[at : at + 1])

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
        table = self._store.group_tables[group]
        for at in np.flatnonzero(own != NO_PAGE).tolist():
            old, page = theirs[at : at + 1], own[at : at + 1]
            tokens = int(table.num_tokens[page[0]])
            if old[0] != NO_PAGE:
                if table.num_tokens[old[0]] >= tokens:
                    continue
                self._announcer.removed(group, [keys[at]], old)
            self._attach_page(int(nodes[at]), group, page, tokens)
            parent = parent_key if at == 0 else keys[at - 1]
            self._announcer.blocks(scope, parent, [keys[at]], token_ids[at : at + 1], group, page)

    def _exchange(self, table: PageTable, own: Pages, at: np.ndarray, theirs: Pages) -> None:
        table.lock(theirs[at])
        table.unlock(own[at])
        own[at] = theirs[at]

    def _adopt(self, covered: list[int], node: int, pages: list[Pages]) -> None:
        """Where the new block has no page, take over one of a block that it makes useless."""
        for group, own in enumerate(pages):
            if own[0] != NO_PAGE or self._store.whole_chain[group]:
                continue
            column, table = self._tree.pages(group), self._store.group_tables[group]
            offers = [int(column[child]) for child in covered if column[child] != NO_PAGE]
            if not offers:
                continue
            best = max(offers, key=lambda page: int(table.num_tokens[page]))
            one = np.array([best], dtype=np.int32)
            former = table.node[one]
            self._announcer.removed(group, self._tree.index.keys(former), one)
            column[former] = NO_PAGE
            column[node] = best
            table.node[best] = node

    def _attach(self, nodes: Nodes, pages: list[Pages], num_tokens: int) -> None:
        for group, (table, own) in enumerate(zip(self._store.group_tables, pages, strict=True)):
            if self._store.whole_chain[group]:
                table.attach(own, nodes, num_tokens)
                self._tree.pages(group)[nodes] = own
                continue
            here = own != NO_PAGE
            if self._store.layout.groups[group].kind == "state":
                table.attach(own[here], nodes[here], table.num_tokens[own[here]])
                self._tree.pages(group)[nodes[here]] = own[here]
            elif here.all():
                table.attach(own, nodes, num_tokens)
                self._tree.pages(group)[nodes] = own
            else:
                table.attach(own[here], nodes[here], num_tokens)
                self._tree.pages(group)[nodes[here]] = own[here]

    def _partial_prefixes(self, parent: int, token_ids: TokenIds) -> list[int]:
        """Children of ``parent`` that a new block of ``token_ids`` makes useless: partial, and a prefix of it."""
        if not 0 < self._tree.num_children(parent) < MAX_SCANNED_CHILDREN:
            return []
        return [
            child
            for child, length in self._tree.shared_prefixes(parent, token_ids)
            if length and length == self._tree.num_tokens(child) < self._size
        ]


def _last_with_page(pages: Sequence[Pages]) -> int:
    """Number of blocks up to the last one that has a page in some group."""
    ends = [int(own.nonzero()[0][-1]) + 1 for own in (pages_of + 1 for pages_of in pages) if own.any()]
    return max(ends, default=0)
