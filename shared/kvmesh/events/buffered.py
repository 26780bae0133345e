"""Collects what the cache tells as buffered (pull) events, by TensorRT-LLM's rules (semantics §4.1).

Every event gets the next number when it is made. Removals are held back and become one event for each layer group,
before the next event of another kind and at the end of the iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.names import BlockNames, EventHash
from kvmesh.protocol.kv_cache_events import (
    CreatedData,
    EventDiff,
    KvCacheEvent,
    RemovedData,
    StoredData,
    UpdatedData,
)

__all__ = ["BufferedSink", "BufferedStatistics", "Envelope"]


class BufferedStatistics(msgspec.Struct):
    """What was told."""

    events_total: int = 0
    stored_blocks_total: int = 0
    removed_blocks_total: int = 0
    updated_blocks_total: int = 0


class Envelope(NamedTuple):
    """What all events of a sink have in common."""

    hash_algo: str
    windows: Sequence[int]
    """Attention window in tokens by layer group; the longest sequence for full attention."""
    with_group_ids: bool = True
    """False for V1, whose groups are known by their window."""
    attention_dp_rank: int | None = None


class _Run(msgspec.Struct):
    """A stored event that may still grow."""

    event_id: int
    group: int
    parent: EventHash | None
    salt: int | None
    hashes: list[EventHash]
    token_ids: list[bytes]
    levels: list[int]
    priorities: list[bytes]


class BufferedSink:
    """A :class:`kvmesh.cache.events.EventSink`; used on the executor thread only.

    Args:
        tokens_per_block: length of a full block.
        names: gives blocks the hashes of ``envelope.hash_algo``.
        envelope: what all events say.
    """

    def __init__(self, tokens_per_block: int, names: BlockNames, envelope: Envelope) -> None:
        self._tokens_per_block = tokens_per_block
        self._names = names
        self._envelope = envelope
        self._known: list[set[bytes]] = [set() for _ in envelope.windows]
        """Keys by layer group that were told and are not removed."""
        self._removed: dict[int, list[EventHash]] = {}
        """Removals by layer group that are held back."""
        self._pending: list[_Run | KvCacheEvent] = []
        self._open: dict[int, _Run] = {}
        """By layer group, the stored event that the next stored blocks may continue."""
        self.statistics = BufferedStatistics()

    def on_created(self, tiers: Sequence[str], num_pages: Sequence[Sequence[int]]) -> None:  # noqa: ARG002 - protocol
        """See :class:`~kvmesh.cache.events.EventSink`: one event for each layer group."""
        for group, counts in enumerate(num_pages):
            self._add(group, CreatedData(list(counts)))

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`. Blocks that continue the last ones are told with them."""
        keys = blocks.keys
        self._flush_removed()
        parent, hashes = self._names.stored(blocks.scope, blocks.parent_key, keys, blocks.token_ids)
        self._known[group].update(keys)
        self.statistics.stored_blocks_total += len(keys)
        run = self._open.get(group)
        if run is None or parent is None or run.hashes[-1] != parent:
            run = _Run(self._next_id(), group, parent, blocks.scope.salt, [], [], [], [])
            self._pending.append(run)
            self._open[group] = run
        run.hashes += hashes
        run.token_ids.append(np.ascontiguousarray(blocks.token_ids, dtype="<i4").tobytes())
        run.levels += [blocks.level] * len(keys)
        run.priorities.append(blocks.priorities.tobytes())

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:  # noqa: ARG002 - of the protocol
        """See :class:`~kvmesh.cache.events.EventSink`. Blocks that were never told are passed over."""
        known = self._known[group]
        keys = _those_in(known, keys)
        if not keys:
            return
        self._removed.setdefault(group, []).extend(self._names.of(keys))
        known.difference_update(keys)
        self.statistics.removed_blocks_total += len(keys)
        self._names.forget(set(keys).difference(*self._known))

    def on_moved(self, group: int, keys: Sequence[bytes], old_level: int, new_level: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`. Blocks that were never told are passed over."""
        diff = EventDiff(old_level, new_level)
        self._update(group, keys, lambda name: UpdatedData(block_hash=name, cache_level=diff))

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`. Blocks that were never told are passed over."""
        diff = EventDiff(old, new)
        self._update(group, keys, lambda name: UpdatedData(block_hash=name, priority=diff))

    def take(self) -> list[KvCacheEvent]:
        """The events of the iteration, in order of their numbers."""
        self._flush_removed()
        if not self._pending:
            return []
        pending, self._pending = self._pending, []
        self._open.clear()
        return [self._stored(item) if isinstance(item, _Run) else item for item in pending]

    def _update(self, group: int, keys: Sequence[bytes], data: Callable[[EventHash], UpdatedData]) -> None:
        keys = _those_in(self._known[group], keys)
        if not keys:
            return
        self._flush_removed()
        self._open.clear()
        self.statistics.updated_blocks_total += len(keys)
        for name in self._names.of(keys):
            self._add(group, data(name))

    def _flush_removed(self) -> None:
        if not self._removed:
            return
        removed, self._removed = self._removed, {}
        self._open.clear()
        for group in sorted(removed):
            self._add(group, RemovedData(removed[group]))

    def _add(self, group: int, data: CreatedData | RemovedData | UpdatedData) -> None:
        self._pending.append(self._event(self._next_id(), group, data))

    def _stored(self, run: _Run) -> KvCacheEvent:
        data = StoredData(
            parent_hash=run.parent,
            block_hashes=run.hashes,
            token_ids=b"".join(run.token_ids),
            block_size=self._tokens_per_block,
            cache_levels=run.levels,
            priorities=b"".join(run.priorities),
            cache_salt=None if run.salt is None else str(run.salt),
        )
        return self._event(run.event_id, run.group, data)

    def _event(
        self, event_id: int, group: int, data: CreatedData | StoredData | RemovedData | UpdatedData
    ) -> KvCacheEvent:
        envelope = self._envelope
        return KvCacheEvent(
            event_id=event_id,
            data=data,
            window_size=envelope.windows[group],
            attention_dp_rank=envelope.attention_dp_rank,
            hash_algo=envelope.hash_algo,
            layer_group_id=group if envelope.with_group_ids else None,
        )

    def _next_id(self) -> int:
        number = self.statistics.events_total
        self.statistics.events_total += 1
        return number


def _those_in(known: set[bytes], keys: Sequence[bytes]) -> Sequence[bytes]:
    return keys if known.issuperset(keys) else [key for key in keys if key in known]
