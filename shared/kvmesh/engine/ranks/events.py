"""KV events of an engine of several ranks: what is told of a block is told once, not once a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvmesh.cache.events import EventSink, StoredBlocks
from kvmesh.cache.layout import PageLayout

__all__ = ["OneRankEvents", "told_groups"]


def told_groups(whole: PageLayout, layout: PageLayout) -> dict[int, int]:
    """Which layer groups are told, and as which: for each group of the model, that of the first rank that has it.

    A block is reusable on all ranks or on none.

    Args:
        whole: the page layout of the model on one rank.
        layout: that of the engine's ranks.
    """
    found: dict[int, int] = {}
    for group in whole.groups:
        first = next(part for part in layout.groups if (part.kind, part.window) == (group.kind, group.window))
        found[first.group_id] = group.group_id
    return found


class OneRankEvents:
    """An :class:`~kvmesh.cache.events.EventSink` that passes on what concerns the groups that are told.

    Args:
        sink: knows the layer groups of the model.
        told: what :func:`told_groups` says.
    """

    def __init__(self, sink: EventSink, told: Mapping[int, int]) -> None:
        self._sink = sink
        self._told = told

    def on_created(self, tiers: Sequence[str], num_pages: Sequence[Sequence[int]]) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`."""
        self._sink.on_created(tiers, [num_pages[group] for group in self._told])

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`."""
        if (told := self._told.get(group)) is not None:
            self._sink.on_stored(told, blocks)

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`."""
        if (told := self._told.get(group)) is not None:
            self._sink.on_removed(told, keys, level)

    def on_moved(self, group: int, keys: Sequence[bytes], old_level: int, new_level: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`."""
        if (told := self._told.get(group)) is not None:
            self._sink.on_moved(told, keys, old_level, new_level)

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`."""
        if (told := self._told.get(group)) is not None:
            self._sink.on_priority(told, keys, old, new)
