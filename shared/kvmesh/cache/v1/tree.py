"""The radix tree of one layer group: which blocks continue which, found by V1 block keys and verified by tokens."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.v1.block import Block
from kvmesh.hashing import ReuseScope, TokenIds

__all__ = ["BlockTree", "Node", "token_bytes"]

_TOKEN_BYTES = 4

_MAX_PASSED = 32
"""Children that a search for a partial match passes over in each direction."""

_tokens_of = operator.attrgetter("tokens")


def token_bytes(token_ids: TokenIds) -> bytes:
    """Tokens, 4 bytes each, big-endian: one fixed form, in which equal beginnings are equal bytes."""
    return token_ids.astype(">i4").tobytes()


@dataclass(slots=True, eq=False)
class Node:
    """A place in the tree. A root has no tokens; all other nodes but partial leaves have ``tokens_per_block``."""

    key: bytes
    """V1 key, 8 bytes big-endian; empty for a root."""
    tokens: bytes
    """See :func:`token_bytes`."""
    parent: Node | None
    block: Block | None = None
    """None: a root, or a hole, which a sliding-window group keeps while blocks continue it."""
    children: list[Node] = field(default_factory=list)
    """Sorted by tokens, so that the closest ones to any tokens are neighbours."""
    on_level: list[int] = field(default_factory=lambda: [0, 0])
    """How many children have their block on which level."""
    anchors: int = 0
    """Open sequences that will continue here; they keep the node in the tree."""
    scope: ReuseScope | None = None
    """Of a root."""

    @property
    def num_tokens(self) -> int:
        """Tokens of this block alone."""
        return len(self.tokens) // _TOKEN_BYTES


class BlockTree:
    """The nodes of one layer group.

    No child of a node is a prefix of another child: a longer block replaces the partial one that it covers.

    Args:
        tokens_per_block: tokens of a full block.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._full_bytes = tokens_per_block * _TOKEN_BYTES
        self._roots: dict[ReuseScope, Node] = {}
        self._by_key: dict[bytes, Node] = {}

    def root(self, scope: ReuseScope) -> Node | None:
        """The root of ``scope``, None while it has no blocks."""
        return self._roots.get(scope)

    def anchor_root(self, scope: ReuseScope) -> Node:
        """The root of ``scope``, made if need be, anchored once."""
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = Node(b"", b"", None, scope=scope)
        root.anchors += 1
        return root

    def alive(self, node: Node) -> bool:
        """Whether ``node`` is in the tree."""
        known = self._by_key.get(node.key) if node.scope is None else self._roots.get(node.scope)
        return known is node

    def child(self, parent: Node, key: bytes, tokens: bytes) -> Node | None:
        """The child of ``parent`` with these tokens. The key only finds it: 64 bits are not trusted."""
        node = self._by_key.get(key)
        return node if node is not None and node.parent is parent and node.tokens == tokens else None

    def knows(self, key: bytes) -> bool:
        """Whether any node has this key, be it by a collision."""
        return key in self._by_key

    def closest_child(self, parent: Node, tokens: bytes, usable: Callable[[Block], bool]) -> tuple[Node | None, int]:
        """The child that shares most leading tokens with ``tokens``, and how many; (None, 0) without one.

        It is the next one before or after them in order; holes and what is not ``usable`` are passed over (a bounded
        number of them).
        """
        best: tuple[Node | None, int] = None, 0
        at = bisect.bisect_left(parent.children, tokens, key=_tokens_of)
        before = parent.children[max(at - _MAX_PASSED, 0) : at]
        for side in (reversed(before), parent.children[at : at + _MAX_PASSED]):
            node = next((node for node in side if node.block is not None and usable(node.block)), None)
            if node is not None and (shared := _common_tokens(node.tokens, tokens)) > best[1]:
                best = node, shared
        return best

    def covered_by(self, parent: Node, tokens: bytes) -> Node | None:
        """The child whose tokens, fewer than ``tokens``, are their beginning."""
        at = bisect.bisect_left(parent.children, tokens, key=_tokens_of)
        node = parent.children[at - 1] if at else None
        return node if node is not None and tokens.startswith(node.tokens) else None

    def covers(self, parent: Node, tokens: bytes) -> bool:
        """Whether a child's tokens begin with ``tokens``."""
        at = bisect.bisect_left(parent.children, tokens, key=_tokens_of)
        return at < len(parent.children) and parent.children[at].tokens.startswith(tokens)

    def add(self, parent: Node, key: bytes, tokens: bytes) -> Node:
        """A new child of ``parent`` without a block; nobody :meth:`knows` its key yet."""
        node = Node(key, tokens, parent)
        bisect.insort_left(parent.children, node, key=_tokens_of)
        self._by_key[key] = node
        return node

    def place(self, node: Node, block: Block | None) -> Block | None:
        """Let ``node`` offer ``block`` (None: nothing) and return what it offered before."""
        before, node.block = node.block, block
        assert node.parent is not None
        if before is not None:
            node.parent.on_level[before.level] -= 1
            before.node = None
        if block is not None:
            node.parent.on_level[block.level] += 1
            block.node = node
        return before

    def remove(self, node: Node) -> None:
        """Take out a node without children and without a block."""
        assert node.parent is not None
        siblings = node.parent.children
        del siblings[bisect.bisect_left(siblings, node.tokens, key=_tokens_of)]
        del self._by_key[node.key]

    def prune(self, node: Node) -> None:
        """Take out ``node`` and its ancestors as far as they offer nothing, continue nowhere and nobody needs them."""
        while not (node.block or node.children or node.anchors) and self.alive(node):
            if node.scope is not None:
                del self._roots[node.scope]
                return
            assert node.parent is not None
            self.remove(node)
            node = node.parent

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        return iter(self._by_key.values())

    def roots(self) -> Iterator[tuple[ReuseScope, Node]]:
        """Every root and its scope."""
        return iter(self._roots.items())

    @staticmethod
    def subtree(node: Node) -> list[Node]:
        """``node`` and all that continue it, each after those that continue it."""
        order: list[Node] = []
        pending = [node]
        while pending:
            current = pending.pop()
            order.append(current)
            pending += current.children
        order.reverse()
        return order

    def check(self) -> None:
        """Check links, counts and keys.

        Raises:
            CacheIntegrityError: they contradict each other.
        """
        linked = 0
        for root in self._roots.values():
            for node in self.subtree(root):
                linked += len(node.children)
                self._check_node(node)
        if linked != len(self._by_key):
            raise CacheIntegrityError("the index and the tree hold different blocks")

    def _check_node(self, node: Node) -> None:
        levels = [0, 0]
        for child in node.children:
            if child.parent is not node or self._by_key.get(child.key) is not child:
                raise CacheIntegrityError("a block is linked to one that it does not continue")
            if child.block is not None:
                levels[child.block.level] += 1
                if child.block.node is not child:
                    raise CacheIntegrityError("a node offers a block that does not know it")
        if levels != node.on_level:
            raise CacheIntegrityError("a node miscounts the levels of its children")
        tokens = [child.tokens for child in node.children]
        if any(later.startswith(earlier) or later < earlier for earlier, later in itertools.pairwise(tokens)):
            raise CacheIntegrityError("the children of a node are not in order, or one covers another")
        if node.children and node.parent is not None and len(node.tokens) != self._full_bytes:
            raise CacheIntegrityError("a partial block is continued")
        if not (node.children or node.block or node.anchors):
            raise CacheIntegrityError("a node that offers nothing and continues nowhere was kept")


def _common_tokens(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // _TOKEN_BYTES
    equal = np.frombuffer(a, dtype=np.uint8, count=length) == np.frombuffer(b, dtype=np.uint8, count=length)
    return int(equal.argmin()) // _TOKEN_BYTES
