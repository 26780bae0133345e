"""The engine's view of the KV cache: opens, grows, commits and closes the caches of sequences.

Computed tokens are committed for reuse whenever a block is full, and the trailing partial block when the sequence ends.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.cache.base import CacheManager
from kvmesh.cache.pages import PageCounts
from kvmesh.engine.sequence import Sequence
from kvmesh.engine.tokens import TokenArray

__all__ = ["SequencePages"]


class SequencePages:
    """Implements :class:`kvmesh.engine.scheduler.Pages` over a :class:`KvCacheManager`.

    Args:
        manager: the cache of this engine.
    """

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._layout = manager.layout
        self.tokens_per_block = manager.layout.tokens_per_block

    def blocks_for(self, num_tokens: int) -> int:
        """See :class:`~kvmesh.engine.scheduler.Pages`."""
        return self._layout.num_blocks(num_tokens)

    def reservable_blocks(self) -> int:
        """See :class:`~kvmesh.engine.scheduler.Pages`."""
        return self._smallest(lambda counts: counts.total - counts.pinned - counts.quarantined)

    def available_blocks(self) -> int:
        """See :class:`~kvmesh.engine.scheduler.Pages`."""
        return self._smallest(lambda counts: counts.free + counts.evictable)

    def matched(self, seq: Sequence) -> int:
        """See :class:`~kvmesh.engine.scheduler.Pages`."""
        return self._manager.match(seq.scope, seq.history.all()).num_tokens

    def open(self, seq: Sequence, *, match: bool = True) -> bool:
        """See :class:`~kvmesh.engine.scheduler.Pages`."""
        cache = self._manager.create(
            seq.scope, self._offered(seq) if match else seq.history.slice(0, 1), seq.request_id
        )
        if not cache.resume():
            cache.close()
            return False
        seq.cache = cache
        seq.num_computed = cache.num_cached_tokens
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """See :class:`~kvmesh.engine.scheduler.Pages`."""
        assert seq.cache is not None
        return num_tokens <= seq.cache.capacity or seq.cache.resize(self._rounded(num_tokens), seq.num_computed)

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """``num_tokens`` more tokens have their KV in the cache; full blocks become reusable."""
        assert seq.cache is not None
        before, seq.num_computed = seq.num_computed, seq.num_computed + num_tokens
        if before // self.tokens_per_block != seq.num_computed // self.tokens_per_block:
            self._commit(seq)

    def first_missing_blocks(self, seq: Sequence) -> list[int]:
        """Per layer group, the first block of the prompt that is not fully held here and must come from a peer.

        A block whose first tokens only were found here is asked for whole.
        """
        prompt = seq.history.prompt_length
        held = self.blocks_for(prompt) if seq.num_computed >= prompt else seq.num_computed // self.tokens_per_block
        return [held] * len(self._layout.groups)

    def receive(self, seq: Sequence) -> None:
        """The whole prompt's KV has arrived in the sequence's pages; they become reusable."""
        seq.num_computed = max(seq.num_computed, seq.history.prompt_length)
        self._commit(seq)

    def release(self, seq: Sequence) -> None:
        """See :class:`~kvmesh.engine.scheduler.Pages`."""
        self._commit(seq)
        self.discard(seq)

    def discard(self, seq: Sequence) -> None:
        """Detach the cache without a further commit: what was not committed is not to be trusted, or not there yet."""
        if seq.cache is not None:
            seq.cache.close()
            seq.cache = None
        seq.num_computed = 0

    def _offered(self, seq: Sequence) -> TokenArray:
        """The tokens whose cached prefix a new cache may take."""
        tokens = seq.history.all()
        if not seq.awaits_transfer:
            return tokens
        found = self._manager.match(seq.scope, tokens)
        if found.num_tokens >= seq.history.prompt_length:
            return tokens
        # Only whole blocks: a copied part of a block would be in the way of the peer that sends the block whole, and
        # must not become reusable if that goes wrong.
        return tokens[: found.num_full_blocks * self.tokens_per_block + 1]

    def _smallest(self, pages_of: Callable[[PageCounts], int]) -> int:
        """Blocks that the scarcest pool has ``pages_of`` for."""
        pools = zip(self._manager.stats().pools, self._layout.pools, strict=True)
        return min(pages_of(counts) // len(pool.groups) for counts, pool in pools)

    def _commit(self, seq: Sequence) -> None:
        assert seq.cache is not None
        seq.cache.commit(seq.history.slice(seq.cache.committed, seq.num_computed))

    def _rounded(self, num_tokens: int) -> int:
        return self.blocks_for(num_tokens) * self.tokens_per_block
