"""The prefix tree: which token blocks are cached, keyed by their V2 digests, one root per reuse scope.

Nodes are numbers; their fields are columns. A key chains over everything before it, so one index from key to node
finds any block, and walking a prompt is one lookup per block. Inner nodes are full blocks; a partial block is a leaf.
The tree knows which page of which layer group a node offers, but not the state of pages. A node may lack the page of a
windowed group; a leaf that offers no page at all is removed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.freelist import FreeList
from kvmesh.cache.key_index import KeyIndex
from kvmesh.cache.pages import NO_NODE, NO_PAGE
from kvmesh.hashing import TokenIds

__all__ = ["MAX_SCANNED_CHILDREN", "BlockTree", "Nodes"]

Nodes = NDArray[np.int32]

MAX_SCANNED_CHILDREN = 32
"""A node with this many children is not searched for partial matches: the cost would grow with the cache."""

_FIRST_CAPACITY = 1024

_FREE = -1
"""Number of tokens of a node that is not in the tree."""


class _Column:
    """One int32 per node, as an ``array`` (quick scalar access) and a numpy view of the same memory (bulk access)."""

    __slots__ = ("_fill", "items", "view")

    def __init__(self, capacity: int, fill: int) -> None:
        self._fill = fill
        self.items = array("i", [fill]) * capacity
        self.view: NDArray[np.int32] = np.frombuffer(self.items, dtype=np.int32)

    def grow(self, capacity: int) -> None:
        # An array with a live view cannot be resized.
        self.view = np.empty(0, dtype=np.int32)
        self.items.extend(array("i", [self._fill]) * (capacity - len(self.items)))
        self.view = np.frombuffer(self.items, dtype=np.int32)


class BlockTree:
    """The blocks of all scopes.

    Args:
        tokens_per_block: tokens of a full block.
        num_groups: layer groups; a node offers at most one page for each.
    """

    def __init__(self, tokens_per_block: int, num_groups: int) -> None:
        self.tokens_per_block = tokens_per_block
        self.index = KeyIndex(_FIRST_CAPACITY)
        self._free = FreeList(_FIRST_CAPACITY)
        self._parent = _Column(_FIRST_CAPACITY, NO_NODE)
        self._first_child = _Column(_FIRST_CAPACITY, NO_NODE)
        self._next = _Column(_FIRST_CAPACITY, NO_NODE)
        self._previous = _Column(_FIRST_CAPACITY, NO_NODE)
        self._num_children = _Column(_FIRST_CAPACITY, 0)
        self._num_tokens = _Column(_FIRST_CAPACITY, _FREE)
        """0 marks a root."""
        self._pages = [_Column(_FIRST_CAPACITY, NO_PAGE) for _ in range(num_groups)]
        self._tokens: TokenIds = np.zeros((_FIRST_CAPACITY, tokens_per_block), dtype=np.int32)

    def __len__(self) -> int:
        """Number of blocks, roots included."""
        return len(self.index)

    def find(self, key: bytes) -> int | None:
        """The node with ``key``."""
        node = self.index.find(key)
        return None if node == NO_NODE else node

    def walk(self, keys: Sequence[bytes]) -> Nodes:
        """Nodes of the longest leading run of ``keys`` that is in the tree."""
        return self.index.walk(keys)

    def contains(self, node: int) -> bool:
        """Whether ``node`` is a block or a root of the tree now."""
        return self._num_tokens.items[node] != _FREE

    def is_root(self, node: int) -> bool:
        """Whether ``node`` is the root of a scope."""
        return self._num_tokens.items[node] == 0

    def num_tokens(self, node: int) -> int:
        """Tokens of the block."""
        return self._num_tokens.items[node]

    def parent(self, node: int) -> int:
        """The node before ``node``; ``NO_NODE`` for a root."""
        return self._parent.items[node]

    def num_children(self, node: int) -> int:
        """How many blocks continue this one."""
        return self._num_children.items[node]

    def children(self, node: int) -> list[int]:
        """The blocks that continue this one, newest first."""
        found: list[int] = []
        child = self._first_child.items[node]
        while child != NO_NODE:
            found.append(child)
            child = self._next.items[child]
        return found

    def pages(self, group: int) -> NDArray[np.int32]:
        """Page of each node in ``group``, indexed by node (a view that dies with the next insertion)."""
        return self._pages[group].view

    def common_prefix(self, nodes: list[int], tokens: TokenIds) -> NDArray[np.intp]:
        """How many leading ``tokens`` each of ``nodes`` shares."""
        width = min(len(tokens), self.tokens_per_block)
        equal = np.empty((len(nodes), width + 1), dtype=np.bool_)
        np.equal(self._tokens[nodes, :width], tokens[:width], out=equal[:, :width])
        equal[:, width] = False
        shared: NDArray[np.intp] = np.minimum(equal.argmin(axis=1), self._num_tokens.view[nodes])
        return shared

    def add_root(self, key: bytes) -> int:
        """A new root."""
        nodes = self._take(1)
        self._num_tokens.view[nodes] = 0
        self.index.add([key], nodes)
        return int(nodes[0])

    def add_chain(self, parent: int, keys: Sequence[bytes], tokens: TokenIds) -> Nodes:
        """New full blocks, each the child of the one before, the first one of ``parent``.

        Args:
            parent: a full block or a root.
            keys: their keys, none of which is in the tree.
            tokens: int32 ``[len(keys), tokens_per_block]``.
        """
        nodes = self._take(len(keys))
        self._num_tokens.view[nodes] = self.tokens_per_block
        self._tokens[nodes] = tokens
        before, after = nodes[:-1], nodes[1:]
        self._parent.view[after] = before
        self._first_child.view[before] = after
        self._num_children.view[before] = 1
        self.index.add(keys, nodes)
        self._link(int(nodes[0]), parent)
        return nodes

    def add_partial(self, parent: int, key: bytes, tokens: TokenIds) -> Nodes:
        """A new partial leaf of ``parent`` that holds ``tokens``: an array of one node."""
        nodes = self._take(1)
        node = int(nodes[0])
        self._num_tokens.items[node] = len(tokens)
        self._tokens[node, : len(tokens)] = tokens
        self.index.add([key], nodes)
        self._link(node, parent)
        return nodes

    def remove_subtrees(self, nodes: Sequence[int]) -> tuple[Nodes, list[bytes]]:
        """Remove ``nodes``, all blocks that continue them, and ancestors that are left without pages and children.

        Returns:
            The removed blocks (without roots), each after those that continue it, and their keys. Read their pages with
            :meth:`clear_pages` before the next insertion.
        """
        removed: list[int] = []
        roots: list[int] = []
        for node in nodes:
            if self._num_tokens.items[node] == _FREE:
                continue  # went with the subtree of an earlier one
            leaf = self._num_children.items[node] == 0
            parent = self._parent.items[node]
            for current in (node,) if leaf else self.post_order(node):
                self._take_out(current, removed)
            while parent != NO_NODE and self._num_children.items[parent] == 0:
                above = self._parent.items[parent]
                if self.is_root(parent):
                    self._num_tokens.items[parent] = _FREE
                    roots.append(parent)
                elif all(column.items[parent] == NO_PAGE for column in self._pages):
                    self._take_out(parent, removed)
                else:
                    break
                parent = above
        gone = np.array(removed, dtype=np.int32)
        keys = self.index.remove(gone)
        if roots:
            root_nodes = np.array(roots, dtype=np.int32)
            self.index.remove(root_nodes)
            self._free.put(root_nodes)
        self._free.put(gone)
        return gone, keys

    def empty_leaves(self, nodes: Sequence[int]) -> list[int]:
        """Which of ``nodes`` are leaves that offer no page any more."""
        return [
            node
            for node in dict.fromkeys(nodes)
            if self._num_tokens.items[node] > 0
            and self._num_children.items[node] == 0
            and all(column.items[node] == NO_PAGE for column in self._pages)
        ]

    def clear_pages(self, group: int, nodes: Nodes) -> NDArray[np.int32]:
        """Take the pages of ``nodes`` in ``group`` away from them and return them."""
        column = self._pages[group].view
        pages: NDArray[np.int32] = column[nodes]
        column[nodes] = NO_PAGE
        return pages

    def post_order(self, node: int) -> list[int]:
        """The subtree of ``node``, every block after all blocks that continue it."""
        order: list[int] = []
        pending = [node]
        while pending:
            current = pending.pop()
            order.append(current)
            if self._num_children.items[current]:
                pending += self.children(current)
        order.reverse()
        return order

    def nodes(self) -> Nodes:
        """Every block, roots left out."""
        return np.flatnonzero(self._num_tokens.view > 0).astype(np.int32)

    def lengths(self, nodes: Nodes) -> NDArray[np.int32]:
        """Tokens of each of ``nodes``."""
        lengths: NDArray[np.int32] = self._num_tokens.view[nodes]
        return lengths

    def roots(self) -> list[int]:
        """The roots of all scopes."""
        return np.flatnonzero(self._num_tokens.view == 0).tolist()

    def nbytes(self) -> int:
        """Bytes of all columns and of the index."""
        columns = (
            self._parent, self._first_child, self._next, self._previous, self._num_children, self._num_tokens,
            *self._pages,
        )  # fmt: skip
        return sum(column.view.nbytes for column in columns) + self._tokens.nbytes + self.index.nbytes()

    def check(self) -> None:
        """Check links, counts and keys.

        Raises:
            CacheIntegrityError: they contradict each other.
        """
        alive = np.flatnonzero(self._num_tokens.view != _FREE).astype(np.int32)
        if len(alive) != len(self.index) or not np.array_equal(self.index.walk(self.index.keys(alive)), alive):
            raise CacheIntegrityError("the index and the blocks name different keys")
        if len(alive) + len(self._free) != self._free.capacity or np.isin(alive, self._free.free).any():
            raise CacheIntegrityError("a tree node is lost, or free and in use")
        blocks = self.nodes()
        parents = self._parent.view[blocks]
        if (self._num_tokens.view[parents] == _FREE).any():
            raise CacheIntegrityError("a block continues one that is not in the tree")
        if (self._num_tokens.view[parents] % self.tokens_per_block != 0).any():
            raise CacheIntegrityError("a partial block is continued")
        counted = np.bincount(parents, minlength=self._free.capacity)[alive]
        if not np.array_equal(counted, self._num_children.view[alive]):
            raise CacheIntegrityError("a block miscounts its children")
        linked = sorted(child for node in alive.tolist() for child in self.children(node))
        if linked != sorted(blocks.tolist()):
            raise CacheIntegrityError("the lists of children do not hold exactly all blocks")
        leaves = self._num_children.view[alive] == 0
        if (self._num_tokens.view[alive][leaves] == 0).any():
            raise CacheIntegrityError("a root without blocks was kept")
        if self.empty_leaves(alive[leaves].tolist()):
            raise CacheIntegrityError("a leaf without pages was kept")

    def _take_out(self, node: int, removed: list[int]) -> None:
        self._unlink(node, self._parent.items[node])
        self._num_tokens.items[node] = _FREE
        removed.append(node)

    def _take(self, count: int) -> Nodes:
        """Fresh nodes without parent, children or pages."""
        if count > len(self._free):
            self._grow(count)
        nodes = self._free.take(count)
        for column in (self._parent, self._first_child, self._next, self._previous, *self._pages):
            column.view[nodes] = NO_NODE
        self._num_children.view[nodes] = 0
        return nodes

    def _grow(self, room: int) -> None:
        capacity = self._free.capacity
        while capacity - self._free.capacity + len(self._free) < room:
            capacity += capacity // 2
        for column in (
            self._parent,
            self._first_child,
            self._next,
            self._previous,
            self._num_children,
            self._num_tokens,
            *self._pages,
        ):
            column.grow(capacity)
        self.index.grow(capacity)
        tokens: TokenIds = np.zeros((capacity, self.tokens_per_block), dtype=np.int32)
        tokens[: len(self._tokens)] = self._tokens
        self._tokens = tokens
        self._free.grow(capacity)

    def _link(self, node: int, parent: int) -> None:
        first = self._first_child.items[parent]
        self._parent.items[node] = parent
        self._next.items[node] = first
        if first != NO_NODE:
            self._previous.items[first] = node
        self._first_child.items[parent] = node
        self._num_children.items[parent] += 1

    def _unlink(self, node: int, parent: int) -> None:
        before, after = self._previous.items[node], self._next.items[node]
        if before == NO_NODE:
            self._first_child.items[parent] = after
        else:
            self._next.items[before] = after
        if after != NO_NODE:
            self._previous.items[after] = before
        self._num_children.items[parent] -= 1
