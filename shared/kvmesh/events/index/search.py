"""How far each worker's bit reaches along a prompt: O(log blocks) probes for each different end, not one a block.

Readiness is closed under "parent of", so the end of a worker's prefix is found by bisection. Colder tiers have holes
where the device has blocks; they are walked, and only for workers that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvmesh.events.index.tree import Node, Tree

__all__ = ["Reach", "bits", "device_reach", "tier_reach"]

PrefixKeys = Callable[[int], int]
"""Prefix hash of the i-th block."""


class Reach(NamedTuple):
    """Workers whose prefix ends at the same place."""

    mask: int
    """Their bits."""
    blocks: int
    last: Node


def device_reach(tree: Tree, key: PrefixKeys, count: int, among: int) -> Iterator[Reach]:
    """Where the prefixes of the workers in the mask ``among`` end on the device; workers that hold none are left out.

    Args:
        tree: of the prompt's scope.
        key: of the prompt's blocks.
        count: full blocks of the prompt.
        among: bits of the workers to look for.
    """
    find = tree.nodes.get
    if not count or (last := find(key(0))) is None:
        return
    alive = last.ready & among
    end = 0
    while alive:
        # The last block that all of `alive` have: first try the prompt's end, then halve.
        low, high = end, count
        probe = count - 1
        while high - low > 1:
            node = find(key(probe))
            if node is not None and node.ready & alive == alive:
                low, last = probe, node
            else:
                high = probe
            probe = (low + high) >> 1
        end = low + 1
        further = find(key(end)) if end < count else None
        still = further.ready & alive if further is not None else 0
        yield Reach(alive & ~still, end, last)
        alive = still
        if further is not None:
            last = further


def tier_reach(tree: Tree, key: PrefixKeys, count: int, among: int, *, with_disk: bool) -> Iterator[Reach]:
    """As :func:`device_reach`, over the blocks held on the device or the host, or on the disk too; by walking."""
    find = tree.nodes.get
    alive = among
    last: Node | None = None
    for blocks in range(count):
        node = find(key(blocks))
        held = 0
        if node is not None:
            held = (node.held if with_disk else node.device | node.host) & alive
        if held != alive and last is not None:
            yield Reach(alive & ~held, blocks, last)
        alive, last = held, node
        if not alive:
            return
    if last is not None:
        yield Reach(alive, count, last)


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
