"""The prefix tree: which token blocks are cached, keyed by their V2 digests, one root per reuse scope.

Nodes are numbers; their fields are columns. A key chains over everything before it, so one index from key to node
finds any block, and walking a prompt is one lookup per block. Inner nodes are full blocks; a partial block is a leaf.
The tree knows which page of which layer group a node offers, but not the state of pages. A node may lack the page of a
windowed group; a leaf that offers no page at all is removed.
"""

from __future__ import annotations

import contextlib
import mmap
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.freelist import FreeList
from kvmesh.cache.key_index import KeyIndex
from kvmesh.cache.pages import NO_NODE, NO_PAGE
from kvmesh.hashing import TokenIds
from kvmesh.kernels import _native

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


class _Rows:
    """The tokens of every node, int32 ``[capacity, width]``; grows in place: there is never a second copy."""

    def __init__(self, capacity: int, width: int) -> None:
        self._width = width
        self._memory = mmap.mmap(-1, 4 * capacity * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise()
        self.view: NDArray[np.int32] = np.frombuffer(self._memory, dtype=np.int32).reshape(-1, width)

    def grow(self, capacity: int) -> None:
        self.view = np.empty((0, self._width), dtype=np.int32)  # Memory with a live view cannot be resized.
        self._memory.resize(4 * capacity * self._width)
        self._advise()
        self.view = np.frombuffer(self._memory, dtype=np.int32).reshape(-1, self._width)

    def _advise(self) -> None:
        # Most rows are written right after their memory is touched for the first time: in fewer, larger pages.
        with contextlib.suppress(OSError):  # A kernel without them.
            self._memory.madvise(mmap.MADV_HUGEPAGE)


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
        self._columns: tuple[NDArray[np.int32], ...] = tuple(column.view for column in self._all_columns())
        self._tokens = _Rows(_FIRST_CAPACITY, tokens_per_block)

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

    def shared_prefixes(self, parent: int, tokens: TokenIds) -> list[tuple[int, int]]:
        """Each block that continues ``parent``, newest first, and how many leading ``tokens`` it holds."""
        return _native.shared_prefixes(self._columns, self._tokens.view, parent, tokens)

    def add_root(self, key: bytes) -> int:
        """A new root."""
        nodes = self._take(1)
        node = int(nodes[0])
        self._reset(node)
        self._num_tokens.items[node] = 0
        self.index.add([key], nodes)
        return node

    def add_chain(self, parent: int, keys: Sequence[bytes], tokens: TokenIds) -> Nodes:
        """New full blocks, each the child of the one before, the first one of ``parent``.

        Args:
            parent: a full block or a root.
            keys: their keys, none of which is in the tree.
            tokens: int32 ``[len(keys), tokens_per_block]``.
        """
        nodes = self._take(len(keys))
        _native.link_chain(self._columns, self._tokens.view, parent, nodes, tokens)
        self.index.add(keys, nodes)
        return nodes

    def add_partial(self, parent: int, key: bytes, tokens: TokenIds) -> Nodes:
        """A new partial leaf of ``parent`` that holds ``tokens``: an array of one node."""
        nodes = self._take(1)
        node = int(nodes[0])
        self._reset(node)
        self._num_tokens.items[node] = len(tokens)
        self._tokens.view[node, : len(tokens)] = tokens
        self.index.add([key], nodes)
        self._link(node, parent)
        return nodes

    def remove_subtrees(self, nodes: Sequence[int]) -> tuple[Nodes, list[bytes]]:
        """Remove ``nodes``, all blocks that continue them, and ancestors that are left without pages and children.

        Returns:
            The removed blocks (without roots), each after those that continue it, and their keys. Read their pages with
            :meth:`clear_pages` before the next insertion.
        """
        removed, roots = _native.unlink_subtrees(self._columns, np.array(nodes, dtype=np.int32))
        gone = np.frombuffer(removed, dtype=np.int32)
        keys = self.index.remove(gone)
        if roots:
            root_nodes = np.frombuffer(roots, dtype=np.int32)
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
        return sum(column.nbytes for column in self._columns) + self._tokens.view.nbytes + self.index.nbytes()

    def check(self) -> None:
        """Check links, counts and keys.

        Raises:
            CacheIntegrityError: they contradict each other.
        """
        alive = np.flatnonzero(self._num_tokens.view != _FREE).astype(np.int32)
        if len(alive) != len(self.index) or not self.index.names(alive):
            raise CacheIntegrityError("the index and the blocks name different keys")
        if not self._free.holds_exactly(self._num_tokens.view == _FREE):
            raise CacheIntegrityError("a tree node is lost, or free and in use")
        blocks = self.nodes()
        parents = self._parent.view[blocks]
        if (parents < 0).any() or (self._num_tokens.view[parents] == _FREE).any():
            raise CacheIntegrityError("a block continues one that is not in the tree")
        if (self._num_tokens.view[parents] % self.tokens_per_block != 0).any():
            raise CacheIntegrityError("a partial block is continued")
        counted = np.bincount(parents, minlength=self._free.capacity)[alive]
        if not np.array_equal(counted, self._num_children.view[alive]):
            raise CacheIntegrityError("a block miscounts its children")
        if not _native.check_links(self._columns):
            raise CacheIntegrityError("the lists of children do not hold exactly all blocks")
        leaves = alive[self._num_children.view[alive] == 0]
        if (self._num_tokens.view[leaves] == 0).any():
            raise CacheIntegrityError("a root without blocks was kept")
        empty = np.ones(len(leaves), dtype=np.bool_)
        for column in self._pages:
            empty &= column.view[leaves] == NO_PAGE
        if empty.any():
            raise CacheIntegrityError("a leaf without pages was kept")

    def _take(self, count: int) -> Nodes:
        """Nodes that are not in the tree; their columns hold anything."""
        if count > len(self._free):
            self._grow(count)
        return self._free.take(count)

    def _reset(self, node: int) -> None:
        """No parent, children or pages."""
        for column in (self._parent, self._first_child, self._next, self._previous, *self._pages):
            column.items[node] = NO_NODE
        self._num_children.items[node] = 0

    def _grow(self, room: int) -> None:
        capacity = self._free.capacity
        while capacity - self._free.capacity + len(self._free) < room:
            capacity += capacity // 2
        self._columns = ()  # A column with another live view cannot grow.
        for column in self._all_columns():
            column.grow(capacity)
        self._columns = tuple(column.view for column in self._all_columns())
        self.index.grow(capacity)
        self._tokens.grow(capacity)
        self._free.grow(capacity)

    def _all_columns(self) -> tuple[_Column, ...]:
        """In the order in which the native functions take them."""
        return (
            self._parent, self._first_child, self._next, self._previous, self._num_children, self._num_tokens,
            *self._pages,
        )  # fmt: skip

    def _link(self, node: int, parent: int) -> None:
        first = self._first_child.items[parent]
        self._parent.items[node] = parent
        self._next.items[node] = first
        if first != NO_NODE:
            self._previous.items[first] = node
        self._first_child.items[parent] = node
        self._num_children.items[parent] += 1
