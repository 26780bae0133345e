"""What the scheduler asks of the KV cache: pages for sequences, by pool. The interface, without behaviour."""

from __future__ import annotations

from typing import Protocol

from kvmesh.engine.sequence import Sequence

__all__ = ["Pages"]


class Pages(Protocol):
    """The page side of scheduling. Every answer is about now; "no" changes nothing. Lists are by pool."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one page."""
        ...

    @property
    def can_suspend(self) -> bool:
        """Whether the pages of a suspended sequence can leave the device."""
        ...

    @property
    def has_leases(self) -> bool:
        """Whether transfers hold pages: more will be free once they end."""
        ...

    def pages_needed(self, *, history: int, capacity: int) -> list[int]:
        """Pages of a sequence with ``history`` computed tokens and pages for ``capacity``."""
        ...

    def reservable_pages(self) -> list[int]:
        """Pages that sequences can own in all: the pool without what transfers still hold."""
        ...

    def available_pages(self) -> list[int]:
        """Pages that can be had now: free ones and those that eviction or offload can free."""
        ...

    def owned_pages(self, seq: Sequence) -> list[int]:
        """Pages that the sequence has now, shared ones included."""
        ...

    def open(self, seq: Sequence, *, match: bool = True) -> bool:
        """Attach a cache, reusing the longest known prefix unless ``match`` is False; sets ``num_computed``."""
        ...

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for the first ``num_tokens`` tokens."""
        ...

    def suspend(self, seq: Sequence) -> None:
        """Commit what is computed and let the pages leave the device; the cache stays attached."""
        ...

    def resume(self, seq: Sequence) -> bool:
        """Bring the pages of a suspended sequence back to the device."""
        ...

    def is_lost(self, seq: Sequence) -> bool:
        """Whether a suspended sequence can never be resumed: a page was damaged in a cold tier."""
        ...

    def release(self, seq: Sequence) -> None:
        """Commit what is computed for reuse and detach the cache; ``num_computed`` becomes 0."""
        ...

    def discard(self, seq: Sequence) -> None:
        """Detach the cache without a further commit; ``num_computed`` becomes 0."""
        ...

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Where the next prefill chunk, which may go up to ``end``, has to stop: behind its start."""
        ...

    def block_keys(self, seq: Sequence) -> list[bytes]:
        """Keys of the full blocks of all known tokens, each made from its tokens and all before."""
        ...

    def matched(self, seq: Sequence) -> int:
        """Tokens that :meth:`open` would reuse now, without side effects."""
        ...

    def prefetch(self, seq: Sequence, others: list[Sequence]) -> None:
        """Bring the cached beginning of a queued prompt up from the slowest tier, but not at the cost of ``others``."""
        ...
