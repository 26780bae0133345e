"""What a publisher may choose costs its own blocks at most.

XXH3 has neither a key nor, for 16 bytes, any one-way step: whoever chooses the hash of a block's tokens chooses that of
its prefix. Local hashes can be chosen, too: for blocks of two tokens XXH3 is a bijection.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmesh.events.decoding import decode_batch
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Stored
from kvmesh.hashing import local_hashes, sequence_hashes

BLOCK = 2
W, OTHER = Source("w"), Source("other")
MASK = (1 << 64) - 1
SEED = 1337

# Of XXH3-64 for 16 bytes, a parent's prefix hash and a block's own: what the halves are masked with, and its last step.
LOW = ((0x1F67B3B7A4A44072 ^ 0x78E5C0CC4EE679CB) + SEED) & MASK
HIGH = ((0x2172FFCC7DD05A82 ^ 0x8E2443F7744608B8) - SEED) & MASK
AVALANCHE = 0x165667919E3779F9


def child(parent: int, target: int) -> int | None:
    """The local hash with which a child of ``parent`` has the prefix hash ``target``; the parent is close to LOW."""
    low = parent ^ LOW
    wanted = target ^ (target >> 32)
    wanted = (wanted * pow(AVALANCHE, -1, 1 << 64)) & MASK
    wanted ^= wanted >> 37
    wanted = (wanted - 16 - int.from_bytes(low.to_bytes(8, "little"), "big")) & MASK
    for carry in range(max(low, 1)):
        high = 0
        for bit in range(64):  # what the low bits of the product are depends on lower bits only
            if ((high + ((low * high & MASK) ^ carry)) ^ wanted) >> bit & 1:
                high |= 1 << bit
        if (low * high) >> 64 == carry and (high + ((low * high & MASK) ^ carry)) & MASK == wanted:
            return high ^ HIGH
    return None


def chosen(parent: int, target: int) -> int:
    local = child(parent, target)
    assert local is not None
    return local


def words(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & MASK


def tokens_of(local: int) -> list[int]:
    """The two tokens whose XXH3 this is: its branch for 8 bytes, backwards."""
    multiplier = pow(0x9FB21C651E98DF25, -1, 1 << 64)
    seed = SEED ^ int.from_bytes(SEED.to_bytes(4, "little"), "big") << 32
    flip = ((0x1CAD21F72C81017C ^ 0xDB979083E96DD4DE) - seed) & MASK
    value = local
    for _ in range(3):
        value = local ^ value >> 28
    value = mixed = value * multiplier & MASK
    for _ in range(3):
        value = mixed ^ ((value >> 35) + 8)
    value = value * multiplier & MASK
    pivots: dict[int, tuple[int, int]] = {}
    for bit in range(64):
        image, source = 1 << bit, 1 << bit
        image ^= rotated(image, 49) ^ rotated(image, 24)
        while image and image.bit_length() in pivots:
            known = pivots[image.bit_length()]
            image, source = image ^ known[0], source ^ known[1]
        pivots[image.bit_length()] = image, source
    before = 0
    while value:
        image, source = pivots[value.bit_length()]
        value, before = value ^ image, before ^ source
    before ^= flip
    halves = np.array([before >> 32, before & 0xFFFFFFFF], np.uint32)
    return [int(token) for token in halves.view(np.int32)]


def new_index(*sources: Source) -> PrefixIndex:
    index = PrefixIndex(1 << 26)
    for source in sources or (W,):
        index.add(source, model="m")
    return index


LOOP = LOW ^ 2
"""A prefix hash that a child of it can have again."""
REPEATING = [LOW, chosen(LOW, LOOP), *[chosen(LOOP, LOOP)] * 254]
"""Local hashes of a chain of 256 blocks with two prefix hashes."""


def test_what_is_chosen_is_what_is_hashed() -> None:
    """The arithmetic above is that of XXH3."""
    assert set(sequence_hashes(words(*REPEATING)).tolist()) == {LOW, LOOP}
    tokens = np.array([token for local in REPEATING[:3] for token in tokens_of(local)], np.int32)
    assert local_hashes(tokens, BLOCK).tolist() == REPEATING[:3]


def by_arrays(index: PrefixIndex) -> None:
    index.writer(W).store(np.arange(1, 257, dtype=np.uint64), words(*REPEATING), None, BLOCK)


def by_payload(index: PrefixIndex) -> None:
    tokens = [token for local in REPEATING for token in tokens_of(local)]
    event = ["BlockStored", list(range(1, 257)), None, tokens, BLOCK, None]
    batch = decode_batch(msgspec.msgpack.encode([0.0, [event], 0]))
    assert not batch.rejected
    index.apply(W, batch.records)


@pytest.mark.parametrize("store", [by_arrays, by_payload])
def test_a_prefix_that_repeats_itself_is_one_block(store: Callable[[PrefixIndex], None]) -> None:
    """Nodes with equal keys made snapshots that nobody could read, and lines of the table that only grew."""
    index = new_index()
    store(index)
    assert index.statistics().blocks == 2
    restored = PrefixIndex(1 << 26)
    assert restored.restore(list(index.snapshot())) == index.num_held(W) == 256
    index.writer(W).discard(np.arange(1, 257, dtype=np.uint64))
    assert (index.num_held(W), index.statistics().blocks) == (0, 0)


def test_a_chain_with_anothers_keys_does_not_hide_its_blocks() -> None:
    index = new_index(W, OTHER)
    honest = np.arange(100, 164, dtype=np.uint64)
    keys = sequence_hashes(honest)
    index.writer(W).store(
        np.arange(1, 64, dtype=np.uint64), words(LOW, chosen(LOW, int(keys[2])), *honest[3:].tolist()), None, BLOCK
    )
    writer = index.writer(OTHER)
    for number in range(5000, 5200):  # so that free places are not in a row
        writer.store(words(number), words(number), None, BLOCK)
    for number in range(5000, 5200):
        writer.discard(words(number))
    writer.store(honest, honest, None, BLOCK)
    matches = {match.instance_id: match.device_tokens for match in index.match_hashes(keys, model="m")}
    assert matches["other"] == len(honest) * BLOCK


def test_hashes_of_a_run_differ() -> None:
    """A hash that is its parent's, too, once made two blocks each other's parent, and the end of the process."""
    index = new_index()
    writer = index.writer(W)
    writer.store(words(10, 11), words(LOW, chosen(LOW, LOOP)), None, BLOCK)
    writer.discard(words(10))
    for hashes in (words(11, 12), words(13, 13), words(14, 15, 14)):
        locals_ = words(*[chosen(LOOP, LOW), 777, 778][: len(hashes)])
        with pytest.raises(ValueError, match="must differ from each other and from their parent's"):
            writer.store(hashes, locals_, 11, BLOCK)
        tokens = np.arange(len(hashes) * BLOCK, dtype=np.int32)
        with pytest.raises(ValueError, match="must differ from each other and from their parent's"):
            index.apply(W, [Stored(hashes=hashes.tolist(), parent=11, token_ids=tokens, block_size=BLOCK)])
    assert index.num_held(W) == 1
    writer.discard(words(11))
    assert index.statistics().blocks == 0


@given(
    hashes=st.lists(st.integers(0, 40) | st.integers(0, MASK), min_size=1, max_size=40),
    parent=st.none() | st.integers(0, 40),
)
def test_exactly_equal_hashes_are_refused(hashes: list[int], parent: int | None) -> None:
    index = new_index()
    locals_ = np.arange(len(hashes), dtype=np.uint64)
    if len({*hashes, *([] if parent is None else [parent])}) == len(hashes) + (parent is not None):
        index.writer(W).store(words(*hashes), locals_, parent, BLOCK)
    else:
        with pytest.raises(ValueError, match="must differ"):
            index.writer(W).store(words(*hashes), locals_, parent, BLOCK)


def parked_and_asked_s(blocks: int) -> float:
    """Processor time of digests of a source whose blocks all wait for a parent; half of them are gone."""
    index = new_index()
    hashes = np.arange(10, 10 + blocks, dtype=np.uint64)
    writer = index.writer(W)
    writer.store(hashes, hashes, 5, BLOCK)
    writer.discard(hashes[::2].copy())
    began_s = time.process_time()
    digests = index.digests(W)
    took_s = time.process_time() - began_s
    assert digests is not None
    assert [digest.num_blocks for digest in digests.values()] == [blocks // 2]
    return took_s


def test_digests_of_parked_blocks_take_linear_time() -> None:
    """Four times the blocks took sixteen times as long: of 200 000 a minute."""
    assert parked_and_asked_s(200_000) < 5
