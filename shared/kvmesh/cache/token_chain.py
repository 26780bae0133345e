"""The tokens of one sequence and the keys of its blocks, in step with each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvmesh.hashing import TokenIds

__all__ = ["HashBlocks", "TokenChain"]

HashBlocks = Callable[[TokenIds, bytes], list[bytes]]
"""Keys of consecutive full blocks: their tokens (int32, flat), and the key that the first one continues."""

_SLACK = 256
"""Room for generated tokens in the first buffer."""


class TokenChain:
    """Tokens as they were announced, then as they are computed.

    Args:
        token_ids: int32 ``[T]``, as announced.
        block_keys: keys of their leading full blocks, as far as they are known.
        tokens_per_block: tokens of a full block.
        root: the key that the first block continues.
        hash_blocks: computes keys, V1's or V2's.
    """

    def __init__(
        self,
        token_ids: TokenIds,
        block_keys: Sequence[bytes],
        tokens_per_block: int,
        *,
        root: bytes,
        hash_blocks: HashBlocks,
    ) -> None:
        self._root = root
        self._hash_blocks = hash_blocks
        self._size = tokens_per_block
        self._num_announced = len(token_ids)
        self._tokens: TokenIds = np.empty(len(token_ids) + _SLACK, dtype=np.int32)
        self._tokens[: len(token_ids)] = token_ids
        self._keys = list(block_keys)

    def write(self, begin: int, token_ids: TokenIds) -> None:
        """The tokens from ``begin`` on are ``token_ids``, whatever was announced."""
        end = begin + len(token_ids)
        if end <= self._num_announced and np.array_equal(self._tokens[begin:end], token_ids):
            return
        if end > len(self._tokens):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[:begin] = self._tokens[:begin]
            self._tokens = grown
        self._tokens[begin:end] = token_ids
        # Keys of these blocks may have been computed from other tokens.
        del self._keys[begin // self._size :]

    def tokens(self, begin: int, end: int) -> TokenIds:
        """Tokens ``begin .. end - 1`` (a view)."""
        return self._tokens[begin:end]

    def blocks(self, begin: int, end: int) -> TokenIds:
        """Tokens of the full blocks ``begin .. end - 1``: int32 ``[end - begin, tokens_per_block]`` (a view)."""
        return self._tokens[begin * self._size : end * self._size].reshape(-1, self._size)

    def keys(self, begin: int, end: int) -> list[bytes]:
        """Keys of the full blocks ``begin .. end - 1``, computed where they are not known yet."""
        known = len(self._keys)
        if known < end:
            tokens = self._tokens[known * self._size : end * self._size]
            self._keys += self._hash_blocks(tokens, self.parent_key(known))
        return self._keys[begin:end]

    def parent_key(self, block: int) -> bytes:
        """Key that ``block`` continues; the keys of the blocks before it are known."""
        return self._keys[block - 1] if block else self._root
