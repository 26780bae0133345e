"""Collects what the cache tells as buffered (pull) events, by TensorRT-LLM's rules (semantics §4.1).

Every event gets the next number when it is made. Removals are held back and become one event for each layer group,
before the next event of another kind and at the end of the iteration. Blocks are named then, too, when it is known what
every layer group holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.names import BlockNames, NamedRun
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


class _Stored(msgspec.Struct):
    """A stored event that may still grow."""

    event_id: int
    group: int
    runs: list[NamedRun]
    """Each continues the one before."""
    levels: list[int]
    priorities: list[bytes]

    @property
    def last_key(self) -> bytes:
        return self.runs[-1].keys[-1]


class _Removed(NamedTuple):
    event_id: int
    group: int
    keys: list[bytes]


class _Updated(NamedTuple):
    event_id: int
    group: int
    key: bytes
    cache_level: EventDiff | None
    priority: EventDiff | None


_Draft = _Stored | _Removed | _Updated | KvCacheEvent
"""An event whose blocks are not named yet, or that names none."""


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
        self._removed: dict[int, list[bytes]] = {}
        """Removals by layer group that are held back."""
        self._gone: set[bytes] = set()
        """What was removed from some layer group in this iteration."""
        self._drafts: list[_Draft] = []
        self._open: dict[int, _Stored] = {}
        """By layer group, the stored event that the next stored blocks may continue."""
        self.statistics = BufferedStatistics()

    def on_created(self, tiers: Sequence[str], num_pages: Sequence[Sequence[int]]) -> None:  # noqa: ARG002 - protocol
        """See :class:`~kvmesh.cache.events.EventSink`: one event for each layer group."""
        for group, counts in enumerate(num_pages):
            self._drafts.append(self._event(self._next_id(), group, CreatedData(list(counts))))

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`. Blocks that continue the last ones are told with them."""
        keys = blocks.keys
        self._flush_removed()
        self._known[group].update(keys)
        self.statistics.stored_blocks_total += len(keys)
        draft = self._open.get(group)
        if draft is None or draft.last_key != blocks.parent_key:
            draft = self._open[group] = _Stored(self._next_id(), group, [], [], [])
            self._drafts.append(draft)
        draft.runs.append(NamedRun(blocks.scope, blocks.parent_key, keys, blocks.token_ids.copy()))
        draft.levels += [blocks.level] * len(keys)
        draft.priorities.append(blocks.priorities.tobytes())

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:  # noqa: ARG002 - of the protocol
        """See :class:`~kvmesh.cache.events.EventSink`. Blocks that were never told are passed over."""
        known = self._known[group]
        keys = _those_in(known, keys)
        if not keys:
            return
        self._removed.setdefault(group, []).extend(keys)
        self._gone.update(keys)
        known.difference_update(keys)
        self.statistics.removed_blocks_total += len(keys)

    def on_moved(self, group: int, keys: Sequence[bytes], old_level: int, new_level: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`. Blocks that were never told are passed over."""
        self._update(group, keys, EventDiff(old_level, new_level), None)

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`. Blocks that were never told are passed over."""
        self._update(group, keys, None, EventDiff(old, new))

    def take(self) -> list[KvCacheEvent]:
        """The events of the iteration, in order of their numbers."""
        self._flush_removed()
        if not self._drafts:
            return []
        drafts, self._drafts = self._drafts, []
        self._open.clear()
        self._names.learn([run for draft in drafts if isinstance(draft, _Stored) for run in draft.runs])
        events = [self._finished(draft) for draft in drafts]
        self._names.forget(self._gone.difference(*self._known))
        self._gone.clear()
        return events

    def _update(
        self, group: int, keys: Sequence[bytes], cache_level: EventDiff | None, priority: EventDiff | None
    ) -> None:
        keys = _those_in(self._known[group], keys)
        if not keys:
            return
        self._flush_removed()
        self._open.clear()
        self.statistics.updated_blocks_total += len(keys)
        self._drafts += [_Updated(self._next_id(), group, key, cache_level, priority) for key in keys]

    def _flush_removed(self) -> None:
        if not self._removed:
            return
        removed, self._removed = self._removed, {}
        self._open.clear()
        self._drafts += [_Removed(self._next_id(), group, removed[group]) for group in sorted(removed)]

    def _finished(self, draft: _Draft) -> KvCacheEvent:
        match draft:
            case _Stored():
                return self._event(draft.event_id, draft.group, self._stored(draft))
            case _Removed():
                return self._event(draft.event_id, draft.group, RemovedData(self._names.of(draft.keys)))
            case _Updated():
                (name,) = self._names.of([draft.key])
                data = UpdatedData(block_hash=name, cache_level=draft.cache_level, priority=draft.priority)
                return self._event(draft.event_id, draft.group, data)
            case KvCacheEvent():
                return draft

    def _stored(self, draft: _Stored) -> StoredData:
        first = draft.runs[0]
        return StoredData(
            parent_hash=None if first.parent_key is None else self._names.of_parent(first.parent_key),
            block_hashes=[name for run in draft.runs for name in self._names.of(run.keys)],
            token_ids=b"".join(run.token_ids.tobytes() for run in draft.runs),
            block_size=self._tokens_per_block,
            cache_levels=draft.levels,
            priorities=b"".join(draft.priorities),
            cache_salt=None if first.scope.salt is None else str(first.scope.salt),
        )

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
