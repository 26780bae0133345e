"""Payloads of other engines, written out by hand from the wire facts, become the same events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvmesh.events.decoding import PayloadError, decode_payload
from kvmesh.events.tracking import Arrival, SequenceTracker
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored

STORED_MAP = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
STORED_ARRAY = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU"]
"""vLLM up to 0.23: positional, trailing defaults cut."""


@pytest.mark.parametrize("event", [STORED_MAP, STORED_ARRAY, {**STORED_MAP, "locality": "LOCAL", "group_idx": None}])
@pytest.mark.parametrize(
    "envelope",
    [
        lambda events: [1.0, events, 0],
        lambda events: [1.0, events, None],
        lambda events: [1.0, events],
        lambda events: {"ts": 1.0, "events": events, "dp_rank": 0},
    ],
)
def test_every_encoding_gives_the_same_event(event: Any, envelope: Any) -> None:
    decoded = decode_payload(msgspec.msgpack.encode(envelope([event])))
    (stored,) = decoded.events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == ([11, 12], None, [1, 2, 3, 4])
    assert (stored.block_size, stored.medium, decoded.data_parallel_rank) == (2, "GPU", 0)


def test_rank_travels() -> None:
    assert decode_payload(msgspec.msgpack.encode([1.0, [], 3])).data_parallel_rank == 3


def test_hashes_become_unsigned() -> None:
    events = [
        ["BlockStored", [-1], -2, [1], 1],
        ["BlockRemoved", [-1], "GPU"],
        ["BlockRemoved", [b"\x00" * 24 + b"\xff" * 8]],
    ]
    stored, removed, digest = decode_payload(msgspec.msgpack.encode([0, events])).events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == ([2**64 - 1], 2**64 - 2)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [2**64 - 1]
    assert isinstance(digest, BlockRemoved)
    assert digest.block_hashes == [2**64 - 1]


def test_one_bad_event_does_not_take_its_batch_along() -> None:
    events = [STORED_MAP, {"type": "Nonsense"}, ["BlockStored", "x"], 7, None, ["AllBlocksCleared"]]
    decoded = decode_payload(msgspec.msgpack.encode([0.0, events]))
    assert [type(event) for event in decoded.events] == [BlockStored, AllBlocksCleared]
    assert decoded.unreadable == 4


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode(5), msgspec.msgpack.encode([1.0, {}])])
def test_no_batch_at_all(payload: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_payload(payload)


def test_sequence_numbers_are_judged() -> None:
    tracker = SequenceTracker()
    tracker.apply(4)  # a replay brought 0 to 4
    assert tracker.arrive(3) is Arrival.DUPLICATE
    assert tracker.arrive(4) is Arrival.DUPLICATE
    assert tracker.arrive(5) is Arrival.NEXT
    tracker.apply(5)
    assert tracker.arrive(8) is Arrival.GAP
    tracker.apply(8)
    assert tracker.arrive(0) is Arrival.RESTART
    tracker.restart()
    assert tracker.arrive(0) is Arrival.NEXT
