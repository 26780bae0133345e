"""The native hashing against its readable reference, hashlib and the xxhash package."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.hashing import (
    MultimodalSpan,
    ReuseKey,
    ReuseScope,
    as_token_ids,
    local_hashes,
    reference,
    sequence_hashes,
    v1_block_keys,
    v2_block_keys,
    v2_root,
)
from kvmesh.kernels import _native

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200)
BLOCK_SIZES = st.integers(1, 64)
U64 = st.integers(0, 2**64 - 1)


@pytest.fixture(params=["chosen by CPU", "portable"])
def sha256_path(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.sha256_force_portable(request.param == "portable")
    yield
    _native.sha256_force_portable(False)


def test_sha256_chain_of_every_padding_length(sha256_path: None) -> None:
    tokens = as_token_ids(range(3, 1003))
    for size in [*range(1, 70), 128, 333, 1000]:
        keys = v2_block_keys(tokens, size, bytes(range(32)), include_partial=True)
        assert keys == reference.v2_block_keys(tokens.tolist(), size, bytes(range(32)), include_partial=True)


@given(TOKENS, BLOCK_SIZES, st.binary(min_size=32, max_size=32), st.booleans())
def test_sha256_chain(tokens: list[int], size: int, parent: bytes, partial: bool) -> None:
    native = v2_block_keys(as_token_ids(tokens), size, parent, include_partial=partial)
    assert native == reference.v2_block_keys(tokens, size, parent, include_partial=partial)


@given(TOKENS, BLOCK_SIZES, U64, st.none() | U64, st.none() | U64, st.booleans())
def test_v1_chain(tokens: list[int], size: int, parent: int, lora: int | None, salt: int | None, partial: bool) -> None:
    native = v1_block_keys(as_token_ids(tokens), size, parent, lora_id=lora, salt=salt, include_partial=partial)
    expected = reference.v1_block_keys(tokens, size, parent, lora_id=lora, salt=salt, include_partial=partial)
    assert native.tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, 1337, 2**63, 2**64 - 1])
def test_xxh3_of_every_length_class(seed: int) -> None:
    data = bytes((i * 131 + (i >> 8)) & 0xFF for i in range(5000))
    for size in [*range(520), 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 4999, 5000]:
        assert _native.xxh3_64(data[:size], seed) == xxhash.xxh3_64_intdigest(data[:size], seed), size


@given(st.binary(min_size=9, max_size=128), U64)
def test_xxh3_reference(data: bytes, seed: int) -> None:
    assert reference.xxh3_64(data, seed) == xxhash.xxh3_64_intdigest(data, seed)


def test_xxh3_reference_refuses_other_lengths() -> None:
    with pytest.raises(ValueError, match="9 to 128"):
        reference.xxh3_64(b"short", 0)


@given(TOKENS, BLOCK_SIZES)
def test_local_and_sequence_hashes(tokens: list[int], size: int) -> None:
    local = local_hashes(as_token_ids(tokens), size)
    blocks = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    assert local.tolist() == [xxhash.xxh3_64_intdigest(struct.pack(f"<{size}i", *block), 1337) for block in blocks]
    assert sequence_hashes(local).tolist() == reference.sequence_hashes(local.tolist(), None, 1337)


@given(st.lists(U64, min_size=1, max_size=20), st.integers(1, 19))
def test_sequence_hashes_continue_from_a_parent(local: list[int], cut: int) -> None:
    values = np.array(local, dtype=np.uint64)
    whole = sequence_hashes(values)
    head = whole[:cut]
    tail = sequence_hashes(values[cut:], int(head[-1]))
    assert [*head.tolist(), *tail.tolist()] == whole.tolist()


def test_large_inputs_leave_the_gil_and_agree() -> None:
    tokens = as_token_ids(np.arange(100_000, dtype=np.int32))
    root = v2_root(ReuseScope())
    assert v2_block_keys(tokens, 32, root) == reference.v2_block_keys(tokens.tolist(), 32, root)
    assert len(local_hashes(tokens, 32)) == len(v1_block_keys(tokens, 32)) == 3125


@pytest.mark.parametrize(
    "tokens", [np.arange(4, dtype=np.int64), np.arange(8, dtype=np.int32)[::2], np.arange(4, dtype=np.int16)]
)
def test_only_contiguous_four_byte_tokens_are_accepted(tokens: np.ndarray) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        v2_block_keys(tokens, 2, bytes(32))


def test_wrong_arguments_are_refused() -> None:
    tokens = as_token_ids([1, 2, 3])
    with pytest.raises(ValueError, match="32 bytes"):
        v2_block_keys(tokens, 2, b"short")
    with pytest.raises(ValueError, match="positive"):
        v2_block_keys(tokens, 0, bytes(32))
    with pytest.raises(ValueError, match="positive"):
        local_hashes(tokens, 0)
    with pytest.raises(ValueError, match="positive"):
        v1_block_keys(tokens, 0)
    with pytest.raises(ValueError, match="exactly 1"):
        _native.xxh3_blocks(tokens, 2, 0, np.empty(3, dtype=np.uint64))


def test_as_token_ids() -> None:
    array = np.arange(5, dtype=np.int32)
    assert as_token_ids(array) is array
    assert as_token_ids([1, 2]).dtype == np.int32
    assert as_token_ids(array.tobytes()).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="one-dimensional"):
        as_token_ids(np.zeros((2, 2), dtype=np.int32))
    with pytest.raises(OverflowError):
        as_token_ids([2**31])


@given(TOKENS)
def test_lists_are_read_as_they_are(tokens: list[int]) -> None:
    assert as_token_ids(tokens).tolist() == tokens
    assert as_token_ids([np.int64(token) for token in tokens]).tolist() == tokens  # type: ignore[misc]
    assert local_hashes(tokens, 4).tolist() == local_hashes(np.array(tokens, np.int32), 4).tolist()


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**64, -(2**200)])
def test_numbers_beyond_32_bits_are_refused(value: int) -> None:
    with pytest.raises(OverflowError, match="32 bits"):
        as_token_ids([1, value])


@pytest.mark.parametrize("value", [1.5, "1", None, [1]])
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        as_token_ids([1, value])  # type: ignore[list-item]


class Shrinking:
    """Takes the rest of its list away while it is read."""

    def __init__(self, owner: list[object]) -> None:
        self._owner = owner

    def __index__(self) -> int:
        self._owner.clear()
        return 1


def test_a_list_that_changes_while_it_is_read_is_refused() -> None:
    tokens: list[object] = []
    tokens += [Shrinking(tokens), 2, 3]
    with pytest.raises(RuntimeError, match="changed"):
        _native.fill_int32(tokens, np.empty(3, np.int32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exactly 2"):
        _native.fill_int32([1, 2], np.empty(3, np.int32))


@given(TOKENS.filter(lambda tokens: len(tokens) > 4), BLOCK_SIZES, st.booleans())
def test_reuse_key_without_items_is_the_plain_chain(tokens: list[int], size: int, partial: bool) -> None:
    scope = ReuseScope(lora_id=3)
    key = ReuseKey(as_token_ids(tokens), scope)
    expected = reference.v2_block_keys(tokens, size, v2_root(scope), include_partial=partial)
    assert key.v2_block_keys(size, include_partial=partial) == expected


def test_reuse_key_item_across_blocks() -> None:
    digest = bytes(range(32))
    key = ReuseKey(as_token_ids([1, 0, 0, 0, 5]), ReuseScope(), (MultimodalSpan(1, 3, digest),), vocab_size=100)
    other = ReuseKey(as_token_ids([1, 0, 0, 0, 5]), ReuseScope(), (MultimodalSpan(1, 3, bytes(32)),), vocab_size=100)
    keys = key.v2_block_keys(2, include_partial=True)
    assert keys[0] == hashlib.sha256(v2_root(ReuseScope()) + struct.pack("<i", 1) + digest).digest()
    assert keys[1:] == reference.v2_block_keys([101, 102, 5], 2, keys[0], include_partial=True)
    assert not set(keys) & set(other.v2_block_keys(2, include_partial=True))


@pytest.mark.parametrize("spans", [((0, 3), (2, 1)), ((3, 3),), ((-1, 2),), ((0, 0),)])
def test_reuse_key_refuses_bad_spans(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="span"):
        ReuseKey(
            as_token_ids([1, 2, 3, 4, 5]), ReuseScope(), tuple(MultimodalSpan(at, n, bytes(32)) for at, n in spans)
        )
