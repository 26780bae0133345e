"""V1 block keys: the 64-bit mixing chain of TensorRT-LLM's first cache manager; collisions possible, routing only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmesh.hashing.tokens import TokenIds
from kvmesh.kernels import _native

__all__ = ["V1_ROOT", "v1_block_keys"]

V1_ROOT = 0
"""Parent of a first block; the salt is mixed into blocks with this parent only."""


def v1_block_keys(
    token_ids: TokenIds,
    tokens_per_block: int,
    parent: int = V1_ROOT,
    *,
    lora_id: int | None = None,
    salt: int | None = None,
    include_partial: bool = False,
) -> NDArray[np.uint64]:
    """Chained 64-bit keys, uint64 ``[blocks]``, of the blocks of ``token_ids`` (int32 ``[T]``).

    Raises:
        TypeError: the tokens are not a buffer of 4-byte integers.
        ValueError: the block size is not positive.
        OverflowError: a LoRA id or salt does not fit 64 bits.
    """
    if tokens_per_block < 1:
        raise ValueError("tokens_per_block must be positive")
    count = len(token_ids) // tokens_per_block
    if include_partial and len(token_ids) % tokens_per_block:
        count += 1
    keys = np.empty(count, dtype=np.uint64)
    _native.v1_block_keys(token_ids, tokens_per_block, parent, lora_id, salt, include_partial, keys)
    return keys
