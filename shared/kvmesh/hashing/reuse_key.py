"""The reuse key: everything that decides whether two sequences may share cached blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from kvmesh.hashing.scope import ReuseScope, v2_root
from kvmesh.hashing.tokens import TokenIds
from kvmesh.hashing.v2 import v2_block_keys

__all__ = ["MultimodalSpan", "ReuseKey"]

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class MultimodalSpan:
    """Tokens that stand for one item (an image, a clip): identity comes from its content, not from placeholder ids."""

    start: int
    """First token of the span."""
    length: int
    digest: bytes
    """32 bytes that identify the item's content."""

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 1:
            raise ValueError(f"a span needs a start >= 0 and a length >= 1, not {self.start} and {self.length}")
        if len(self.digest) != _DIGEST_BYTES:
            raise ValueError(f"an item digest has {_DIGEST_BYTES} bytes, not {len(self.digest)}")


@dataclass(frozen=True, slots=True, eq=False)
class ReuseKey:
    """Tokens (one int32 buffer), the items in them, and the scope.

    In a V2 key the first token of an item is its raw digest and the following ones are ``vocab_size + offset``.
    """

    token_ids: TokenIds
    scope: ReuseScope
    spans: tuple[MultimodalSpan, ...] = ()
    """In order, not overlapping."""
    vocab_size: int = 0
    """Needed with spans only."""

    def __post_init__(self) -> None:
        end = 0
        for span in self.spans:
            if span.start < end:
                raise ValueError("multimodal spans must be in order and must not overlap")
            end = span.start + span.length
        if end > len(self.token_ids):
            raise ValueError(f"a multimodal span ends at {end}, after the last of {len(self.token_ids)} tokens")

    def v2_block_keys(self, tokens_per_block: int, *, include_partial: bool = False) -> list[bytes]:
        """V2 keys of the blocks of the whole buffer."""
        root = v2_root(self.scope)
        if not self.spans:
            return v2_block_keys(self.token_ids, tokens_per_block, root, include_partial=include_partial)
        tokens = self.token_ids.copy()
        for span in self.spans:
            tokens[span.start : span.start + span.length] = self.vocab_size + np.arange(span.length, dtype=np.int32)
        digests = {span.start: span.digest for span in self.spans}
        keys: list[bytes] = []
        parent = root
        for begin in range(0, len(tokens), tokens_per_block):
            end = min(begin + tokens_per_block, len(tokens))
            if end - begin < tokens_per_block and not include_partial:
                break
            parent = hashlib.sha256(parent + _block_bytes(tokens, begin, end, digests)).digest()
            keys.append(parent)
        return keys


def _block_bytes(tokens: TokenIds, begin: int, end: int, digests: dict[int, bytes]) -> bytes:
    parts: list[bytes] = []
    done = begin
    for at in (at for at in digests if begin <= at < end):
        parts += (tokens[done:at].tobytes(), digests[at])
        done = at + 1
    parts.append(tokens[done:end].tobytes())
    return b"".join(parts)
