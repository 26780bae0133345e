"""What a step's cache changes become on the wire (semantics §4.3; scenarios T9, T10)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.encoding import encode_batch
from kvmesh.events.sink import StreamSink
from kvmesh.events.target import TargetGroup
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.events import BlockRemoved, BlockStored, EventBatch, KvEvent

SCOPE = ReuseScope()


def key(number: int) -> bytes:
    """A V2 key whose hash on the wire is ``number``."""
    return number.to_bytes(8, "big") + bytes(24)


def store(
    sink: StreamSink,
    numbers: Sequence[int],
    tokens: Sequence[Sequence[int]] | None = None,
    *,
    parent: int | None = None,
    scope: ReuseScope = SCOPE,
    group: int = 0,
    level: int = 0,
    covered: int | None = None,
) -> None:
    """Blocks of one token, which is their number, unless ``tokens`` are given."""
    token_ids = np.array([[number] for number in numbers] if tokens is None else tokens, np.int32)
    keys = [key(number) for number in numbers]
    priorities = np.full(len(keys), 35, np.uint8)
    parent_key = None if parent is None else key(parent)
    sink.on_stored(group, StoredBlocks(scope, parent_key, keys, token_ids, level, priorities, covered))
    token_ids[:] = -1  # valid during the call only


def remove(sink: StreamSink, *numbers: int, group: int = 0, level: int = 0) -> None:
    sink.on_removed(group, [key(number) for number in numbers], level)


def summary(events: Sequence[KvEvent]) -> list[tuple[str, str | None, list[int]]]:
    return [
        (type(event).__name__, event.medium, event.block_hashes)
        for event in events
        if isinstance(event, BlockStored | BlockRemoved)
    ]


def test_t9_full_blocks_of_the_target_group_only() -> None:
    sink = StreamSink(4, TargetGroup(0, "sliding_window", 128))
    store(sink, [1], [[1, 2, 3, 4]])
    store(sink, [2], [[5, 6]], parent=1)
    store(sink, [3], [[5, 6, 7, 8]], parent=1)
    store(sink, [1], [[1, 2, 3, 4]], group=1)
    (stored,) = sink.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [1, 3]
    assert stored.parent_block_hash is None
    assert list(stored.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (stored.block_size, stored.lora_id, stored.lora_name, stored.medium) == (4, None, None, "GPU")
    assert (stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window) == ("sliding_window", 128)
    remove(sink, 1, 2, 3)
    remove(sink, 1, group=1)
    (removed,) = sink.take()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [1, 3]
    counts = sink.statistics
    assert (counts.stored_total, counts.removed_total) == (2, 2)
    assert (counts.suppressed_total, counts.non_target_total) == (1, 1)


def test_t10_removals_are_never_dropped() -> None:
    sink = StreamSink(1, max_stored_blocks=2)
    store(sink, [1, 2])
    store(sink, [3, 4], parent=2)
    remove(sink, 4, 3, 2, 1)
    assert summary(sink.take()) == [("BlockStored", "GPU", [1, 2]), ("BlockRemoved", "GPU", [2, 1])]
    assert sink.statistics.dropped_total == 2
    store(sink, [3, 4])
    assert summary(sink.take()) == [("BlockStored", "GPU", [3, 4])], "a new step, and the blocks are new, too"


def test_what_continues_an_untold_block_is_not_told_either() -> None:
    # §8.5: the parent of a stored event is null or known.
    sink = StreamSink(1, max_stored_blocks=3)
    store(sink, [1, 2, 3, 4, 5])
    sink.take()
    store(sink, [6], parent=5)
    store(sink, [7], parent=3)
    assert summary(sink.take()) == [("BlockStored", "GPU", [7])]
    assert (sink.statistics.dropped_total, sink.statistics.suppressed_total) == (2, 1)
    remove(sink, 6, 5, 4)
    assert sink.take() == []
    remove(sink, 7, 3, 2, 1)
    assert summary(sink.take()) == [("BlockRemoved", "GPU", [7, 3, 2, 1])]


def test_a_block_whose_page_does_not_cover_it_waits_until_it_does() -> None:
    # §4.3: coverage < block tokens -> suppressed until covered.
    sink = StreamSink(2)
    store(sink, [1], [[1, 2]], covered=1)
    assert sink.take() == []
    remove(sink, 1)
    store(sink, [1], [[1, 2]], covered=2)
    assert summary(sink.take()) == [("BlockStored", "GPU", [1])]
    assert sink.statistics.suppressed_total == 1


def test_inside_a_window_a_block_may_come_before_its_parent() -> None:
    sink = StreamSink(2, TargetGroup(0, "sliding_window", 8))
    store(sink, [1], [[1, 2]], covered=1)
    store(sink, [2], [[3, 4]], parent=1)
    remove(sink, 1)
    store(sink, [1], [[1, 2]])
    later, first = sink.take()
    assert isinstance(later, BlockStored)
    assert isinstance(first, BlockStored)
    assert (later.block_hashes, later.parent_block_hash) == ([2], 1)
    assert (first.block_hashes, first.parent_block_hash) == ([1], None)
    remove(sink, 2, 1)
    assert summary(sink.take()) == [("BlockRemoved", "GPU", [2, 1])]


def test_chains_merge_and_branches_do_not() -> None:
    sink = StreamSink(1)
    store(sink, [1, 2])
    store(sink, [3], parent=2)
    store(sink, [4], parent=1)
    first, second = sink.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.block_hashes, list(first.token_ids)) == ([1, 2, 3], [1, 2, 3])
    assert (second.block_hashes, second.parent_block_hash) == ([4], 1)


def test_order_between_removals_and_stores_is_kept() -> None:
    sink = StreamSink(1)
    store(sink, [1])
    remove(sink, 1)
    store(sink, [2])
    store(sink, [1])
    kinds = [type(event).__name__ for event in sink.take()]
    assert kinds == ["BlockStored", "BlockRemoved", "BlockStored", "BlockStored"]


def test_salt_travels_with_the_first_block_of_a_chain() -> None:
    sink = StreamSink(1)
    scope = ReuseScope(lora_id=7, salt=2**64 - 1)
    store(sink, [1], scope=scope)
    store(sink, [2], parent=1, scope=scope)
    (first,) = sink.take()
    assert isinstance(first, BlockStored)
    assert first.extra_keys == [[str(2**64 - 1)], None]
    assert first.lora_id == 7
    store(sink, [3], parent=2, scope=scope)
    (later,) = sink.take()
    assert isinstance(later, BlockStored)
    assert later.extra_keys is msgspec.UNSET


@pytest.mark.parametrize("width", [32, 8], ids=["v2", "v1"])
@pytest.mark.parametrize(("signed", "expected"), [(False, 2**64 - 1), (True, -1)])
def test_t8_hashes_signed_or_not(width: int, signed: bool, expected: int) -> None:
    sink = StreamSink(1, signed=signed)
    keys = [b"\xff" * width, b"\0" * 7 + b"\1" * (width - 7)]
    blocks = StoredBlocks(SCOPE, None, keys, np.array([[1], [2]], np.int32), 0, np.zeros(2, np.uint8))
    sink.on_stored(0, blocks)
    sink.on_removed(0, keys, 0)
    for event in sink.take():
        assert isinstance(event, BlockStored | BlockRemoved)
        assert event.block_hashes == [expected, 1]


@pytest.mark.parametrize("tokens", [[0, 1, 65535], [0, 65536, 2**31 - 1], [127, 128, 255]])
@pytest.mark.parametrize("encoding", ["map", "array"])
def test_packed_tokens_are_ordinary_numbers_to_a_reader(tokens: list[int], encoding: str) -> None:
    sink = StreamSink(3)
    store(sink, [1], [tokens])
    payload = encode_batch(EventBatch(0.0, sink.take(), 0), encoding)  # type: ignore[arg-type]
    (event,) = msgspec.msgpack.decode(payload)[1]
    assert (event["token_ids"] if isinstance(event, dict) else event[3]) == tokens


TIERS = ("gpu", "host", "disk")


def test_a_move_is_a_store_in_the_new_medium_and_then_a_removal_from_the_old() -> None:
    # decisions.md 6, wire.md 2.6; no tokens mean that known blocks are in another medium now.
    sink = StreamSink(1)
    sink.on_created(TIERS, [(8, 8, 8)])
    store(sink, [1, 2, 3])
    sink.take()
    sink.on_moved(0, [key(3), key(2)], 0, 1)
    sink.on_moved(0, [key(1)], 0, 1)
    sink.on_moved(0, [key(3)], 1, 2)
    events = sink.take()
    assert summary(events) == [
        ("BlockStored", "CPU", [3, 2, 1]),
        ("BlockRemoved", "GPU", [3, 2, 1]),
        ("BlockStored", "DISK", [3]),
        ("BlockRemoved", "CPU", [3]),
    ]
    for event in events:
        if isinstance(event, BlockStored):
            assert (event.token_ids, event.parent_block_hash, event.block_size) == ([], None, 1)
    remove(sink, 3, level=2)
    remove(sink, 2, 1, level=1)
    assert summary(sink.take()) == [("BlockRemoved", "DISK", [3]), ("BlockRemoved", "CPU", [2, 1])]
    assert (sink.statistics.moved_total, sink.statistics.removed_total) == (4, 3)


def test_there_and_back_again_in_one_step() -> None:
    sink = StreamSink(1)
    sink.on_created(TIERS, [(8, 8, 8)])
    store(sink, [1])
    for old, new in ((0, 1), (1, 0), (0, 1)):
        sink.on_moved(0, [key(1)], old, new)
    remove(sink, 1, level=1)
    assert [(name, medium) for name, medium, _ in summary(sink.take())] == [
        ("BlockStored", "GPU"),
        ("BlockStored", "CPU"),
        ("BlockRemoved", "GPU"),
        ("BlockStored", "GPU"),
        ("BlockRemoved", "CPU"),
        ("BlockStored", "CPU"),
        ("BlockRemoved", "GPU"),
        ("BlockRemoved", "CPU"),
    ]


def test_moves_of_untold_blocks_and_other_groups_are_silent() -> None:
    sink = StreamSink(2)
    sink.on_created(TIERS, [(8, 8, 8)])
    store(sink, [1], [[1]])
    sink.on_moved(0, [key(1)], 0, 1)
    sink.on_moved(1, [key(2)], 0, 1)
    sink.on_priority(0, [key(1)], 35, 50)
    assert sink.take() == []


def test_device_only_tells_no_moves_and_one_removal() -> None:
    # §4.3: host and disk offload is not published upstream; removed only when it leaves the tree.
    sink = StreamSink(1, tier_moves="device_only")
    sink.on_created(TIERS, [(8, 8, 8)])
    store(sink, [1])
    sink.on_moved(0, [key(1)], 0, 1)
    remove(sink, 1, level=1)
    store(sink, [2], level=1)
    assert summary(sink.take()) == [
        ("BlockStored", "GPU", [1]),
        ("BlockRemoved", "GPU", [1]),
        ("BlockStored", "GPU", [2]),
    ]


def test_levels_are_named_by_what_they_are() -> None:
    # Without a host tier level 1 is the disk (§2.2).
    sink = StreamSink(1)
    sink.on_created(("gpu", "disk"), [(8, 8)])
    store(sink, [1], level=1)
    remove(sink, 1, level=1)
    assert [medium for _, medium, _ in summary(sink.take())] == ["DISK", "DISK"]
