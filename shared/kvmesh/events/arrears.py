"""What must still be taken back: the removals of batches that were lost before they were sent.

A lost batch leaves a hole, and readers without a replay of it would count its removed blocks as held for ever. So the
next batch that goes out takes them back first. Stores that were lost stay lost: readers then claim less, never more.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KeyedBlocksStored, KvEvent

__all__ = ["MAX_ARREARS_BLOCKS", "Arrears"]

MAX_ARREARS_BLOCKS = 1 << 20
"""More removals than this are told as one ``AllBlocksCleared``, so that a sender that is stuck costs bounded memory."""

_Where = tuple[str | None, int | msgspec.UnsetType]


class Arrears:
    """Removals to repeat, in the order in which they were lost.

    Args:
        max_blocks: that are remembered one by one.
    """

    def __init__(self, max_blocks: int = MAX_ARREARS_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._removed: dict[_Where, dict[int, None]] = {}
        self._num_blocks = 0
        self._cleared = False

    def __bool__(self) -> bool:
        return self._cleared or self._num_blocks > 0

    def note(self, events: Sequence[KvEvent]) -> None:
        """A batch was lost."""
        for event in events:
            match event:
                case BlockRemoved():
                    self._remove((event.medium, event.group_idx), event.block_hashes)
                case BlockStored() | KeyedBlocksStored() if self._num_blocks:
                    self._keep((event.medium, event.group_idx), event.block_hashes)
                case AllBlocksCleared():
                    self._clear()

    def take(self) -> list[KvEvent]:
        """The events that go before those of the next batch; nothing is owed any more."""
        events: list[KvEvent] = [AllBlocksCleared()] if self._cleared else []
        for (medium, group), hashes in self._removed.items():
            if hashes:
                events.append(BlockRemoved(block_hashes=list(hashes), medium=medium, group_idx=group))
        self._removed.clear()
        self._num_blocks, self._cleared = 0, False
        return events

    def _remove(self, where: _Where, hashes: Sequence[int]) -> None:
        removed = self._removed.setdefault(where, {})
        before = len(removed)
        removed.update(dict.fromkeys(hashes))
        self._num_blocks += len(removed) - before
        if self._num_blocks > self._max_blocks:
            self._clear()

    def _keep(self, where: _Where, hashes: Sequence[int]) -> None:
        """They are held again: who has not heard of the removal is right."""
        removed = self._removed.get(where, {})
        for number in hashes:
            if number in removed:
                del removed[number]
                self._num_blocks -= 1

    def _clear(self) -> None:
        self._removed.clear()
        self._num_blocks, self._cleared = 0, True
