"""The engine's view of the KV cache: opens, grows, suspends, commits and closes the caches of sequences.

Computed tokens are committed for reuse whenever a block is full, and the trailing partial block when the sequence ends.
"""

from __future__ import annotations

from kvmesh.cache.base import CacheManager
from kvmesh.cache.windows import first_live_block
from kvmesh.engine.sequence import Sequence

__all__ = ["MAX_REOPENINGS", "SequencePages"]

MAX_REOPENINGS = 4
"""Caches that are created for one sequence in one go, each without a damaged block that the one before has found."""


class SequencePages:
    """Implements :class:`kvmesh.engine.paging.Pages` over a cache manager.

    Args:
        manager: the cache of this engine.
    """

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self._layout = manager.layout
        self.tokens_per_block = manager.layout.tokens_per_block
        self.pages_needed = manager.pages_needed
        self.reservable_pages = manager.reservable_pages
        self.available_pages = manager.available_pages

    @property
    def can_suspend(self) -> bool:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        return self._manager.can_suspend

    @property
    def has_leases(self) -> bool:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        return self._manager.stats().open_leases > 0

    def owned_pages(self, seq: Sequence) -> list[int]:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        cache = seq.cache
        if cache is None or not cache.capacity:
            return [0] * len(self._layout.pools)
        return self._manager.pages_needed(history=cache.history, capacity=cache.capacity)

    def block_keys(self, seq: Sequence) -> list[bytes]:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        if len(seq.block_keys) < seq.history.length // self.tokens_per_block:
            seq.block_keys = self._manager.block_keys(seq.scope, seq.history.all())
        return seq.block_keys

    def matched(self, seq: Sequence) -> int:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        return self._manager.match(seq.scope, seq.history.all(), block_keys=self.block_keys(seq)).num_tokens

    def prefetch(self, seq: Sequence, others: list[Sequence]) -> None:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        keep = [self.block_keys(other) for other in others]
        self._manager.prefetch(seq.scope, seq.history.all(), block_keys=self.block_keys(seq), keep=keep)

    def open(self, seq: Sequence, *, match: bool = True) -> bool:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        for _ in range(MAX_REOPENINGS):
            cache = self._manager.create(
                seq.scope,
                seq.history.all(),
                seq.request_id,
                block_keys=self.block_keys(seq),
                retention=seq.retention,
                conversation_id=seq.conversation_id,
                reuse=match and not seq.probe,
                counted=not seq.probe,
                again=seq.in_statistics,
                prompt_length=seq.history.prompt_length,
                reuse_limit=self._reuse_limit(seq) if match else None,
            )
            if cache.resume():
                seq.cache = cache
                seq.num_computed = cache.num_cached_tokens
                return True
            lost = cache.lost
            cache.close()
            if not lost:
                return False
        return False

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """See :class:`~kvmesh.engine.paging.Pages`.

        The pages of a prompt that a peer computes are those that its next token attends to: its windowed groups get
        none for what the window has passed.
        """
        assert seq.cache is not None
        if num_tokens <= seq.cache.capacity:
            return True
        history = seq.history.prompt_length if seq.awaits_transfer else seq.num_computed
        # A decode takes a whole block and asks again when that is full. A chunk takes what it computes: blocks that its
        # end leaves behind a window share scratch slots, and at the end of a block more would be left behind.
        whole = self._layout.num_blocks(num_tokens) * self.tokens_per_block
        return seq.cache.resize(num_tokens if num_tokens > seq.num_computed + 1 else whole, history)

    def suspend(self, seq: Sequence) -> None:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        assert seq.cache is not None
        self._commit(seq)
        seq.cache.suspend()

    def resume(self, seq: Sequence) -> bool:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        assert seq.cache is not None
        return seq.cache.resume()

    def is_lost(self, seq: Sequence) -> bool:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        return seq.cache is not None and seq.cache.lost

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        assert seq.cache is not None
        return seq.cache.chunk_end(seq.num_computed, end)

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """``num_tokens`` more tokens have their KV in the cache; full blocks become reusable."""
        assert seq.cache is not None
        self._note_step(seq)
        before, seq.num_computed = seq.num_computed, seq.num_computed + num_tokens
        if before // self.tokens_per_block != seq.num_computed // self.tokens_per_block:
            self._commit(seq)

    def first_missing_blocks(self, seq: Sequence) -> list[int]:
        """Per layer group, the first block of the prompt that is not fully held here and must come from a peer.

        A block whose first tokens only were found here is asked for whole; one that the group's window has passed is
        not asked for.
        """
        prompt = seq.history.prompt_length
        all_blocks = self._layout.num_blocks(prompt)
        held = all_blocks if seq.num_computed >= prompt else seq.num_computed // self.tokens_per_block
        return [
            min(all_blocks, max(held, first_live_block(prompt, self.tokens_per_block, group.window)))
            for group in self._layout.groups
        ]

    def receive(self, seq: Sequence) -> None:
        """The whole prompt's KV has arrived in the sequence's pages; they become reusable."""
        assert seq.cache is not None
        self._note_step(seq)  # Where all was here already there is nothing to commit.
        seq.num_computed = max(seq.num_computed, seq.history.prompt_length)
        self._commit(seq)

    def release(self, seq: Sequence) -> None:
        """See :class:`~kvmesh.engine.paging.Pages`."""
        self._commit(seq)
        self.discard(seq)

    def discard(self, seq: Sequence) -> None:
        """Detach the cache without a further commit: what was not committed is not to be trusted, or not there yet."""
        if seq.cache is not None:
            seq.cache.close()
            seq.cache = None
        seq.num_computed = 0

    def _reuse_limit(self, seq: Sequence) -> int | None:
        """How much of the cached prefix a new cache may take; None: all."""
        if not seq.awaits_transfer:
            return None
        found = self._manager.match(seq.scope, seq.history.all(), block_keys=self.block_keys(seq))
        if found.num_tokens >= seq.history.prompt_length:
            return None
        # Only whole blocks: a copied part of a block would be in the way of the peer that sends the block whole, and
        # must not become reusable if that goes wrong.
        return found.num_full_blocks * self.tokens_per_block

    def _note_step(self, seq: Sequence) -> None:
        assert seq.cache is not None
        seq.cache.note_step()
        seq.in_statistics = True

    def _commit(self, seq: Sequence) -> None:
        # A suspended cache takes no commits, and needs none: everything was committed before.
        assert seq.cache is not None
        if seq.num_computed > seq.cache.committed:
            seq.cache.commit(seq.history.slice(seq.cache.committed, seq.num_computed))
