"""The rules of every block key in plain Python: the readable specification that the native code is tested against.

Nothing in the product calls these; they take any sequence of ints and are a hundred times slower.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence

__all__ = ["sequence_hashes", "v1_block_keys", "v2_block_keys", "xxh3_64"]

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def v2_block_keys(
    tokens: Sequence[int], tokens_per_block: int, parent: bytes, *, include_partial: bool = False
) -> list[bytes]:
    """``key[i] = SHA-256(key[i-1] || tokens of block i as 4 bytes little-endian each)``."""
    keys: list[bytes] = []
    for block in _blocks(tokens, tokens_per_block, include_partial=include_partial):
        parent = hashlib.sha256(parent + struct.pack(f"<{len(block)}i", *block)).digest()
        keys.append(parent)
    return keys


def v1_block_keys(
    tokens: Sequence[int],
    tokens_per_block: int,
    parent: int = 0,
    *,
    lora_id: int | None = None,
    salt: int | None = None,
    include_partial: bool = False,
) -> list[int]:
    """64-bit keys, all arithmetic wrapping; the salt enters blocks without a parent only."""
    keys: list[int] = []
    for block in _blocks(tokens, tokens_per_block, include_partial=include_partial):
        key = len(block) ^ (parent * 0xBF58476D1CE4E5B9 & _MASK64)
        if parent == 0 and salt is not None:
            key = _v1_mix64(key, salt)
        for token in block:
            key = _v1_mix32(key, token)
        if lora_id is not None:
            key = _v1_mix64(key, lora_id)
        keys.append(key)
        parent = key
    return keys


def sequence_hashes(local: Sequence[int], parent: int | None, seed: int) -> list[int]:
    """``seq[i] = XXH3-64(seq[i-1] || local[i])``; ``seq[0] = local[0]`` without a parent."""
    hashes: list[int] = []
    for value in local:
        parent = value if parent is None else xxh3_64(struct.pack("<QQ", parent, value), seed)
        hashes.append(parent)
    return hashes


def xxh3_64(data: bytes, seed: int) -> int:
    """XXH3-64 of 9 to 128 bytes: all that token blocks of 4 to 32 tokens and rolling pairs need.

    Raises:
        ValueError: the input has another length.
    """
    size = len(data)
    if 9 <= size <= 16:
        low = _read64(data, 0) ^ ((_read64(_SECRET, 24) ^ _read64(_SECRET, 32)) + seed & _MASK64)
        high = _read64(data, size - 8) ^ ((_read64(_SECRET, 40) ^ _read64(_SECRET, 48)) - seed & _MASK64)
        swapped = int.from_bytes(low.to_bytes(8, "little"), "big")
        return _avalanche(size + swapped + high + _fold(low, high))
    if 17 <= size <= 128:
        total = size * 0x9E3779B185EBCA87
        for pair in range((size - 1) // 32 + 1):
            total += _mix16(data, 16 * pair, 32 * pair, seed)
            total += _mix16(data, size - 16 * (pair + 1), 32 * pair + 16, seed)
        return _avalanche(total)
    raise ValueError(f"the reference covers 9 to 128 bytes, not {size}")


def _blocks(tokens: Sequence[int], size: int, *, include_partial: bool) -> Iterator[Sequence[int]]:
    for begin in range(0, len(tokens), size):
        block = tokens[begin : begin + size]
        if len(block) == size or include_partial:
            yield block


def _v1_mix32(key: int, token: int) -> int:
    value = token & _MASK32
    value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK32
    value = ((value >> 16) ^ value) * 0x45D9F3B & _MASK32
    value = ((value >> 16) ^ value) + 0x9E3779B9 & _MASK32
    return key ^ (value + (key << 6) + (key >> 2) & _MASK64)


def _v1_mix64(key: int, value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    value ^= value >> 31
    return key ^ (value + 0x9E3779B9 + (key << 6) + (key >> 2) & _MASK64)


def _read64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product & _MASK64) ^ (product >> 64)


def _avalanche(value: int) -> int:
    value &= _MASK64
    value = (value ^ (value >> 37)) * 0x165667919E3779F9 & _MASK64
    return value ^ (value >> 32)


def _mix16(data: bytes, at: int, secret_at: int, seed: int) -> int:
    low = _read64(data, at) ^ (_read64(_SECRET, secret_at) + seed & _MASK64)
    high = _read64(data, at + 8) ^ (_read64(_SECRET, secret_at + 8) - seed & _MASK64)
    return _fold(low, high)


# The first 128 bytes of XXH3's published default secret.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
)
