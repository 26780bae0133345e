"""The tokens of one sequence and the V1 keys of its blocks (semantics §4.2, ``v1_block_key``)."""

from __future__ import annotations

from kvmesh.cache.token_chain import TokenChain
from kvmesh.cache.v1.index import Chain
from kvmesh.hashing import V1_ROOT, ReuseScope, TokenIds, v1_block_keys

__all__ = ["KEY_BYTES", "SequenceTokens", "block_keys"]

KEY_BYTES = 8

_ROOT = V1_ROOT.to_bytes(KEY_BYTES, "big")
"""What the first block of every sequence continues."""


def block_keys(
    scope: ReuseScope,
    token_ids: TokenIds,
    tokens_per_block: int,
    parent_key: bytes = _ROOT,
    *,
    include_partial: bool = False,
) -> list[bytes]:
    """V1 keys of the blocks of ``token_ids``, 8 bytes big-endian each.

    Args:
        scope: LoRA id and salt.
        token_ids: int32.
        tokens_per_block: tokens of a full block.
        parent_key: key of the block before the first one; left out at the start of a sequence.
        include_partial: whether a trailing partial block gets a key, too.
    """
    keys = v1_block_keys(
        token_ids,
        tokens_per_block,
        int.from_bytes(parent_key, "big"),
        lora_id=scope.lora_id,
        salt=scope.salt,
        include_partial=include_partial,
    )
    data = keys.astype(">u8").tobytes()
    return [data[begin : begin + KEY_BYTES] for begin in range(0, len(data), KEY_BYTES)]


class SequenceTokens:
    """The tokens of one sequence, as chains of blocks that the index takes.

    Args:
        scope: where the blocks may be reused.
        prompt: int32.
        keys: of the prompt's full blocks.
        tokens_per_block: tokens of a full block.
    """

    def __init__(self, scope: ReuseScope, prompt: TokenIds, keys: list[bytes], tokens_per_block: int) -> None:
        self.scope = scope
        self._size = tokens_per_block
        self._chain = TokenChain(
            prompt,
            keys,
            tokens_per_block,
            root=_ROOT,
            hash_blocks=lambda tokens, parent: block_keys(scope, tokens, tokens_per_block, parent),
        )

    def write(self, begin: int, token_ids: TokenIds) -> None:
        """The tokens from ``begin`` on are ``token_ids``, whatever was announced."""
        self._chain.write(begin, token_ids)

    def full_blocks(self, first: int, last: int) -> Chain:
        """Blocks ``first .. last - 1``, whose tokens have all been written."""
        return Chain(self.scope, self._chain.keys(first, last), self._chain.blocks(first, last))

    def partial_block(self, end: int) -> Chain:
        """The partial block that ends at token ``end``."""
        full = end // self._size
        tokens = self._chain.tokens(full * self._size, end)
        self._chain.keys(0, full)
        parent = self._chain.parent_key(full)
        [key] = block_keys(self.scope, tokens, self._size, parent, include_partial=True)
        return Chain(self.scope, [key], tokens.reshape(1, -1))
