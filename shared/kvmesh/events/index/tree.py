"""The blocks of one scope as a tree of nodes, each with a bit for every worker that holds it.

A node is *ready* for a worker when the worker holds it and all its ancestors on the device: that is what a request can
reuse. Holding changes one node; readiness is carried down to the descendants when it changes. In the usual order of
events (parents stored first, leaves removed first) there is nothing to carry; when an engine drops the middle of a
chain, that event pays for it once, and every match stays exact and fast.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvmesh.events.index.scope import Scope

__all__ = ["Forest", "Node", "Tree"]


class Node(msgspec.Struct, gc=False, eq=False):
    """One block in its place. Nodes refer to each other in circles: a tree takes out what is unlinked itself.

    Left out of Python's garbage collection: walking a million of them would stop the process for a second.
    """

    key: int
    """XXH3 hash of the whole prefix that ends with this block."""
    tree: Tree
    parent: Node | None
    first_child: Node | None = None
    previous: Node | None = None
    next: Node | None = None
    device: int = 0
    """Bits of the workers that hold the block on the device."""
    host: int = 0
    disk: int = 0
    ready: int = 0
    """Bits of the workers that hold it and all before it on the device."""
    asked: bool = False
    """Whether a match ended here since the memory bound last looked."""

    @property
    def held(self) -> int:
        """Bits of the workers that hold the block in any tier."""
        return self.device | self.host | self.disk

    def children(self) -> Iterator[Node]:
        """The nodes below, newest first."""
        child = self.first_child
        while child is not None:
            following = child.next
            yield child
            child = following

    def extend(self, bit: int) -> None:
        """Make this node and what is held below it ready for a worker; its parent must be."""
        self.ready |= bit
        if self.first_child is None:
            return
        waiting = [self]
        while waiting:
            for child in waiting.pop().children():
                if child.device & bit and not child.ready & bit:
                    child.ready |= bit
                    waiting.append(child)

    def retract(self, bit: int) -> None:
        """Make this node and everything below it unready for a worker."""
        self.ready &= ~bit
        if self.first_child is None:
            return
        waiting = [self]
        while waiting:
            for child in waiting.pop().children():
                if child.ready & bit:
                    child.ready &= ~bit
                    waiting.append(child)


class Tree:
    """The blocks of one scope, block size and lookahead."""

    def __init__(self, scope: Scope, block_size: int, lookahead: int = 0) -> None:
        self.scope = scope
        self.block_size = block_size
        self.lookahead = lookahead
        """How many tokens after a block are part of its identity."""
        self.nodes: dict[int, Node] = {}
        """By prefix hash. A node that nobody holds stays for as long as there are nodes below it."""

    def add(self, key: int, parent: Node | None) -> Node:
        """A new node below ``parent`` (None: at the root); ``key`` must not be there yet."""
        node = self.nodes[key] = Node(key, self, parent)
        if parent is not None:
            sibling = parent.first_child
            if sibling is not None:
                node.next = sibling
                sibling.previous = node
            parent.first_child = node
        return node

    def prune(self, node: Node) -> None:
        """Take out a node that nobody holds and that has nothing below it, and its ancestors likewise."""
        current: Node | None = node
        while current is not None and current.first_child is None and not current.held:
            parent = current.parent
            del self.nodes[current.key]
            if parent is not None:
                if current.previous is None:
                    parent.first_child = current.next
                else:
                    current.previous.next = current.next
                if current.next is not None:
                    current.next.previous = current.previous
                current.parent = current.previous = current.next = None
            current = parent


class Forest:
    """The trees, by scope, block size and lookahead; an empty one is not kept."""

    def __init__(self) -> None:
        self._trees: dict[Scope, dict[tuple[int, int], Tree]] = {}
        self.num_blocks = 0
        """Nodes in all trees; kept by whoever adds to them."""

    def __iter__(self) -> Iterator[Tree]:
        """Every tree."""
        for sizes in self._trees.values():
            yield from sizes.values()

    def of(self, scope: Scope) -> list[Tree]:
        """The trees of a scope, one for each block size and lookahead in use."""
        return list(self._trees.get(scope, {}).values())

    def grow(self, scope: Scope, block_size: int, lookahead: int) -> Tree:
        """The tree of a scope, block size and lookahead, new if need be."""
        sizes = self._trees.setdefault(scope, {})
        tree = sizes.get((block_size, lookahead))
        if tree is None:
            tree = sizes[block_size, lookahead] = Tree(scope, block_size, lookahead)
        return tree

    def prune(self, node: Node) -> None:
        """Take out a node that nobody holds, and its tree when that was the last."""
        tree = node.tree
        before = len(tree.nodes)
        tree.prune(node)
        self.num_blocks -= before - len(tree.nodes)
        if not tree.nodes:
            sizes = self._trees[tree.scope]
            del sizes[tree.block_size, tree.lookahead]
            if not sizes:
                del self._trees[tree.scope]

    @property
    def num_scopes(self) -> int:
        """Scopes that hold anything."""
        return len(self._trees)
