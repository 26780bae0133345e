"""The buffered (pull) events: their rules, their buffer and their JSON (semantics §4.1, §7 T5 to T8)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.buffer import EventBuffer
from kvmesh.events.buffered import BufferedSink, Envelope
from kvmesh.events.buffered_json import events_as_json
from kvmesh.events.gather import EventGatherer
from kvmesh.events.names import block_names
from kvmesh.hashing import ReuseScope, as_token_ids, salt_id, v2_block_keys, v2_root
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.kv_cache_events import CreatedData, EventDiff, KvCacheEvent, RemovedData, StoredData, UpdatedData

MakeBlocks = Callable[..., StoredBlocks]
FULL = 4096


def sink_of(*windows: int, size: int = 1, rank: int | None = None, algo: Any = "v2_sha256_64") -> BufferedSink:
    names = block_names(algo, manager_v2=True, tokens_per_block=size)
    return BufferedSink(size, names, Envelope(algo, windows or (FULL,), attention_dp_rank=rank))


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(24)


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def data_of(events: Sequence[KvCacheEvent]) -> list[Any]:
    return [event.data for event in events]


def hashes_of(event: KvCacheEvent) -> list[str | int]:
    assert isinstance(event.data, StoredData | RemovedData)
    return event.data.block_hashes


def test_created_is_one_event_for_each_layer_group() -> None:
    sink = sink_of(FULL, 64)
    sink.on_created(("gpu", "host"), [(10, 20), (5, 7)])
    events = sink.take()
    assert data_of(events) == [CreatedData([10, 20]), CreatedData([5, 7])]
    assert [(event.event_id, event.window_size, event.layer_group_id) for event in events] == [(0, FULL, 0), (1, 64, 1)]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_t5_two_blocks_in_two_layer_groups_are_two_events(make_blocks: MakeBlocks, one_by_one: bool) -> None:
    sink = sink_of(FULL, 64)
    if one_by_one:
        for group in (0, 1):
            sink.on_stored(group, make_blocks([1]))
        for group in (0, 1):
            sink.on_stored(group, make_blocks([2], parent=1))
    else:
        for group in (0, 1):
            sink.on_stored(group, make_blocks([1, 2]))
    first, second = sink.take()
    assert (first.layer_group_id, second.layer_group_id) == (0, 1)
    for event in (first, second):
        assert isinstance(event.data, StoredData)
        assert (event.data.parent_hash, event.data.block_hashes) == (None, [1, 2])


def test_t6_the_oldest_events_make_room_and_removals_become_one(make_blocks: MakeBlocks) -> None:
    sink = sink_of()
    sink.on_created(("gpu",), [(4,)])
    sink.on_stored(0, make_blocks([1, 2]))
    sink.on_removed(0, keys(2), 0)
    sink.on_removed(0, keys(1), 0)
    buffer = EventBuffer(2)
    buffer.extend(sink.take())
    _, events = buffer.get_latest_events()
    assert [event.event_id for event in events] == [1, 2]
    assert hashes_of(events[1]) == [2, 1]
    assert buffer.dropped_total == 1


def test_t7_what_was_never_told_is_neither_removed_nor_updated(make_blocks: MakeBlocks) -> None:
    sink = sink_of(FULL, 64)
    sink.on_removed(0, keys(1), 0)
    sink.on_moved(0, keys(1), 0, 1)
    sink.on_priority(0, keys(1), 35, 50)
    assert sink.take() == []
    sink.on_stored(0, make_blocks([1]))
    sink.on_removed(1, keys(1), 0)
    sink.on_moved(1, keys(1), 0, 1)
    sink.on_removed(0, keys(1, 2), 0)
    sink.on_removed(0, keys(1), 0)
    _, removed = sink.take()
    assert removed.data == RemovedData([1])


@pytest.mark.parametrize(("start", "expected"), [(b"\x80" + bytes(7), 2**63), (b"\xff" * 8, 2**64 - 1)])
def test_t8_hashes_are_unsigned(make_blocks: MakeBlocks, start: bytes, expected: int) -> None:
    sink = sink_of()
    sink.on_stored(0, make_blocks([start + bytes(24)]))
    assert hashes_of(sink.take()[0]) == [expected]


def test_stored_blocks_merge_while_nothing_comes_between(make_blocks: MakeBlocks) -> None:
    sink = sink_of(size=2)
    sink.on_stored(0, make_blocks([1], [[1, 2]], priority=10))
    sink.on_stored(0, make_blocks([2, 3], [[3, 4], [5, 6]], parent=1, level=1, priority=20))
    sink.on_stored(0, make_blocks([4], [[7]], parent=3))
    sink.on_stored(0, make_blocks([5], [[9, 9]], parent=1))
    merged, branch = sink.take()
    assert merged.data == StoredData(
        parent_hash=None,
        block_hashes=[1, 2, 3, 4],
        token_ids=as_token_ids([1, 2, 3, 4, 5, 6, 7]).tobytes(),
        block_size=2,
        cache_levels=[0, 1, 1, 0],
        priorities=bytes([10, 20, 20, 35]),
    )
    assert isinstance(branch.data, StoredData)
    assert branch.data.parent_hash == 1
    sink.on_stored(0, make_blocks([6], [[8, 8]], parent=5))
    assert len(sink.take()) == 1, "not with an event that has been handed out"


def test_removals_come_before_the_next_event_of_another_kind(make_blocks: MakeBlocks) -> None:
    sink = sink_of(FULL, 64)
    for group in (0, 1):
        sink.on_stored(group, make_blocks([1, 2]))
    sink.take()
    sink.on_removed(1, keys(1), 0)
    sink.on_removed(0, keys(2), 0)
    sink.on_removed(1, keys(2), 0)
    sink.on_stored(0, make_blocks([3], parent=1))
    sink.on_removed(0, keys(3), 0)
    sink.on_moved(0, keys(1), 0, 1)
    sink.on_removed(0, keys(1), 1)
    events = sink.take()
    assert [(type(event.data).__name__, event.layer_group_id) for event in events] == [
        ("RemovedData", 0),
        ("RemovedData", 1),
        ("StoredData", 0),
        ("RemovedData", 0),
        ("UpdatedData", 0),
        ("RemovedData", 0),
    ]
    assert [event.event_id for event in events] == list(range(2, 8))
    assert hashes_of(events[1]) == [1, 2]


def test_8_6_an_update_may_lack_either_difference(make_blocks: MakeBlocks) -> None:
    sink = sink_of()
    sink.on_stored(0, make_blocks([1, 2]))
    sink.on_moved(0, keys(2, 1), 0, 1)
    sink.on_priority(0, keys(1), 35, 50)
    _, *updates = sink.take()
    assert data_of(updates) == [
        UpdatedData(block_hash=2, cache_level=EventDiff(0, 1)),
        UpdatedData(block_hash=1, cache_level=EventDiff(0, 1)),
        UpdatedData(block_hash=1, priority=EventDiff(35, 50)),
    ]
    moved, _, repriced = json.loads(events_as_json(updates))
    assert moved["data"] == {
        "type": "updated",
        "block_hash": 2,
        "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1},
        "priority": None,
    }
    assert repriced["data"]["cache_level"] is None
    assert repriced["data"]["priority"] == {"type": "event_diff", "old_value": 35, "new_value": 50}


def test_the_json_of_every_event(make_blocks: MakeBlocks) -> None:
    """§4.1, with the hashes of §4.2."""
    scope = ReuseScope(salt=salt_id("tenant-a"))
    tokens = as_token_ids([1, 2, 3, 4, 5, 6])
    full, partial = v2_block_keys(tokens, 4, v2_root(scope), include_partial=True)
    sink = sink_of(size=4, algo="v2_sha256")
    sink.on_created(("gpu", "disk"), [(3, 4)])
    sink.on_stored(0, make_blocks([full], [[1, 2, 3, 4]], scope=scope))
    sink.on_stored(0, make_blocks([partial], [[5, 6]], parent=full, scope=scope, level=1, priority=0))
    sink.on_removed(0, [partial, full], 0)
    events = sink.take()
    # The way to the front changes nothing.
    events = msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=list[KvCacheEvent])
    envelope = {"window_size": FULL, "hash_algo": "v2_sha256", "layer_group_id": 0}
    salt = {"cache_salt": "16248643848220682112"}

    def block(block_key: bytes, *ids: int, **fields: Any) -> dict[str, Any]:
        unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in ids]
        head = {"type": "stored_block", "block_hash": block_key.hex(), "tokens": unique, "mm_keys": []}
        return head | salt | fields

    assert full.hex() == "b4c950a41ade125ebdbafd8dcf8a17bbe24b891746c3a790b43ad14c26bd7cd9"
    assert json.loads(events_as_json(events)) == [
        {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [3, 4]}} | envelope,
        {
            "event_id": 1,
            "data": {
                "type": "stored",
                "parent_hash": None,
                "blocks": [
                    block(full, 1, 2, 3, 4, cache_level=0, priority=35),
                    block(partial, 5, 6, cache_level=1, priority=0),
                ],
            },
        }
        | envelope,
        {"event_id": 2, "data": {"type": "removed", "block_hashes": [partial.hex(), full.hex()]}} | envelope,
    ]


def test_the_envelope_tells_only_what_there_is(make_blocks: MakeBlocks) -> None:
    names = block_names("v1_block_key", manager_v2=False, tokens_per_block=1)
    envelope = Envelope("v1_block_key", (64,), with_group_ids=False, attention_dp_rank=3)
    sink = BufferedSink(1, names, envelope)
    sink.on_stored(0, make_blocks([(5).to_bytes(8, "big")]))
    (event,) = json.loads(events_as_json(sink.take()))
    assert event.keys() == {"event_id", "data", "window_size", "attention_dp_rank", "hash_algo"}
    assert (event["window_size"], event["attention_dp_rank"], event["hash_algo"]) == (64, 3, "v1_block_key")
    assert event["data"]["blocks"][0]["block_hash"] == 5
    assert "cache_salt" not in event["data"]["blocks"][0]


def events_numbered(*numbers: int, rank: int | None = None) -> list[KvCacheEvent]:
    return [
        KvCacheEvent(event_id=number, data=RemovedData([number]), window_size=1, attention_dp_rank=rank)
        for number in numbers
    ]


def ids(events: Sequence[KvCacheEvent]) -> list[int]:
    return [event.event_id for event in events]


class TestBuffer:
    def test_2_size_2_loses_the_oldest_of_three(self) -> None:
        buffer = EventBuffer(2)
        buffer.extend(events_numbered(0, 1, 2))
        assert ids(buffer.get_latest_events().events) == [1, 2]
        assert buffer.get_latest_events().events == []

    def test_a_bounded_wait_ends(self) -> None:
        assert EventBuffer(2).get_latest_events(0.001).events == []

    @pytest.mark.parametrize("timeout_s", [None, 60.0])
    def test_a_wait_ends_with_the_first_event(self, timeout_s: float | None) -> None:
        buffer = EventBuffer(2)
        found: list[int] = []
        reader = threading.Thread(target=lambda: found.extend(ids(buffer.get_latest_events(timeout_s).events)))
        reader.start()
        buffer.extend(events_numbered(7))
        reader.join(10)
        assert found == [7]

    def test_events_come_again_until_they_are_confirmed(self) -> None:
        buffer = EventBuffer(3)
        buffer.extend(events_numbered(0, 1))
        first = buffer.get_latest_events(confirmed=0)
        assert (ids(first.events), first.position) == ([0, 1], 2)
        buffer.extend(events_numbered(2))
        second = buffer.get_latest_events(confirmed=0)
        assert (ids(second.events), second.position) == ([0, 1, 2], 3)
        third = buffer.get_latest_events(confirmed=first.position)
        assert (ids(third.events), third.position) == ([2], 3)
        assert ids(buffer.get_latest_events(confirmed=third.position).events) == []
        assert buffer.dropped_total == 0

    def test_events_that_made_room_cannot_be_confirmed_any_more(self) -> None:
        buffer = EventBuffer(2)
        buffer.extend(events_numbered(0, 1))
        position = buffer.get_latest_events(confirmed=0).position
        buffer.extend(events_numbered(2, 3, 4))
        assert ids(buffer.get_latest_events(confirmed=position).events) == [3, 4]
        assert buffer.dropped_total == 3


class TestGather:
    def test_the_oldest_of_too_many_that_wait_are_dropped(self) -> None:
        clock, buffer = ManualClock(), EventBuffer(8)
        gatherer = EventGatherer(buffer, 2, period_s=0.005, clock=clock)
        gatherer.flush(())
        gatherer.flush(events_numbered(0, 1, 2))
        assert gatherer.dropped_total == 1
        clock.advance(0.005)
        gatherer.flush(())
        assert ids(buffer.get_latest_events().events) == [1, 2]

    def test_2_v1_gathers_in_its_own_rhythm(self) -> None:
        clock, buffer = ManualClock(), EventBuffer(8)
        gatherer = EventGatherer(buffer, 8, period_s=0.005, clock=clock)
        gatherer.flush(events_numbered(0))
        gatherer.flush(events_numbered(1))
        assert ids(buffer.get_latest_events().events) == [0]
        assert gatherer.due_in_s() == pytest.approx(0.005)
        clock.advance(0.005)
        assert gatherer.due_in_s() == 0.0
        gatherer.flush([])
        assert ids(buffer.get_latest_events().events) == [1]
        assert gatherer.due_in_s() is None

    def test_v2_gathers_with_every_iteration(self) -> None:
        clock, buffer = ManualClock(), EventBuffer(8)
        gatherer = EventGatherer(buffer, 8, clock=clock)
        for number in range(3):
            gatherer.flush(events_numbered(number))
            assert gatherer.due_in_s() is None
        assert ids(buffer.get_latest_events().events) == [0, 1, 2]
