"""XXH3 hashes for routing: a local hash per block, and rolling sequence hashes over them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmesh.hashing.tokens import TokenIds, as_token_ids
from kvmesh.kernels import _native

__all__ = ["ROUTING_SEED", "local_hashes", "sequence_hashes"]

ROUTING_SEED = 1337
"""The seed that Dynamo, SMG and Mooncake's RFC agree on."""


def local_hashes(
    token_ids: TokenIds | list[int], tokens_per_block: int, seed: int = ROUTING_SEED
) -> NDArray[np.uint64]:
    """XXH3-64 of each full block's tokens (4 bytes LE each): uint64 ``[T // tokens_per_block]``.

    Raises:
        TypeError: the tokens are neither a buffer of 4-byte integers nor a list of integers.
        ValueError: the block size is not positive.
        OverflowError: a number in a list does not fit 32 bits.
    """
    if tokens_per_block < 1:
        raise ValueError("tokens_per_block must be positive")
    if isinstance(token_ids, list):
        token_ids = as_token_ids(token_ids)
    hashes = np.empty(len(token_ids) // tokens_per_block, dtype=np.uint64)
    _native.xxh3_blocks(token_ids, tokens_per_block, seed, hashes)
    return hashes


def sequence_hashes(
    local: NDArray[np.uint64], parent: int | None = None, seed: int = ROUTING_SEED
) -> NDArray[np.uint64]:
    """Hashes of whole prefixes: ``seq[i] = XXH3-64(seq[i-1] LE || local[i] LE)``, ``seq[0] = local[0]`` at a root.

    Args:
        local: uint64 ``[N]`` from :func:`local_hashes`.
        parent: sequence hash of the block before the first one, None at the start of a sequence.
        seed: XXH3 seed.
    """
    hashes = np.empty(len(local), dtype=np.uint64)
    _native.xxh3_rolling(local, parent, seed, hashes)
    return hashes
