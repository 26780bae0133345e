"""Checks that KV events tell a consistent story: the producer invariant of both paths (semantics §4, §8.5, §8.23).

``CheckedEvents`` is a sink for a cache manager under test: it runs the real sinks of both paths and reads what they
tell. Call :meth:`CheckedEvents.step` after every step and :meth:`CheckedEvents.finish` once the manager is closed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmesh.cache.events import StoredBlocks
from kvmesh.cache.layout import PageLayout
from kvmesh.events.buffered import BufferedSink, Envelope
from kvmesh.events.names import EventHashAlgo, block_names
from kvmesh.events.sink import StreamSink, TierMoves
from kvmesh.events.target import target_group
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvmesh.protocol.kv_cache_events import CreatedData, KvCacheEvent, RemovedData, StoredData, UpdatedData

__all__ = ["BufferedChecker", "CheckedEvents", "StreamChecker"]


class StreamChecker:
    """Reads streamed events: every hash is stored once in a medium, then removed from it once, after a known parent.

    Args:
        parents_stay: whether a block outlives those that continue it, as it does where attention is full. Inside a
            window the parent of a stored block may be gone.
    """

    def __init__(self, *, parents_stay: bool = True) -> None:
        self.media: dict[int, set[str | None]] = {}
        """Media of each hash that is held."""
        self.tokens: dict[int, tuple[int, ...]] = {}
        self._parents_stay = parents_stay

    def apply(self, events: Sequence[KvEvent]) -> None:
        """Read one batch."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    assert event.block_hashes, "a removal of nothing"
                    for hash_ in event.block_hashes:
                        assert event.medium in self.media.get(hash_, ()), f"{hash_} was not in {event.medium}"
                        self.media[hash_].remove(event.medium)
                        if not self.media[hash_]:
                            del self.media[hash_]
                case AllBlocksCleared():
                    self.media.clear()

    def finish(self) -> None:
        """The cache is closed."""
        assert not self.media, f"{len(self.media)} hashes were never removed"

    def _store(self, event: BlockStored) -> None:
        hashes, tokens, size = event.block_hashes, list(event.token_ids), event.block_size
        assert hashes, "a store of nothing"
        assert len(set(hashes)) == len(hashes)
        if tokens:
            assert len(tokens) == size * len(hashes), "tokens do not fill the blocks"
            parent = event.parent_block_hash
            assert not self._parents_stay or parent is None or parent in self.media, "an orphan"
        for i, hash_ in enumerate(hashes):
            if tokens:
                assert hash_ not in self.media, f"{hash_} is stored already"
                self.tokens[hash_] = tuple(tokens[i * size : (i + 1) * size])
            else:
                assert hash_ in self.media, f"{hash_} moves and was never stored"
                assert event.medium not in self.media[hash_], f"{hash_} moves to where it is"
            self.media.setdefault(hash_, set()).add(event.medium)


class BufferedChecker:
    """Reads buffered events: numbers without gaps, and for each layer group what :class:`StreamChecker` asks for.

    Args:
        windowed_groups: layer groups in which the parent of a stored block may be gone.
        first_id: of the first event that will come.
    """

    def __init__(self, *, windowed_groups: frozenset[int] = frozenset(), first_id: int = 0) -> None:
        self.held: dict[int, dict[str | int, tuple[int, int]]] = {}
        """By layer group: level and priority of each hash."""
        self._windowed_groups = windowed_groups
        self._next_id = first_id

    def apply(self, events: Sequence[KvCacheEvent]) -> None:
        """Read some events."""
        for event in events:
            assert event.event_id == self._next_id, f"event {event.event_id} after {self._next_id - 1}"
            self._next_id += 1
            group = event.layer_group_id or 0
            held = self.held.setdefault(group, {})
            match event.data:
                case CreatedData():
                    assert not held, "created twice"
                case StoredData():
                    self._store(group, event.data)
                case RemovedData():
                    assert event.data.block_hashes, "a removal of nothing"
                    for name in event.data.block_hashes:
                        assert held.pop(name, None) is not None, f"{name} was not stored in group {group}"
                case UpdatedData():
                    self._update(group, event.data)

    def finish(self) -> None:
        """The cache is closed."""
        assert not any(self.held.values()), "some hashes were never removed"

    def _store(self, group: int, data: StoredData) -> None:
        held, count = self.held[group], len(data.block_hashes)
        assert count, "a store of nothing"
        assert count == len(data.cache_levels) == len(data.priorities)
        tokens = len(data.token_ids) / 4
        assert (count - 1) * data.block_size < tokens <= count * data.block_size
        orphan = data.parent_hash is not None and data.parent_hash not in held
        assert group in self._windowed_groups or not orphan, "an orphan"
        for name, level, priority in zip(data.block_hashes, data.cache_levels, data.priorities, strict=True):
            assert name not in held, f"{name} is stored already"
            held[name] = level, priority

    def _update(self, group: int, data: UpdatedData) -> None:
        level, priority = self.held[group][data.block_hash]
        assert data.cache_level is not None or data.priority is not None, "an update of nothing"
        if data.cache_level is not None:
            assert data.cache_level.old_value == level != data.cache_level.new_value
            level = data.cache_level.new_value
        if data.priority is not None:
            assert data.priority.old_value == priority != data.priority.new_value
            priority = data.priority.new_value
        self.held[group][data.block_hash] = level, priority


