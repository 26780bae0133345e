"""V2 block keys: SHA-256 chained over blocks, 256 bits kept, so that equal keys mean equal tokens and equal history."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.hashing.tokens import TokenIds
from kvmesh.kernels import _native

__all__ = [
    "signed_wire_hash",
    "v2_block_keys",
    "v2_partial_key",
    "wire_hash",
    "wire_hashes",
    "wire_numbers",
]

_HASH_BYTES = 8


def v2_block_keys(
    token_ids: TokenIds, tokens_per_block: int, parent: bytes, *, include_partial: bool = False
) -> list[bytes]:
    """32-byte keys of consecutive blocks: ``key[i] = SHA-256(key[i-1] || tokens of block i, 4 bytes LE each)``.

    Args:
        token_ids: int32 ``[T]``, starting at a block boundary.
        tokens_per_block: block size.
        parent: key of the block before the first one: :func:`~kvmesh.hashing.scope.v2_root` at the start.
        include_partial: also give the key of a trailing partial block (hashed as just its tokens).

    Raises:
        TypeError: the tokens are not a buffer of 4-byte integers.
        ValueError: the parent has not 32 bytes, or the block size is not positive.
    """
    return _native.sha256_chain(token_ids, tokens_per_block, parent, include_partial)


def v2_partial_key(token_ids: TokenIds, parent: bytes) -> bytes:
    """Key of one block that holds exactly ``token_ids``, full or not."""
    return hashlib.sha256(parent + token_ids.tobytes()).digest()


def wire_hash(key: bytes) -> int:
    """First 8 bytes of a V2 key, big-endian, unsigned: the hash on the event wire and of ``v2_sha256_64``."""
    return int.from_bytes(key[:8], "big")


def signed_wire_hash(key: bytes) -> int:
    """:func:`wire_hash` as a signed 64-bit number, for consumers that store int64."""
    return int.from_bytes(key[:8], "big", signed=True)


def wire_hashes(keys: Sequence[bytes], *, signed: bool = False) -> list[int]:
    """:func:`wire_hash` (or :func:`signed_wire_hash`) of many keys of one length, a multiple of 8 bytes."""
    numbers = wire_numbers(keys)
    hashes: list[int] = (numbers.view(np.int64) if signed else numbers).tolist()
    return hashes


def wire_numbers(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    """:func:`wire_hash` of many keys of one length, a multiple of 8 bytes: ``[n]``."""
    if not keys:
        return np.empty(0, np.uint64)
    words = np.frombuffer(b"".join(keys), dtype=">u8")
    return words[:: len(keys[0]) // _HASH_BYTES].astype(np.uint64)
