"""How a created sequence gets to run: its blocks come to the device, and partially matched ones become its own."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.tallies import SequenceTally
from kvmesh.cache.v1.block import HOST, Block
from kvmesh.cache.v1.index import BlockIndex
from kvmesh.cache.v1.tiers import BlockTiers
from kvmesh.cache.v1.usage import BlockUsage
from kvmesh.cache.v1.view import GroupView

__all__ = ["Opened", "Opening"]


class Opened(Enum):
    """How it went."""

    READY = "ready"
    NO_ROOM = "no room"
    """Nothing has changed."""
    DAMAGED = "damaged"
    """A block that the sequence needs was lost in the host pool."""


class Opening:
    """Makes the held blocks of sequences locked ones.

    Args:
        usage: who uses the blocks.
        index: the reusable blocks.
        tiers: where they are.
        copy_on_partial_reuse: copy the tokens of partially matched blocks; else claim the block, where that is
            possible still.
    """

    def __init__(self, usage: BlockUsage, index: BlockIndex, tiers: BlockTiers, *, copy_on_partial_reuse: bool) -> None:
        self._usage = usage
        self._index = index
        self._tiers = tiers
        self._copy_on_partial_reuse = copy_on_partial_reuse

    def may_take_part_of(self, block: Block) -> bool:
        """Whether the leading tokens of a reusable block may be reused: by a copy always, else if it can be claimed.

        A block is claimed when nobody holds it and no other continues it.
        """
        assert block.node is not None
        return self._copy_on_partial_reuse or not (block.users or block.node.children)

    def open(
        self,
        views: Sequence[GroupView],
        priorities: NDArray[np.uint8],
        durations_s: NDArray[np.float64],
        tally: SequenceTally,
    ) -> Opened:
        """Bring everything that ``views`` hold to the device and lock it.

        Args:
            views: of one sequence; a partially matched block becomes, or is copied into, one more block of each.
            priorities: uint8 ``[1]``, of that block.
            durations_s: float64 ``[1]``, of that block.
            tally: of the sequence; told of copies when all is ready.
        """
        tails = [(view, view.tail) for view in views if view.tail is not None]
        claimed = [tail for _, tail in tails if self._may_claim(tail)]
        copied = [(view, tail) for view, tail in tails if tail not in claimed]
        held = [block for view in views for block in view.live()] + claimed
        if any(block.damaged for block in held) or any(tail.damaged for _, tail in copied):
            return Opened.DAMAGED
        cold = [block for block in held if block.level == HOST]
        needs = [0] * len(self._usage.pools)
        for block in cold + [tail for _, tail in copied]:
            needs[self._usage.pool_of_group[block.group]] += 1
        if not self._tiers.reserve(needs):
            return Opened.NO_ROOM
        if not self._tiers.onboard(cold):
            return Opened.DAMAGED
        copies = self._copy(copied, priorities, durations_s)
        if copies is None:
            return Opened.DAMAGED
        for block in held:
            self._usage.lock(block)
            self._usage.unhold(block)
        for block in claimed:
            self._index.claim(block)
            self._index.set_priority(block, int(priorities[0]), float(durations_s[0]))
        for view, tail in copied:
            self._usage.unhold(tail)
            tally.tell(self._usage.tallies.given_one, view.group, True)
        for view, tail in tails:
            view.append([copies.get(view.group, tail)])
            view.tail = None
        for view in views:
            view.refresh(0)
        return Opened.READY

    def _may_claim(self, tail: Block) -> bool:
        """As when it was matched, but that this sequence holds it now."""
        if self._copy_on_partial_reuse or tail.users > 1:
            return False
        return tail.node is not None and not tail.node.children

    def _copy(
        self, copied: list[tuple[GroupView, Block]], priorities: NDArray[np.uint8], durations_s: NDArray[np.float64]
    ) -> dict[int, Block] | None:
        """A private copy by layer group; None: one could not be made because its source was damaged."""
        copies: dict[int, Block] = {}
        for view, tail in copied:
            [copies[view.group]] = self._tiers.take(view.group, priorities, durations_s)
            if not self._tiers.duplicate(tail, copies[view.group]):
                for block in copies.values():
                    self._usage.unlock(block)
                return None
        return copies
