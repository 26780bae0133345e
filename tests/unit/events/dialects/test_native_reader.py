"""The native reader of plain events gives what the dialects give, for any bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.events.decoding import BatchError, decode_batch, decode_by_dialects
from kvmesh.events.dialects import normalise
from kvmesh.events.records import EventRecord, RecordBatch, Removed, Stored
from kvmesh.kernels import _native

FOLDER = Path(__file__).parents[3] / "data" / "events"
PAYLOADS = {
    f"{path.stem}-{number}": bytes.fromhex(text)
    for path in sorted(FOLDER.glob("*.hex"))
    for number, text in enumerate(path.read_text().split("\n\n")[1:])
}
MUTATIONS = 40
KIT = (Stored, Removed, dict(normalise.TIERS), lambda data: np.frombuffer(data, "<i4"))

WORDS = st.sampled_from([None, "GPU", "CPU", "cpu", "FLOPPY", "LOCAL", "REMOTE", "full_attention", "ä", ""])
NUMBERS = st.sampled_from([None, 0, 1, 4, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1, True, 1.5])
HASHES = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.integers(0, 3), st.binary(min_size=0, max_size=9), st.binary(min_size=32)
)
ODD_TOKENS = st.lists(
    st.one_of(st.integers(-(2**33), 2**33), st.lists(st.integers(0, 9), max_size=2), st.binary(max_size=3)), max_size=8
)
EXTRA_KEYS = st.one_of(st.none(), st.lists(st.one_of(st.none(), st.lists(st.text(max_size=3), max_size=2)), max_size=3))
ANYTHING = st.one_of(WORDS, NUMBERS, st.lists(NUMBERS, max_size=2), st.dictionaries(st.text(max_size=3), NUMBERS))


@st.composite
def maps(draw: st.DrawFn) -> dict[str, Any]:
    hashes = draw(st.lists(HASHES, max_size=3))
    filling = st.lists(st.integers(0, 200_000), min_size=4 * len(hashes), max_size=4 * len(hashes))
    tokens = draw(st.one_of(st.just([]), ODD_TOKENS, filling))
    event = {
        "type": draw(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Ignored", "Odd"])),
        "block_hashes": hashes,
        "parent_block_hash": draw(st.one_of(st.none(), HASHES)),
        "token_ids": tokens,
        "block_size": draw(st.one_of(st.just(4), NUMBERS)),
        "lora_id": draw(NUMBERS),
        "lora_name": draw(WORDS),
        "medium": draw(WORDS),
        "extra_keys": draw(EXTRA_KEYS),
        "mm_keys": draw(EXTRA_KEYS),
        "lookahead_token_ids": draw(
            st.one_of(st.none(), st.lists(st.lists(st.integers(0, 9), max_size=1), max_size=2))
        ),
        "cache_salt": draw(WORDS),
        "group_idx": draw(NUMBERS),
        "kv_cache_spec_kind": draw(WORDS),
        "kv_cache_spec_sliding_window": draw(ANYTHING),
        "locality": draw(WORDS),
    }
    kept = draw(st.sets(st.sampled_from(sorted(event)), max_size=6))
    # Mostly what engines write: the first five, and a few more.
    return {key: value for at, (key, value) in enumerate(event.items()) if at < 5 or key in kept}


@st.composite
def arrays(draw: st.DrawFn) -> list[Any]:
    event = draw(maps())
    names = ["type", "block_hashes"]
    if event["type"] == "BlockStored":
        names += ["parent_block_hash", "token_ids", "block_size"]
    tail = draw(st.lists(st.one_of(WORDS, NUMBERS, ANYTHING), max_size=9))
    return [event[name] for name in names] + tail


def outcome(decode: Any, payload: bytes) -> Any:
    try:
        batch = decode(payload)
    except BatchError:
        return "no batch"
    return comparable(batch)


def comparable(batch: RecordBatch) -> Any:
    return {
        **msgspec.structs.asdict(batch),
        "ts": repr(batch.ts),
        "records": [comparable_record(record) for record in batch.records],
    }


def comparable_record(record: EventRecord) -> Any:
    if not isinstance(record, Stored):
        return record
    assert record.token_ids.dtype == np.int32
    return {**msgspec.structs.asdict(record), "token_ids": record.token_ids.tolist()}


def agree(payload: bytes) -> None:
    assert outcome(decode_batch, payload) == outcome(decode_by_dialects, payload)


@pytest.mark.parametrize("name", PAYLOADS)
def test_bytes_of_engines_and_damaged_ones(name: str) -> None:
    payload, rng = PAYLOADS[name], random.Random(name)
    agree(payload)
    for _ in range(MUTATIONS):
        damaged = bytearray(payload)
        for _ in range(rng.choice((1, 1, 2, 5))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        agree(bytes(damaged))
        agree(payload[: rng.randrange(len(payload))])


@given(
    events=st.lists(st.one_of(maps(), arrays(), ANYTHING), max_size=4),
    ts=st.one_of(st.floats(), NUMBERS, WORDS),
    rank=st.lists(NUMBERS, max_size=2),
    tail=st.binary(max_size=1),
)
def test_any_events(events: list[Any], ts: Any, rank: list[Any], tail: bytes) -> None:
    agree(msgspec.msgpack.encode([ts, events, *rank]) + tail)


@given(st.binary(max_size=60))
def test_any_bytes(payload: bytes) -> None:
    agree(payload)


@pytest.mark.parametrize("event", [{"type": "BlockStored"}, ["BlockStored"]])
def test_common_events_are_read_natively(event: Any) -> None:
    fields: dict[str, Any] = {
        "block_hashes": [1, 2**64 - 1, -3],
        "parent_block_hash": b"\x01" * 32,
        "token_ids": [0, 1, 127, 128, 65_535, 65_536, 149_999, 2**31 - 1, -1, -200, -40_000, 7],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "poet",
        "extra_keys": [None, None, None],
    }
    whole = {**event, **fields} if isinstance(event, dict) else [*event, *fields.values()]
    removed = {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU", "group_idx": 0}
    payload = msgspec.msgpack.encode([1.5, [whole, removed], 3])
    read = _native.read_events(payload, KIT)
    assert read is not None
    ts, rank, items, num_maps, num_arrays = read
    assert (ts, rank) == (1.5, 3)
    assert num_maps + num_arrays == 2
    assert [type(item) for item in items] == [Stored, Removed]
    assert items[0].hashes == [1, 2**64 - 1, 2**64 - 3]
    assert items[0].token_ids.tolist() == fields["token_ids"]
    assert items[0].lora == "poet"
    agree(payload)


def test_events_that_are_not_plain_keep_their_bytes() -> None:
    odd = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "mm_keys": [[{"hash": "a"}]]}
    plain = {"type": "BlockRemoved", "block_hashes": [1]}
    read = _native.read_events(msgspec.msgpack.encode([0.0, [odd, plain]]), KIT)
    assert read is not None
    assert read[2][0] == msgspec.msgpack.encode(odd)
    assert read[3:] == (1, 0)