class CheckedEvents:
    """A sink that runs both paths and checks what they tell.

    Args:
        layout: of the cache under test.
        algo: hashes of the buffered events.
        tier_moves: of the streamed events.
        manager_v2: whose keys the cache tells.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        algo: EventHashAlgo = "v2_sha256",
        tier_moves: TierMoves = "publish",
        manager_v2: bool = True,
    ) -> None:
        size, target = layout.tokens_per_block, target_group(layout.groups)
        windows = [group.window for group in layout.groups]
        names = block_names(algo, manager_v2=manager_v2, tokens_per_block=size)
        self.stream_sink = StreamSink(size, target, tier_moves=tier_moves)
        self.buffered_sink = BufferedSink(size, names, Envelope(algo, [window or 1 << 20 for window in windows]))
        self.stream = StreamChecker(parents_stay=target.window is None)
        self.buffered = BufferedChecker(
            windowed_groups=frozenset(group for group, window in enumerate(windows) if window is not None)
        )

    def on_created(self, tiers: Sequence[str], num_pages: Sequence[Sequence[int]]) -> None:
        """See :class:`kvmesh.cache.events.EventSink`."""
        assert all(len(levels) == len(tiers) for levels in num_pages)
        self.stream_sink.on_created(tiers, num_pages)
        self.buffered_sink.on_created(tiers, num_pages)

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        """See :class:`kvmesh.cache.events.EventSink`."""
        assert len(blocks.keys) == len(blocks.token_ids) == len(blocks.priorities) > 0
        assert blocks.token_ids.dtype == np.int32
        assert blocks.priorities.dtype == np.uint8
        self.stream_sink.on_stored(group, blocks)
        self.buffered_sink.on_stored(group, blocks)

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:
        """See :class:`kvmesh.cache.events.EventSink`."""
        assert keys
        self.stream_sink.on_removed(group, keys, level)
        self.buffered_sink.on_removed(group, keys, level)

    def on_moved(self, group: int, keys: Sequence[bytes], old_level: int, new_level: int) -> None:
        """See :class:`kvmesh.cache.events.EventSink`."""
        assert keys
        assert old_level != new_level
        self.stream_sink.on_moved(group, keys, old_level, new_level)
        self.buffered_sink.on_moved(group, keys, old_level, new_level)

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        """See :class:`kvmesh.cache.events.EventSink`."""
        assert keys
        assert old != new
        self.stream_sink.on_priority(group, keys, old, new)
        self.buffered_sink.on_priority(group, keys, old, new)

    def step(self) -> list[KvEvent]:
        """A step of the cache is over: read what it told.

        Returns:
            The streamed events of the step.
        """
        events = self.stream_sink.take()
        self.stream.apply(events)
        self.buffered.apply(self.buffered_sink.take())
        return events

    def finish(self) -> None:
        """The cache is closed: everything must have been removed."""
        self.step()
        self.stream.finish()
        self.buffered.finish()
