"""The tokens of one sequence and the V1 keys of its blocks (semantics §4.2, ``v1_block_key``)."""

from __future__ import annotations

import numpy as np

from kvmesh.cache.v1.index import Chain
from kvmesh.hashing import V1_ROOT, ReuseScope, TokenIds, v1_block_keys

__all__ = ["KEY_BYTES", "SequenceTokens", "block_keys"]

KEY_BYTES = 8

_TOKEN_SLACK = 256
"""Room for generated tokens in the first token buffer."""


def block_keys(
    scope: ReuseScope,
    token_ids: TokenIds,
    tokens_per_block: int,
    parent_key: bytes | None = None,
    *,
    include_partial: bool = False,
) -> list[bytes]:
    """V1 keys of the blocks of ``token_ids``, 8 bytes big-endian each.

    Args:
        scope: LoRA id and salt.
        token_ids: int32.
        tokens_per_block: tokens of a full block.
        parent_key: key of the block before the first one, None at the start of a sequence.
        include_partial: whether a trailing partial block gets a key, too.
    """
    keys = v1_block_keys(
        token_ids,
        tokens_per_block,
        V1_ROOT if parent_key is None else int.from_bytes(parent_key, "big"),
        lora_id=scope.lora_id,
        salt=scope.salt,
        include_partial=include_partial,
    )
    data = keys.astype(">u8").tobytes()
    return [data[begin : begin + KEY_BYTES] for begin in range(0, len(data), KEY_BYTES)]


class SequenceTokens:
    """A growing token buffer and the keys of its leading full blocks.

    Args:
        scope: where the blocks may be reused.
        prompt: int32.
        keys: of the prompt's full blocks.
        tokens_per_block: tokens of a full block.
    """

    def __init__(self, scope: ReuseScope, prompt: TokenIds, keys: list[bytes], tokens_per_block: int) -> None:
        self.scope = scope
        self._size = tokens_per_block
        self._prompt_length = len(prompt)
        self._tokens: TokenIds = np.empty(len(prompt) + _TOKEN_SLACK, dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self._keys = keys.copy()
        """As far as they are known."""

    def write(self, begin: int, token_ids: TokenIds) -> None:
        """The tokens from position ``begin`` on."""
        end = begin + len(token_ids)
        if end <= self._prompt_length and np.array_equal(self._tokens[begin:end], token_ids):
            return
        if end > len(self._tokens):
            grown = np.empty(2 * end, dtype=np.int32)
            grown[:begin] = self._tokens[:begin]
            self._tokens = grown
        self._tokens[begin:end] = token_ids
        # Keys of these blocks may have been computed from other tokens.
        del self._keys[begin // self._size :]

    def full_blocks(self, first: int, last: int) -> Chain:
        """Blocks ``first .. last - 1``, whose tokens have all been written."""
        known = len(self._keys)
        if known < last:
            tokens = self._tokens[known * self._size : last * self._size]
            self._keys += block_keys(self.scope, tokens, self._size, self._key_before(known))
        tokens = self._tokens[first * self._size : last * self._size].reshape(-1, self._size)
        return Chain(self.scope, self._keys[first:last], tokens)

    def partial_block(self, end: int) -> Chain:
        """The partial block that ends at token ``end``."""
        full = end // self._size
        tokens = self._tokens[full * self._size : end]
        [key] = block_keys(self.scope, tokens, self._size, self._key_before(full), include_partial=True)
        return Chain(self.scope, [key], tokens.reshape(1, -1))

    def _key_before(self, block: int) -> bytes | None:
        return self.full_blocks(block - 1, block).keys[0] if block else None
