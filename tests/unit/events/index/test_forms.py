"""What is told as a payload, as records or as arrays is the same to the index."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.events.decoding import decode_batch
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Removed, Stored, Tier
from kvmesh.hashing import local_hashes
from kvmesh.kernels import _native

W = Source("w")
BLOCK = 2

RUNS = st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 4))
NAMES = st.fixed_dictionaries(
    {},
    optional={
        "lora_name": st.sampled_from([None, "poet", "ä"]),
        "lora_id": st.sampled_from([None, 7]),
        "cache_salt": st.sampled_from([None, "pepper"]),
        "medium": st.sampled_from([None, "GPU", "CPU", "DISK"]),
        "group_idx": st.sampled_from([None, 0, 1]),
        "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "sliding_window", "mamba"]),
    },
)


def name(chain: int, depth: int) -> int:
    return 1000 * chain + depth + 1


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    (chain, begin, length), names = draw(RUNS), draw(NAMES)
    hashes = [name(chain, depth) for depth in range(begin, begin + length)]
    if draw(st.integers(0, 3)) == 0:
        names = {key: value for key, value in names.items() if key in ("medium", "group_idx")}
        return {"type": "BlockRemoved", "block_hashes": hashes[::-1], **names}
    tokens = [100 * chain + depth for depth in range(begin, begin + length) for _ in range(BLOCK)]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": name(chain, begin - 1) if begin else None,
        "token_ids": draw(st.sampled_from([tokens, tokens, tokens, []])),
        "block_size": BLOCK,
        **names,
    }


def new_index(*, single_group: bool = False) -> PrefixIndex:
    index = PrefixIndex()
    index.add(W, model="m", single_group=single_group)
    return index


def content(index: PrefixIndex) -> Any:
    return list(index.dump(W)), index.digests(W), index.statistics()


@given(batches=st.lists(st.lists(events(), min_size=1, max_size=4), max_size=8), single_group=st.booleans())
def test_payloads_and_their_records(batches: list[list[dict[str, Any]]], single_group: bool) -> None:
    by_payload, by_records = new_index(single_group=single_group), new_index(single_group=single_group)
    for batch in batches:
        records = decode_batch(msgspec.msgpack.encode([0.0, batch])).records
        assert not isinstance(records, list), "events of engines are read natively"
        by_payload.apply(W, records)
        by_records.apply(W, list(records))
    assert content(by_payload) == content(by_records)


@given(runs=st.lists(st.tuples(st.booleans(), RUNS, st.sampled_from(Tier)), max_size=20))
def test_arrays_and_records(runs: list[tuple[bool, tuple[int, int, int], Tier]]) -> None:
    by_arrays, by_records = new_index(), new_index()
    writer = by_arrays.writer(W)
    for removed, (chain, begin, length), tier in runs:
        hashes = [name(chain, depth) for depth in range(begin, begin + length)]
        if removed:
            writer.discard(np.array(hashes, np.uint64), tier)
            by_records.apply(W, [Removed(hashes=hashes, tier=tier)])
            continue
        tokens = np.repeat(np.arange(begin, begin + length, dtype=np.int32) + 100 * chain, BLOCK)
        parent = name(chain, begin - 1) if begin else None
        writer.store(np.array(hashes, np.uint64), local_hashes(tokens, BLOCK), parent, BLOCK, tier)
        by_records.apply(W, [Stored(hashes=hashes, parent=parent, token_ids=tokens, block_size=BLOCK, tier=tier)])
    assert content(by_arrays) == content(by_records)


def test_arrays_that_do_not_fit_change_nothing() -> None:
    index = new_index()
    writer = index.writer(W)
    one, two = np.arange(1, 2, dtype=np.uint64), np.arange(1, 3, dtype=np.uint64)
    with pytest.raises(ValueError, match="2 blocks need as many hashes, not 1"):
        writer.store(one, two, None, BLOCK)
    with pytest.raises(ValueError, match="a block has"):
        writer.store(one, one, None, 0)
    with pytest.raises(ValueError, match="no tier 3"):
        writer.discard(one, 3)
    with pytest.raises(TypeError, match="8-byte"):
        writer.discard(np.zeros(1, np.int32))
    with pytest.raises(TypeError, match="takes 4 or 5 arguments"):
        writer.store(one, one)  # type: ignore[call-arg]
    with pytest.raises(KeyError):
        index.writer(Source("nobody"))
    assert index.statistics().residencies == 0


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (np.array([1.0]), TypeError),
        (np.array([1], np.int64), TypeError),
        (np.array([1], ">u8"), TypeError),
        (bytes(8), TypeError),
        (np.array(1, np.uint64), ValueError),
        (np.ones((1, 1), np.uint64), ValueError),
        (np.arange(1, 4, dtype=np.uint64)[::2], ValueError),
        (np.frombuffer(bytes(9), np.uint64, 1, 1), ValueError),
    ],
)
def test_arrays_are_of_hashes_in_a_row(array: Any, error: type[Exception]) -> None:
    """Floats, signed or foreign-endian numbers and arrays of other shapes were taken as they lay in memory."""
    index = new_index()
    writer = index.writer(W)
    one = np.arange(1, 2, dtype=np.uint64)
    for hashes, locals_ in ((array, one), (one, array)):
        with pytest.raises(error, match=r"hashes must be|not C-contiguous"):
            writer.store(hashes, locals_, None, BLOCK)
    with pytest.raises(error, match=r"hashes must be|not C-contiguous"):
        writer.discard(array)
    assert index.statistics().residencies == 0


def test_a_parent_is_any_integer() -> None:
    index = new_index()
    writer = index.writer(W)
    hashes = np.arange(1, 3, dtype=np.uint64)
    writer.store(hashes, hashes, None, BLOCK)
    writer.store(hashes + np.uint64(2), hashes, hashes[-1], BLOCK)
    assert (index.num_held(W), index.statistics().parked_runs) == (4, 0)
    with pytest.raises(TypeError, match="integer"):
        writer.store(hashes, hashes, 1.0, BLOCK)  # type: ignore[arg-type]


def test_no_blocks_are_no_run() -> None:
    """They waited for their parent, and made 0 a name of none."""
    index = new_index()
    writer = index.writer(W)
    none, one = np.array([], np.uint64), np.arange(1, 2, dtype=np.uint64)
    writer.store(none, none, 99, BLOCK)
    writer.store(none, none, 0, BLOCK)
    assert index.statistics().parked_runs == 0
    writer.store(one, one, None, BLOCK)
    writer.store(one + one, one, 0, BLOCK)
    assert (index.num_held(W), index.statistics().parked_runs) == (1, 1)


def test_a_writer_of_an_index_that_has_been_restored() -> None:
    """It wrote into what the snapshot had replaced, and said nothing."""
    index = new_index()
    writer = index.writer(W)
    one = np.arange(1, 2, dtype=np.uint64)
    writer.store(one, one, None, BLOCK)
    index.restore(list(index.snapshot()))
    with pytest.raises(RuntimeError, match="restored from a snapshot"):
        writer.store(one + one, one, None, BLOCK)
    with pytest.raises(RuntimeError, match="restored from a snapshot"):
        writer.discard(one)
    assert index.num_held(W) == 1
    index.writer(W).discard(one)
    assert index.num_held(W) == 0


class Rogue:
    """A number that takes the source away while it is read."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def __index__(self) -> int:
        self._index.remove(W)
        return 0


