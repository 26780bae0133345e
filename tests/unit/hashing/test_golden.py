"""Byte-exact vectors of the public hash algorithms (semantics §4.2)."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.hashing import (
    MultimodalSpan,
    ReuseKey,
    ReuseScope,
    as_token_ids,
    salt_id,
    signed_wire_hash,
    v1_block_keys,
    v2_block_keys,
    v2_partial_key,
    v2_root,
    wire_hash,
    wire_hashes,
    wire_numbers,
)

A = as_token_ids([1, 2, 3, 4])
AB = as_token_ids([1, 2, 3, 4, 5, 6, 7, 8])
KEY_A = bytes.fromhex("e432228522a304ab556d66e6e40979ad05575f28b19b554264dd3c6277aaf073")
KEY_B = bytes.fromhex("756b1d258c63ccc0cbd6284ab33b043c81175086163f9d2821f5764079efb75c")
KEY_56 = bytes.fromhex("7fabfb79be197b116ecec3a823a33b6cf1597e2d2a662f43165da8d2c118116d")
SALTED = ReuseScope(salt=salt_id("tenant-a"))


def test_salt_id() -> None:
    assert salt_id("tenant-a") == 16248643848220682112


@pytest.mark.parametrize(
    ("scope", "root"),
    [
        (ReuseScope(), "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"),
        (SALTED, "ceb640ee7c220334c7d84519e6d26f378de1afb061d8427adbcd3d1891662359"),
        (ReuseScope(lora_id=7), "bf20e9c9b8addef74f91d399e9ebb5bc7778de38c127e968d34d1ba3dea17cb2"),
    ],
)
def test_v2_roots(scope: ReuseScope, root: str) -> None:
    assert v2_root(scope).hex() == root


def test_v2_chain_of_full_blocks() -> None:
    assert v2_block_keys(AB, 4, v2_root(ReuseScope())) == [KEY_A, KEY_B]


def test_v2_partial_block_is_hashed_as_just_its_tokens() -> None:
    tokens = as_token_ids([1, 2, 3, 4, 5, 6])
    assert v2_block_keys(tokens, 4, v2_root(ReuseScope())) == [KEY_A]
    assert v2_block_keys(tokens, 4, v2_root(ReuseScope()), include_partial=True) == [KEY_A, KEY_56]
    assert v2_partial_key(as_token_ids([5, 6]), KEY_A) == KEY_56


def test_v2_salted_block() -> None:
    (key,) = v2_block_keys(A, 4, v2_root(SALTED))
    assert key.hex() == "b4c950a41ade125ebdbafd8dcf8a17bbe24b891746c3a790b43ad14c26bd7cd9"


def test_v2_multimodal_block() -> None:
    # The placeholder ids do not matter: the digest and vocab_size + offset take their place (vocabulary of 32000).
    span = MultimodalSpan(start=0, length=4, digest=bytes(range(32)))
    key = ReuseKey(as_token_ids([9, 9, 9, 9]), ReuseScope(), spans=(span,), vocab_size=32000)
    assert [k.hex() for k in key.v2_block_keys(4)] == [
        "ffaa2ed424ea779d7aec3a19298c23fdab1bfadddea80cd2295c3ee48e8fafb2"
    ]


def test_v2_wire_hashes() -> None:
    assert wire_hash(KEY_A) == 16443243144690205867
    assert wire_hash(KEY_B) == 8460888372051954880
    assert signed_wire_hash(KEY_A) == -2003500929019345749
    assert wire_hashes([KEY_A, KEY_B]) == [wire_hash(KEY_A), wire_hash(KEY_B)]
    assert wire_hashes([KEY_A, KEY_B], signed=True) == [signed_wire_hash(KEY_A), signed_wire_hash(KEY_B)]
    assert wire_hashes([]) == []
    assert wire_numbers([KEY_A, KEY_B]).tolist() == wire_hashes([KEY_A, KEY_B])
    assert wire_numbers([]).tolist() == []
    assert wire_hashes([KEY_A[:8], KEY_B[:8]]) == wire_hashes([KEY_A, KEY_B]), "V1 keys have 8 bytes"


def test_v1_chain() -> None:
    assert v1_block_keys(AB, 4).tolist() == [924206229973855, 2728178455351807326]
    assert v1_block_keys(AB[4:], 4, 924206229973855).tolist() == [2728178455351807326]


def test_v1_lora_and_salt() -> None:
    assert v1_block_keys(A, 4, lora_id=7).tolist() == [1405807694910447675]
    assert v1_block_keys(A, 4, salt=salt_id("tenant-a")).tolist() == [8961321873627678067]


def test_v1_salt_enters_the_first_block_only() -> None:
    assert v1_block_keys(A, 4, 1, salt=5).tolist() == v1_block_keys(A, 4, 1).tolist()


def test_u64_truncation_of_extreme_keys() -> None:
    # Scenario T8 of semantics §7.
    assert wire_hash(b"\x80" + bytes(31)) == 2**63
    assert wire_hash(b"\xff" * 32) == 2**64 - 1
    assert signed_wire_hash(b"\xff" * 32) == -1


def test_block_keys_of_a_read_only_buffer() -> None:
    tokens = np.frombuffer(AB.tobytes(), dtype=np.int32)
    assert not tokens.flags.writeable
    assert v2_block_keys(tokens, 4, v2_root(ReuseScope())) == [KEY_A, KEY_B]
