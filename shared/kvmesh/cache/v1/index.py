"""The blocks that the V1 cache offers for reuse: one tree for each layer group, and the events of every change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvmesh.cache.events import EventSink, StoredBlocks
from kvmesh.cache.stats import CacheCounters
from kvmesh.cache.v1.block import DEVICE, HOST, Block
from kvmesh.cache.v1.tree import BlockTree, Node, token_bytes
from kvmesh.cache.v1.usage import BlockUsage
from kvmesh.hashing import ReuseScope, TokenIds
from kvmesh.protocol.retention import DEFAULT_PRIORITY

__all__ = ["BlockIndex", "Chain"]


class Chain(NamedTuple):
    """Consecutive blocks of a sequence that shall become reusable."""

    scope: ReuseScope
    keys: list[bytes]
    token_ids: TokenIds
    """int32 ``[n, tokens_per_block]``, or ``[1, k]`` with fewer for the trailing partial block."""


class BlockIndex:
    """Trees of all layer groups. The only place where a block enters or leaves a tree.

    Args:
        usage: who uses the blocks.
        tokens_per_block: tokens of a full block.
        counters: counted in here.
        sink: told of every change of what is reusable.
    """

    def __init__(
        self, usage: BlockUsage, tokens_per_block: int, counters: CacheCounters, sink: EventSink | None
    ) -> None:
        self.trees = [BlockTree(tokens_per_block) for _ in usage.pool_of_group]
        self.num_offered = [0] * len(self.trees)
        """Reusable blocks by group."""
        self._usage = usage
        self._counters = counters
        self._sink = sink

    def store(self, group: int, parent: Node, chain: Chain, blocks: list[Block | None]) -> tuple[Node, bool]:
        """Make full blocks reusable; one that is there already is shared instead.

        Args:
            group: layer group.
            parent: the node of the block before.
            chain: the blocks' keys and tokens.
            blocks: their locked private blocks, None where the window has passed already; changed in place where the
                tree's block is shared instead.

        Returns:
            The last block's node, and True; or the last node that was reached, and False when ``parent`` has left the
            tree, another block has the same 64-bit key, or a block in a cold tier cannot be shared: then what follows
            cannot be stored.
        """
        tree = self.trees[group]
        if not tree.alive(parent):
            return parent, False
        size = chain.token_ids.shape[1]
        data = token_bytes(chain.token_ids)
        width = len(data) // len(chain.keys)
        begin = 0  # of the run of new blocks that is to be told

        def tell(end: int) -> None:
            run = Chain(chain.scope, chain.keys[begin:end], chain.token_ids[begin:end].reshape(-1, size))
            self._tell_stored(group, chain.keys[begin - 1] if begin else before_first, run, blocks[begin:end])

        before_first = parent.key or None
        for i, (key, block) in enumerate(zip(chain.keys, blocks, strict=True)):
            tokens = data[i * width : (i + 1) * width]
            node = tree.child(parent, key, tokens)
            if node is None:
                if tree.knows(key):
                    tell(i)
                    return parent, False
                node = self._add(group, parent, key, tokens)
            if block is not None and node.block is None:
                self._offer(group, node, block)
            else:
                tell(i)
                begin = i + 1
                if block is not None and not self._share(group, node, blocks, i):
                    return parent, False
            parent = node
        tell(len(blocks))
        return parent, True

    def store_partial(self, group: int, parent: Node, chain: Chain, block: Block) -> None:
        """Make a trailing partial block reusable as a leaf, unless a block that covers it is there already."""
        tree = self.trees[group]
        tokens = token_bytes(chain.token_ids)
        if not tree.alive(parent) or tree.knows(chain.keys[0]) or tree.covers(parent, tokens):
            return
        self._offer(group, self._add(group, parent, chain.keys[0], tokens), block)
        self._tell_stored(group, parent.key or None, chain, [block])

    def anchor(self, group: int, scope: ReuseScope, node: Node | None) -> Node:
        """Keep ``node`` (None: the root of ``scope``) in the tree for a sequence that continues it; returns it."""
        if node is None:
            return self.trees[group].anchor_root(scope)
        node.anchors += 1
        return node

    def move_anchor(self, group: int, old: Node, new: Node) -> None:
        """A sequence goes on from ``new``."""
        new.anchors += 1
        self.release_anchor(group, old)

    def release_anchor(self, group: int, node: Node) -> None:
        """The counterpart of :meth:`anchor`."""
        node.anchors -= 1
        self.trees[group].prune(node)

    def claim(self, block: Block) -> None:
        """The one holder of a leaf will overwrite it: it leaves the tree."""
        assert block.node is not None
        self.remove(block.group, block.node)

    def relocate(self, block: Block, level: int, slot: int) -> None:
        """The bytes of ``block`` have moved to ``slot`` on another level."""
        old, node = block.level, block.node
        if node is None:
            self._usage.relocate(block, level, slot)
            return
        assert node.parent is not None
        node.parent.on_level[old] -= 1
        self._usage.relocate(block, level, slot)
        node.parent.on_level[level] += 1
        self._usage.requeue(block)
        self._requeue(node.parent)
        self._tell_moved(block, old)

    def drop(self, block: Block) -> int:
        """Give up a reusable block; returns how many were given up.

        In a group with full attention, the blocks that continue it go too, because they cannot be reached any more.
        """
        assert block.node is not None
        if not self._usage.windowed[block.group]:
            return self.remove(block.group, block.node)
        tree, node = self.trees[block.group], block.node
        self._tell_removed(block.group, [node.key], block.level)
        tree.place(node, None)
        self._usage.update(block)
        tree.prune(node)
        return 1

    def remove(self, group: int, node: Node) -> int:
        """Take ``node`` and everything that continues it out of the tree; returns how many blocks it offered.

        Blocks that somebody uses become private; the others are free.
        """
        tree = self.trees[group]
        parent = node.parent
        assert parent is not None
        removed: list[tuple[int, bytes]] = []
        for current in tree.subtree(node):
            block = tree.place(current, None)
            tree.remove(current)
            if block is not None:
                removed.append((block.level, current.key))
                self._usage.update(block)
        for level in (HOST, DEVICE):  # what is colder continues what is warmer
            self._tell_removed(group, [key for where, key in removed if where == level], level)
        tree.prune(parent)
        self._requeue(parent)
        return len(removed)

    def damage(self, block: Block) -> None:
        """What ``block`` held is lost: it is no hit any more for anybody."""
        self._counters.damaged_pages += 1
        self._usage.flows.add("damaged", block.level, block.group, 1)
        block.damaged = True
        if block.node is not None:
            self.drop(block)

    def set_priority(self, block: Block, priority: int, duration_s: float) -> None:
        """Give ``block`` a new retention priority."""
        old = block.priority
        self._usage.set_priority(block, priority, duration_s)
        if self._sink is not None and block.node is not None and priority != old:
            self._sink.on_priority(block.group, [block.node.key], old, priority)

    def expire(self, now_s: float) -> None:
        """Priorities that have lasted long enough become the default."""
        for block in self._usage.expired(now_s):
            self.set_priority(block, DEFAULT_PRIORITY, np.inf)

    def clear(self) -> None:
        """Forget every block. Those under a lease outlive this and are freed by their last user."""
        for group, tree in enumerate(self.trees):
            for _, root in list(tree.roots()):
                for node in list(root.children):
                    self.remove(group, node)

    def _add(self, group: int, parent: Node, key: bytes, tokens: bytes) -> Node:
        """A new node; a partial block that it covers leaves."""
        tree = self.trees[group]
        covered = tree.covered_by(parent, tokens)
        node = tree.add(parent, key, tokens)
        if covered is not None:
            self.remove(group, covered)
        return node

    def _offer(self, group: int, node: Node, block: Block) -> None:
        self.trees[group].place(node, block)
        self._usage.update(block)
        assert node.parent is not None
        self._requeue(node.parent)

    def _share(self, group: int, node: Node, blocks: list[Block | None], i: int) -> bool:
        """Use the block of ``node`` in place of ``blocks[i]``, which holds the same tokens; whether that could be."""
        mine, theirs, tree = blocks[i], node.block, self.trees[group]
        assert mine is not None
        assert theirs is not None
        if theirs.level == HOST:
            # Rather than reading the cold copy back, the tree takes the one that has just been computed.
            tree.place(node, None)
            if mine.users == 1:
                self._usage.exchange(mine, theirs)
            elif not theirs.users:
                self._usage.update(theirs)
                theirs = mine
            tree.place(node, theirs)
            self._usage.update(theirs)
            if theirs.level == HOST:
                return False
            self._tell_moved(theirs, HOST)
        self._counters.rebased_pages += 1
        if theirs is not mine:
            self._usage.lock(theirs)
            self._usage.unlock(mine)
            blocks[i] = theirs
        return True

    def _requeue(self, node: Node) -> None:
        if node.block is not None:
            self._usage.requeue(node.block)

    def _tell_stored(self, group: int, parent_key: bytes | None, run: Chain, blocks: Sequence[Block | None]) -> None:
        self._counters.stored_blocks += len(run.keys)
        self.num_offered[group] += len(run.keys)
        if self._sink is None or not run.keys:
            return
        priorities = np.array([block.priority for block in blocks if block is not None], dtype=np.uint8)
        self._sink.on_stored(group, StoredBlocks(run.scope, parent_key, run.keys, run.token_ids, DEVICE, priorities))

    def _tell_removed(self, group: int, keys: list[bytes], level: int) -> None:
        self._counters.removed_blocks += len(keys)
        self.num_offered[group] -= len(keys)
        if self._sink is not None and keys:
            self._sink.on_removed(group, keys, level)

    def _tell_moved(self, block: Block, old_level: int) -> None:
        if self._sink is not None and block.node is not None:
            self._sink.on_moved(block.group, [block.node.key], old_level, block.level)