@pytest.mark.parametrize("kind", ["full_attention", "mamba"])
def test_a_source_that_is_removed_while_its_record_is_read(kind: str) -> None:
    index = new_index()
    group: Any = Rogue(index)
    index.apply(W, [Removed(hashes=[1], group=group)])
    index.add(W, model="m")
    tier: Any = Rogue(index)
    index.apply(W, [Removed(hashes=[1], tier=tier)])
    index.add(W, model="m")
    tokens = np.zeros(BLOCK, np.int32)
    index.apply(W, [Stored(hashes=[1], parent=None, token_ids=tokens, block_size=BLOCK, tier=tier, kind=kind)])
    assert (index.sources(), index.statistics().residencies) == ([], 0)


def test_records_keep_a_payload_that_changes() -> None:
    payload = bytearray(msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1, 2], BLOCK, None, "GPU"]], 0]))
    kit = (Stored, Removed, {"GPU": Tier.DEVICE}, lambda packed: np.frombuffer(packed, np.int32))
    read = _native.read_events(memoryview(payload), kit)
    assert read is not None
    at = payload.index(b"GPU")
    payload[at : at + 3] = b"XXX"
    assert read[2][0].tier is Tier.DEVICE


def test_a_tier_that_there_is_not() -> None:
    """It was an index into arrays of three."""
    payload = msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, [1, 2], BLOCK, None, "GPU"]], 0])
    for tier in (3, 9, 1 << 40):
        kit = (Stored, Removed, {"GPU": tier}, lambda packed: np.frombuffer(packed, np.int32))
        read = _native.read_events(payload, kit)
        assert read is not None
        assert isinstance(read[2], list), "the dialects read what has no tier"
        assert isinstance(read[2][0], bytes)


def test_a_writer_is_of_one_life_of_its_source() -> None:
    index = new_index()
    writer = index.writer(W)
    one = np.arange(1, 2, dtype=np.uint64)
    writer.store(one, one, None, BLOCK)
    index.clear(W)
    writer.store(one, one, None, BLOCK)
    assert index.num_held(W) == 1, "a cleared source goes on"
    index.remove(W)
    writer.store(one, one, None, BLOCK)
    index.add(Source("other"), model="m")
    writer.store(one, one, None, BLOCK)
    writer.discard(one)
    assert (index.num_held(Source("other")), index.statistics().residencies) == (0, 0)


def test_a_name_that_is_no_text_leaves_its_event_to_the_dialects() -> None:
    odd = (
        b"\x92\xcb"
        + bytes(8)
        + b"\x91"
        + msgspec.msgpack.encode({"type": "BlockRemoved", "block_hashes": [1], "medium": "????"}).replace(
            b"????", b"\xff\xfe\xfd\xfc"
        )
    )
    batch = decode_batch(odd)
    assert (list(batch.records), sum(batch.rejected.values())) == ([], 1)


def test_records_of_a_payload_can_be_asked_for_again() -> None:
    payload = msgspec.msgpack.encode(
        [0.0, [{"type": "BlockRemoved", "block_hashes": [1]}, {"type": "BlockRemoved", "block_hashes": [2]}]]
    )
    records = decode_batch(payload).records
    assert records == [Removed(hashes=[1]), Removed(hashes=[2])]
    assert records == decode_batch(payload).records
    assert (len(records), records[-1]) == (2, Removed(hashes=[2]))
    with pytest.raises(IndexError):
        records[2]
