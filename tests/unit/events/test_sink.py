"""What a step's cache changes become on the wire (semantics 4.3; scenarios T9, T10)."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from kvmesh.events.sink import EventSink
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored

SCOPE = ReuseScope()


class Block(NamedTuple):
    key: bytes
    token_ids: np.ndarray
    level: int = 0
    priority: int = 35


def block(number: int, *tokens: int, level: int = 0) -> Block:
    return Block(number.to_bytes(8, "big") + bytes(24), np.array(tokens, np.int32), level)


def test_t9_full_blocks_of_the_target_group_only() -> None:
    sink = EventSink(4)
    a, partial, b = block(1, 1, 2, 3, 4), block(2, 5, 6), block(3, 5, 6, 7, 8)
    sink.on_stored(SCOPE, None, [a])
    sink.on_stored(SCOPE, a.key, [partial])
    sink.on_stored(SCOPE, a.key, [b])
    sink.on_stored(SCOPE, None, [a], group=1)
    (stored,) = sink.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [1, 3]
    assert stored.parent_block_hash is None
    assert stored.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (stored.block_size, stored.lora_id, stored.lora_name, stored.medium) == (4, None, None, "GPU")
    sink.on_removed([a.key, partial.key, b.key])
    sink.on_removed([a.key], group=1)
    (removed,) = sink.take()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [1, 3]
    counts = sink.statistics
    assert (counts.blocks_stored_total, counts.blocks_removed_total) == (2, 2)
    assert (counts.partial_blocks_suppressed_total, counts.non_target_blocks_total) == (1, 1)


def test_t10_removals_are_never_dropped() -> None:
    sink = EventSink(1, max_stored_blocks=2)
    blocks = [block(n, n) for n in range(1, 5)]
    sink.on_stored(SCOPE, None, blocks[:2])
    sink.on_stored(SCOPE, None, blocks[2:])
    sink.on_removed([item.key for item in blocks])
    events = sink.take()
    assert isinstance(events[-1], BlockRemoved)
    assert events[-1].block_hashes == [1, 2]
    assert sink.statistics.stores_dropped_total == 2
    assert sink.announced_blocks == 0


def test_chains_merge_and_branches_do_not() -> None:
    sink = EventSink(1)
    a, b, c = block(1, 1), block(2, 2), block(3, 3)
    sink.on_stored(SCOPE, None, [a, b])
    sink.on_stored(SCOPE, a.key, [c])
    first, second = sink.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.block_hashes == [1, 2]
    assert (second.block_hashes, second.parent_block_hash) == ([3], 1)


def test_order_between_removals_and_stores_is_kept() -> None:
    sink = EventSink(1)
    a, b = block(1, 1), block(2, 2)
    sink.on_stored(SCOPE, None, [a])
    sink.on_removed([a.key])
    sink.on_stored(SCOPE, None, [b])
    sink.on_stored(SCOPE, None, [a])
    kinds = [type(event).__name__ for event in sink.take()]
    assert kinds == ["BlockStored", "BlockRemoved", "BlockStored", "BlockStored"]


def test_a_block_is_announced_once_until_removed() -> None:
    sink = EventSink(1)
    a = block(1, 1)
    sink.on_stored(SCOPE, None, [a])
    sink.on_stored(SCOPE, None, [a])
    sink.on_removed([a.key, a.key])
    assert len(sink.take()) == 2
    sink.on_removed([a.key])
    assert sink.take() == []


def test_salt_travels_with_the_first_block_of_a_chain() -> None:
    sink = EventSink(1)
    a, b, c = block(1, 1), block(2, 2), block(3, 3)
    scope = ReuseScope(lora_id=7, salt=2**64 - 1)
    sink.on_stored(scope, None, [a, b])
    (first,) = sink.take()
    assert isinstance(first, BlockStored)
    assert first.extra_keys == [[str(2**64 - 1)], None]
    assert first.lora_id == 7
    sink.on_stored(scope, b.key, [c])
    (later,) = sink.take()
    assert isinstance(later, BlockStored)
    assert later.extra_keys is msgspec.UNSET


def test_hashes_signed_or_not() -> None:
    key = b"\xff" * 32
    for signed, expected in ((False, 2**64 - 1), (True, -1)):
        sink = EventSink(1, signed=signed)
        sink.on_stored(SCOPE, None, [Block(key, np.array([1], np.int32))])
        (stored,) = sink.take()
        assert isinstance(stored, BlockStored)
        assert stored.block_hashes == [expected]


def test_removal_repeats_the_medium() -> None:
    sink = EventSink(1)
    host = block(1, 1, level=1)
    sink.on_stored(SCOPE, None, [host])
    sink.on_removed([host.key])
    stored, removed = sink.take()
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert stored.medium == removed.medium == "CPU"


def test_cleared() -> None:
    sink = EventSink(1)
    sink.on_stored(SCOPE, None, [block(1, 1)])
    sink.take()
    sink.on_cleared()
    assert isinstance(sink.take()[0], AllBlocksCleared)
    assert sink.announced_blocks == 0
