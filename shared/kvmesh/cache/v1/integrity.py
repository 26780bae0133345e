"""The V1 cache's self-check: every slot has one owner, every block one state, and everybody who uses it is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.v1.block import DEVICE, Block, BlockState
from kvmesh.cache.v1.index import BlockIndex
from kvmesh.cache.v1.lease import BlockLease
from kvmesh.cache.v1.sequence import V1Sequence
from kvmesh.cache.v1.usage import BlockUsage, LevelUse

__all__ = ["check_blocks"]


def check_blocks(
    usage: BlockUsage, index: BlockIndex, sequences: Iterable[V1Sequence], leases: Iterable[BlockLease]
) -> None:
    """Check slots, states, queues and trees against each other.

    Args:
        usage: slots and users.
        index: the reusable blocks.
        sequences: all open sequences.
        leases: all open leases.

    Raises:
        CacheIntegrityError: the first contradiction found.
    """
    locks: Counter[Block] = Counter()
    holds: Counter[Block] = Counter()
    anchors: Counter[int] = Counter()
    for sequence in sequences:
        (locks if sequence.active else holds).update(sequence.used())
        anchors.update(id(view.tip) for view in sequence.views)
    pins = Counter(block for lease in leases for block in lease.pinned())
    offered = {block for group in range(len(index.trees)) for block in _check_tree(index, group, anchors)}
    blocks = offered | locks.keys() | holds.keys() | pins.keys()
    for block in blocks:
        _require(
            (block.locks, block.holds, block.pins) == (locks[block], holds[block], pins[block]),
            "the users of a block are miscounted",
        )
        _require(block.counted_as is block.state, "a block is counted under another state than its own")
        _require(
            (block.node is not None) == (block in offered), "a block and the tree disagree on whether it is offered"
        )
        _require(not block.locks or block.level == DEVICE, "a running sequence uses a block that is not on the device")
        _require(not block.quarantines or block.node is None, "a block that may still be written is offered")
    _require(usage.quarantined == sum(block.quarantines > 0 for block in blocks), "quarantined blocks are miscounted")
    for pool, levels in enumerate(usage.pools):
        for level, use in enumerate(levels):
            here = [b for b in blocks if usage.pool_of_group[b.group] == pool and b.level == level]
            _check_slots(use, here)
            _check_queue(usage, use, here)


def _require(condition: bool | np.bool_, message: str) -> None:
    if not condition:
        raise CacheIntegrityError(message)


def _check_tree(index: BlockIndex, group: int, anchors: Counter[int]) -> list[Block]:
    tree = index.trees[group]
    tree.check()
    offered = [node.block for node in tree.nodes() if node.block is not None]
    _require(len(offered) == index.num_offered[group], "reusable blocks are miscounted")
    _require(all(block.group == group for block in offered), "a tree offers a block of another layer group")
    nodes = [*tree.nodes(), *(root for _, root in tree.roots())]
    _require(
        all(node.anchors == anchors[id(node)] for node in nodes), "a node miscounts the sequences that continue it"
    )
    return offered


def _check_slots(use: LevelUse, blocks: list[Block]) -> None:
    slots = [*(block.slot for block in blocks), *use.free.free.tolist()]
    _require(sorted(slots) == list(range(use.free.capacity)), "a slot is lost or used twice")
    states = Counter(block.state for block in blocks)
    _require(all(use.counts[state] == states[state] for state in BlockState), "the states of blocks are miscounted")
    of_groups = Counter((block.group, block.state) for block in blocks)
    for group, counts in enumerate(use.group_counts):
        exact = all(counts[state] == of_groups[group, state] for state in BlockState)
        _require(exact, "the blocks of a layer group are miscounted")


def _check_queue(usage: BlockUsage, use: LevelUse, blocks: list[Block]) -> None:
    """Exactly the unused leaves are queued; in a full-attention group, nobody uses what continues an unused block."""
    leaves = 0
    for block in blocks:
        unused = block.state is BlockState.EVICTABLE
        leaf = unused and block.node is not None and not any(block.node.on_level[: block.level + 1])
        expected = unused and (leaf or usage.windowed[block.group])
        _require((block in use.queue) == expected, "the free queue does not hold exactly the blocks that may go")
        leaves += expected
        if unused and block.node is not None and not usage.windowed[block.group]:
            used = any(child.block is not None and child.block.users for child in block.node.children)
            _require(not used, "an unused block is continued by one in use, so that it cannot be evicted")
    _require(len(use.queue) == leaves, "the free queue holds a block that does not exist")
