"""Payloads of other engines, byte for byte, become the same records whatever dialect they were written in."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
import pytest

from kvmesh.events.decoding import BatchError, decode_batch
from kvmesh.events.encoding import encode_batch
from kvmesh.events.records import Cleared, Removed, Stored, Tier
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

# Bytes put together by hand from the wire format: two blocks of two tokens at the start of a sequence, hashes
# 0x8000000000000001 and 2, then the removal of the second, then everything cleared.

ARRAY_BATCH = bytes.fromhex(
    "93"  # batch: array of 3
    "cb3ff8000000000000"  # ts 1.5
    "93"  # three events
    "9c" + "ab" + b"BlockStored".hex() + "92cf800000000000000102"  # hashes
    "c0"  # no parent
    "9401cd0100cce903"  # tokens 1, 256, 233, 3
    "02"  # block size
    "c0" + "a3" + b"GPU".hex() + "c0c0c0c0c0"  # lora_id, medium, lora_name, extra keys, group, kind, window
    "94" + "ac" + b"BlockRemoved".hex() + "9102" + "a3" + b"GPU".hex() + "c0"
    "91" + "b0" + b"AllBlocksCleared".hex() + "00"  # rank 0
)
"""vLLM up to 0.23 and llm-d: events as positional arrays with every field written out."""

CUT_ARRAY_BATCH = bytes.fromhex(
    "92"  # batch: array of 2, the rank left out
    "cb3ff8000000000000"
    "93"
    "95" + "ab" + b"BlockStored".hex() + "92cf800000000000000102" + "c0" + "9401cd0100cce903" + "02"
    "92" + "ac" + b"BlockRemoved".hex() + "9102"
    "91" + "b0" + b"AllBlocksCleared".hex()
)
"""The same with trailing defaults cut (``omit_defaults``)."""


def _text(word: bytes) -> str:
    return (
        bytes([0xA0 | len(word)]).hex() + word.hex() if len(word) < 32 else "d9" + bytes([len(word)]).hex() + word.hex()
    )


MAP_BATCH = bytes.fromhex(
    "93cb3ff800000000000093"
    "88"
    + _text(b"type")
    + _text(b"BlockStored")
    + _text(b"block_hashes")
    + "92d3800000000000000102"  # the first hash as a signed number
    + _text(b"parent_block_hash")
    + "c0"
    + _text(b"token_ids")
    + "9401cd0100cce903"
    + _text(b"block_size")
    + "02"
    + _text(b"lora_id")
    + "c0"
    + _text(b"medium")
    + _text(b"GPU")
    + _text(b"lora_name")
    + "c0"
    + "83"
    + _text(b"type")
    + _text(b"BlockRemoved")
    + _text(b"block_hashes")
    + "9102"
    + _text(b"medium")
    + _text(b"GPU")
    + "81"
    + _text(b"type")
    + _text(b"AllBlocksCleared")
    + "00"
)
"""TensorRT-LLM and vLLM since mid-2026: events as maps tagged ``type``; here with signed hashes."""


def decode_one(event: Any) -> Any:
    batch = decode_batch(msgspec.msgpack.encode([0.0, [event], 0]))
    assert batch.rejected == {}
    (record,) = batch.records
    return record


def rejection(event: Any) -> str:
    batch = decode_batch(msgspec.msgpack.encode([0.0, [event, ["AllBlocksCleared"]], 0]))
    assert batch.records == [Cleared()], "the good event goes on"
    ((reason, count),) = batch.rejected.items()
    assert count == 1
    return reason


@pytest.mark.parametrize(
    ("payload", "dialect", "rank"),
    [(ARRAY_BATCH, "array", 0), (CUT_ARRAY_BATCH, "array", None), (MAP_BATCH, "map", 0)],
)
def test_byte_fixtures(payload: bytes, dialect: str, rank: int | None) -> None:
    batch = decode_batch(payload)
    stored, removed, cleared = batch.records
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.parent, stored.block_size) == ([2**63 + 1, 2], None, 2)
    assert stored.token_ids.tolist() == [1, 256, 233, 3]
    assert (stored.tier, stored.lora, stored.salt, stored.extra_keys) == (Tier.DEVICE, None, None, None)
    assert removed == Removed(hashes=[2], tier=Tier.DEVICE)
    assert cleared == Cleared()
    assert (batch.ts, batch.rank, batch.rejected, batch.dialects) == (1.5, rank, {}, {dialect: 3})


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_our_own_encodings_are_read_back(encoding: Any) -> None:
    stored = BlockStored(
        block_hashes=[2**64 - 1],
        parent_block_hash=-2,
        token_ids=[7, 8],
        block_size=2,
        lora_id=5,
        medium="CPU",
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    events = [stored, BlockRemoved(block_hashes=[-1], medium="DISK", group_idx=3), AllBlocksCleared()]
    batch = decode_batch(encode_batch(EventBatch(2.0, events, 1), encoding))
    record = batch.records[0]
    assert isinstance(record, Stored)
    assert (record.hashes, record.parent, record.lora, record.tier) == ([2**64 - 1], 2**64 - 2, 5, Tier.HOST)
    assert (record.group, record.kind) == (0, "full_attention")
    assert batch.records[1:] == [Removed(hashes=[2**64 - 1], tier=Tier.DISK, group=3), Cleared()]


@pytest.mark.parametrize("key", ["data_parallel_rank", "dp_rank"])
def test_an_envelope_may_be_a_map(key: str) -> None:
    batch = decode_batch(msgspec.msgpack.encode({"ts": 1, "events": [["AllBlocksCleared"]], key: 3}))
    assert (batch.records, batch.rank) == ([Cleared()], 3)


def test_one_stream_may_mix_dialects() -> None:
    batch = decode_batch(msgspec.msgpack.encode([0, [["AllBlocksCleared"], {"type": "AllBlocksCleared"}], None]))
    assert batch.dialects == {"array": 1, "map": 1}


def test_digests_give_their_last_eight_bytes() -> None:
    record = decode_one(["BlockRemoved", [bytes(24) + b"\x80" + bytes(6) + b"\x01"], None])
    assert record.hashes == [2**63 + 1]


def test_sglang_puts_a_map_where_vllm_has_the_adapter() -> None:
    salted = decode_one(["BlockStored", [1], None, [1], 1, None, "GPU", {"cache_salt": "s", "session_id": "x"}])
    named = decode_one(["BlockStored", [1], None, [1], 1, 9, "GPU", "adapter"])
    assert (salted.salt, salted.lora) == ("s", None)
    assert (named.salt, named.lora) == (None, "adapter")


@pytest.mark.parametrize(
    "tail",
    [
        [2, "full_attention", None],
        [[None], 2, "full_attention", 128],  # block_mm_infos before the group
        [2, "full_attention", None, "LOCAL", "engine"],
    ],
)
def test_tails_of_positional_events_differ(tail: list[Any]) -> None:
    record = decode_one(["BlockStored", [1], None, [1], 1, None, "GPU", None, None, *tail])
    assert (record.group, record.kind) == (2, "full_attention")


def test_the_salt_is_the_lone_text_of_the_first_block() -> None:
    def decode(extra_keys: Any, parent: int | None = None, lora_name: str | None = None) -> tuple[Any, Any]:
        record = decode_one(
            {
                "type": "BlockStored",
                "block_hashes": [1, 2],
                "parent_block_hash": parent,
                "token_ids": [1, 2],
                "block_size": 1,
                "extra_keys": extra_keys,
                "lora_name": lora_name,
            }
        )
        return record.salt, record.extra_keys

    assert decode([["77"], None]) == ("77", None)
    assert decode([["a", "77"], ["a"]], lora_name="a") == ("77", None)
    assert decode([None, None]) == (None, None)
    # A later block's text is not a salt: it is content, and stays with the block.
    assert decode([["image"], None], parent=9) == (None, [["image"], None])
    assert decode([[["image", 0]], None]) == (None, [[["image", 0]], None])


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "Nonsense"}, "malformed"),
        (["BlockStored", "x"], "malformed"),
        ({"type": "BlockStored", "block_hashes": [1]}, "malformed"),
        (["BlockStored", [1], None, [1, 2.5], 2, None, "GPU"], "malformed"),
        (7, "unknown_shape"),
        (None, "unknown_shape"),
        (["BlockStored", [1, 2], None, [1, 2, 3], 2, None, "GPU"], "tokens_do_not_fill_blocks"),
        (["BlockStored", [1, 1], None, [1, 2], 1, None, "GPU"], "refers_to_itself"),
        (["BlockStored", [1, 2], 2, [1, 2], 1, None, "GPU"], "refers_to_itself"),
        (["BlockStored", [], None, [], 1, None, "GPU"], "no_blocks"),
        (["BlockStored", [1], None, [1], 0, None, "GPU"], "no_blocks"),
        (["BlockStored", [1], None, [2**31], 1, None, "GPU"], "token_out_of_range"),
        (["BlockRemoved", [1], "MOON"], "unknown_medium"),
        (["BlockRemoved", [1], "GPU", 0, "REMOTE"], "not_local"),
        ({"type": "BlockRemoved", "block_hashes": [1], "locality": "ELSEWHERE"}, "not_local"),
    ],
)
def test_a_bad_event_is_counted_and_its_batch_goes_on(event: Any, reason: str) -> None:
    assert rejection(event) == reason


def test_an_event_nested_without_end_is_only_malformed() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    payload = b"\x92\x00\x91" + b"\x92" + msgspec.msgpack.encode("BlockRemoved") + deep
    with contextlib.suppress(BatchError):  # too deep to be skipped over: the envelope is as unreadable as the event
        assert decode_batch(payload).rejected == {"malformed": 1}


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("CPU", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("CPU_TIER1", Tier.HOST),
        ("CPU_TIER2", Tier.DISK),
        ("DISK", Tier.DISK),
        ("STORAGE", Tier.DISK),
    ],
)
def test_media(medium: str | None, tier: Tier) -> None:
    assert decode_one(["BlockRemoved", [1], medium]).tier is tier


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93\x00", msgspec.msgpack.encode(5), msgspec.msgpack.encode([1, 2])]
)
def test_no_batch_at_all(payload: bytes) -> None:
    with pytest.raises(BatchError):
        decode_batch(payload)


def test_chosen_hashes_cost_no_more_than_others() -> None:
    """A publisher chooses its hashes: those that share a place under a known multiplier make nothing quadratic."""
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)

    def cpu_s(factor: int) -> float:
        hashes = [(number * factor) % 2**64 for number in range(1, 20_001)]
        event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": [1] * 20_000}
        payload = msgspec.msgpack.encode([0.0, [event | {"block_size": 1}], None])
        began_s = time.process_time()
        assert len(decode_batch(payload).records) == 1
        return time.process_time() - began_s

    assert min(cpu_s(inverse) for _ in range(3)) < 20 * max(cpu_s(0xD6E8FEB86659FD93) for _ in range(3)) + 0.02
