"""Snapshots: everything comes back, and damaged ones are refused without touching what is there."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.events.index import PrefixIndex, SnapshotError, Source
from kvmesh.events.records import Removed, Stored, Tier
from kvmesh.kernels import _native
from kvmesh.net.clock import ManualClock

BLOCK = 2
A, B = Source("a"), Source("b", 3)


def tokens_of(*blocks: int) -> np.ndarray:
    return np.repeat(np.array(blocks, np.int32), BLOCK)


def filled(clock: ManualClock | None = None) -> PrefixIndex:
    """Two sources: tiers, scopes, a hole, an orphan, a twin, a doubtful hash, an ignored group, something predicted."""
    index = PrefixIndex(clock=clock or ManualClock())
    index.add(A, model="m", single_group=True)
    index.add(B, model="m", tenant="t", salt="s")
    run = [1, 2, 3, 4]
    index.apply(A, [Stored(hashes=run, parent=None, token_ids=tokens_of(*run), block_size=BLOCK), Removed(hashes=[2])])
    index.apply(A, [Stored(hashes=[1, 2], parent=None, token_ids=tokens_of(1, 2), block_size=BLOCK, tier=Tier.HOST)])
    index.apply(A, [Stored(hashes=[71], parent=None, token_ids=tokens_of(1), block_size=BLOCK)])
    index.apply(
        A, [Stored(hashes=[9], parent=8, token_ids=tokens_of(9), block_size=BLOCK, lora="x"), Removed(hashes=[9])]
    )
    for number in (30, 31):
        index.apply(A, [Stored(hashes=[30], parent=None, token_ids=tokens_of(number), block_size=BLOCK)])
    index.apply(A, [Removed(hashes=[30])])
    index.apply(A, [Stored(hashes=[5], parent=None, token_ids=tokens_of(5), block_size=BLOCK, group=4, kind="mamba")])
    index.apply(B, [Stored(hashes=[1], parent=None, token_ids=tokens_of(1, 2), block_size=2 * BLOCK, lora=7)])
    index.predict(B, tokens_of(6, 7), model="m", tenant="t", block_size=BLOCK, ttl_s=5)
    index.hide(B)
    return index


def picture(index: PrefixIndex) -> object:
    """All that can be told of an index."""
    sources = index.sources()
    statistics = index.statistics()
    return (
        sources,
        [sorted(index.dump(source), key=repr) for source in sources],
        [index.digests(source) for source in sources],
        [statistics.blocks, statistics.residencies, statistics.scopes, statistics.parked_runs],
        [index.match(tokens_of(1, 2, 3, 4), model="m"), index.match(tokens_of(1, 2), model="m", tenant="t", lora=7)],
    )


@pytest.fixture(scope="module")
def whole() -> bytes:
    return b"".join(filled().snapshot({A: b"17"}))


def restored(data: bytes, cut: int = 1 << 20) -> PrefixIndex:
    index = PrefixIndex(clock=ManualClock())
    index.restore([data[at : at + cut] for at in range(0, len(data), cut)])
    return index


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_everything_comes_back_however_the_bytes_are_cut(whole: bytes, cut: int) -> None:
    assert picture(restored(whole, cut)) == picture(filled())


def test_what_comes_back_goes_on() -> None:
    """Later removals find their blocks, orphans their parents, predicted blocks their end, hidden sources come back."""
    clock, later = ManualClock(), ManualClock(start_s=1000)
    chunks = list(filled(clock).snapshot())
    index = PrefixIndex(clock=later)
    assert index.restore(chunks) == index.statistics().residencies == 9
    index.show(B)
    assert index.match(tokens_of(6, 7), model="m", tenant="t")[0].device_tokens == 2 * BLOCK
    later.advance(5)
    assert index.match(tokens_of(6, 7), model="m", tenant="t") == []
    index.apply(A, [Stored(hashes=[8], parent=None, token_ids=tokens_of(8), block_size=BLOCK, lora="x")])
    assert index.match(tokens_of(8, 9), model="m", lora="x")[0].device_tokens == BLOCK, "9 had been removed"
    index.apply(A, [Stored(hashes=[30], parent=None, token_ids=tokens_of(30), block_size=BLOCK)])
    index.apply(A, [Stored(hashes=[32], parent=30, token_ids=tokens_of(32), block_size=BLOCK)])
    assert index.match(tokens_of(30, 32), model="m")[0].device_tokens == BLOCK, "there may be two blocks of this hash"
    index.apply(
        A, [Removed(hashes=[5], group=4), Removed(hashes=[4, 3, 1, 71, 8, 30]), Removed(hashes=[2, 1], tier=Tier.HOST)]
    )
    index.apply(B, [Removed(hashes=[1])])
    statistics = index.statistics()
    assert (statistics.blocks, statistics.unknown_removals_total) == (0, 0)


def test_a_snapshot_replaces_what_is_there(whole: bytes) -> None:
    index = PrefixIndex(clock=ManualClock())
    index.add(Source("old"), model="m")
    marks: dict[Source, bytes] = {}
    index.restore([whole], marks)
    assert marks == {A: b"17"}
    assert picture(index) == picture(filled())


def test_a_smaller_index_takes_what_fits() -> None:
    index = PrefixIndex()
    index.add(A, model="m")
    run = list(range(1, 5001))
    index.apply(A, [Stored(hashes=run, parent=None, token_ids=tokens_of(*run), block_size=BLOCK)])
    smaller = PrefixIndex(max_memory_bytes=150_000)
    held = smaller.restore(index.snapshot())
    assert 500 < held < 5000
    assert smaller.memory_bytes <= 150_000
    assert smaller.match(tokens_of(*run), model="m")[0].device_tokens <= held * BLOCK
    assert smaller.digests(A) is None, "what it tells is not all there"


def test_an_index_that_changes_meanwhile_is_noticed() -> None:
    index = filled()
    chunks: Iterator[bytes] = index.snapshot()
    next(chunks)
    index.apply(A, [Removed(hashes=[1])])
    with pytest.raises(RuntimeError, match="changed"):
        list(chunks)


def refuses(data: bytes) -> None:
    index = filled()
    before = picture(index)
    with pytest.raises(SnapshotError):
        index.restore([data])
    assert picture(index) == before


def test_another_version_or_another_file_is_refused(whole: bytes) -> None:
    refuses(b"")
    refuses(b"x" * 100)
    refuses(whole[:12] + b"\x02\x00" + whole[14:])
    refuses(whole + whole)
    refuses(whole + b"\0")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_is_noticed(whole: bytes, data: st.DataObject) -> None:
    """A flipped bit or a missing end, anywhere."""
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        refuses(whole[:at])
    else:
        refuses(whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :])


def frames(data: bytes) -> list[bytes]:
    payloads, at = [], 14
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        payloads.append(data[at + 4 : at + 4 + length])
        at += 4 + length + 8
    return payloads


def framed(payloads: list[bytes]) -> bytes:
    data, checksum = b"KVMESH-INDEX\x01\x00", 0
    for payload in payloads:
        checksum = _native.xxh3_64(payload, checksum)
        data += len(payload).to_bytes(4, "little") + payload + checksum.to_bytes(8, "little")
    return data


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_contradictions_with_right_checksums_do_no_harm(whole: bytes, data: st.DataObject) -> None:
    """Whatever the parts say, it is refused or gives an index that works."""
    payloads = frames(whole)
    assert framed(payloads) == whole
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(1, len(payloads) - 1))
        payload = bytearray(payloads[which])
        if not payload:
            continue  # cut before
        match data.draw(st.sampled_from(["flip", "set", "cut", "drop", "double"])):
            case "flip":
                payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.sampled_from([0, 1, 2, 255]))
            case "cut":
                payload = payload[: data.draw(st.integers(0, len(payload)))]
            case "drop":
                payloads[which] = payloads[-1]
                continue
            case _:
                payloads.insert(which, bytes(payload))
        payloads[which] = bytes(payload)
    index = filled()
    before = picture(index)
    try:
        index.restore([framed(payloads)])
    except SnapshotError:
        assert picture(index) == before
        return
    for source in index.sources():
        index.show(source)
        list(index.dump(source))
        index.digests(source)
    index.match(tokens_of(1, 2, 3, 4), model="m")
    for source in index.sources():
        index.apply(source, [Removed(hashes=list(range(100))), Removed(hashes=list(range(100)), tier=Tier.HOST)])
        index.remove(source)
    while index.reclaim():
        pass
    assert index.statistics().blocks == index.statistics().residencies == 0
