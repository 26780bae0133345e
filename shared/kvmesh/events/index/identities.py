"""What identifies a block beside its tokens: images and other content, mixed into the hash of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.events.records import Stored
from kvmesh.hashing import TokenIds, as_token_ids, local_hashes

__all__ = ["identities", "stored_identities"]


def identities(
    token_ids: TokenIds | list[int], block_size: int, extra_keys: Sequence[Any] | None, lookahead: int = 0
) -> NDArray[np.uint64]:
    """The local hash of each full block, with its extra keys mixed in: such blocks are equal only with equal keys.

    Args:
        token_ids: int32 ``[n]``; blocks that end less than ``lookahead`` before the end are left out.
        block_size: tokens per block.
        extra_keys: of each block, None where it is its tokens alone.
        lookahead: so many tokens after its own are part of a block's identity.

    Returns:
        uint64 ``[blocks]``.
    """
    local = _with_lookahead(as_token_ids(token_ids), block_size, lookahead)
    for i, keys in enumerate(extra_keys or ()):
        if keys is not None and i < len(local):
            local[i] = _mixed(int(local[i]), keys)
    return local


def stored_identities(record: Stored) -> NDArray[np.uint64]:
    """:func:`identities` of a stored event's blocks."""
    return identities(record.token_ids, record.block_size, record.extra_keys, record.lookahead)


def _with_lookahead(token_ids: TokenIds, block_size: int, lookahead: int) -> NDArray[np.uint64]:
    if not lookahead:
        return local_hashes(token_ids, block_size)
    if len(token_ids) < block_size + lookahead:
        return np.empty(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, block_size + lookahead)[::block_size]
    return local_hashes(np.ascontiguousarray(windows).reshape(-1), block_size + lookahead)


def _mixed(local: int, keys: Any) -> int:
    digest = blake2b(local.to_bytes(8, "little") + msgspec.msgpack.encode(keys), digest_size=8).digest()
    return int.from_bytes(digest, "little")
