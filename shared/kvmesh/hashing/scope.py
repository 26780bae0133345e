"""Who may reuse whose blocks: the reuse scope (LoRA adapter and salt) that roots a chain of block keys."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

__all__ = ["ReuseScope", "salt_id", "v2_root"]

_LORA_BIT = 1
_SALT_BIT = 2


class ReuseScope(NamedTuple):
    """Sequences share cached blocks only inside one scope."""

    lora_id: int | None = None
    salt: int | None = None
    """:func:`salt_id` of the request's ``cache_salt``."""


def salt_id(cache_salt: str) -> int:
    """The 64-bit number of a cache salt: the first 8 bytes, little-endian, of its SHA-256."""
    return int.from_bytes(hashlib.sha256(cache_salt.encode()).digest()[:8], "little")


@lru_cache(maxsize=4096)
def v2_root(scope: ReuseScope) -> bytes:
    """The 32-byte key from which the V2 chain of ``scope`` starts.

    SHA-256 of one mask byte (bit 0: LoRA present, bit 1: salt present) and each present value as 8 bytes little-endian.

    Raises:
        OverflowError: a value does not fit 64 bits or is negative.
    """
    mask = (_LORA_BIT if scope.lora_id is not None else 0) | (_SALT_BIT if scope.salt is not None else 0)
    values = (value.to_bytes(8, "little") for value in scope if value is not None)
    return hashlib.sha256(bytes([mask]) + b"".join(values)).digest()
