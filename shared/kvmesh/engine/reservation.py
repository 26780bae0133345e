"""How many pages a sequence has at most, by pool, over its life: pure arithmetic over ``pages_needed``.

With full attention that is all its tokens. A windowed group gives pages back as the sequence moves on, so its peak is a
window and a chunk, wherever in the sequence they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvmesh.cache.demand import largest_at_least_one

__all__ = ["PageNeed", "PeakPages", "fits", "longest_fitting"]


class PageNeed(Protocol):
    """``CacheManager.pages_needed``."""

    def __call__(self, *, history: int, capacity: int) -> list[int]:
        """Pages by pool of a sequence with ``history`` computed tokens and pages for ``capacity``."""
        ...


def fits(wanted: list[int], pages: list[int]) -> bool:
    """Whether every pool has as many pages as are wanted of it."""
    return all(want <= have for want, have in zip(wanted, pages, strict=True))


class PeakPages:
    """The most pages of a sequence at any one time. Answers are remembered, since queues are asked about every step.

    Args:
        pages_needed: of the cache.
        tokens_per_block: of the cache.
        max_chunk: most tokens of one prefill chunk.
    """

    REMEMBERED = 4096

    def __init__(self, pages_needed: PageNeed, tokens_per_block: int, max_chunk: int) -> None:
        self._pages_needed = pages_needed
        self._tokens_per_block = tokens_per_block
        self._max_chunk = max_chunk
        self._known: dict[tuple[int, int], list[int]] = {}

    def of_context(self, length: int) -> list[int]:
        """While the first ``length`` tokens are computed in chunks."""
        return self._peak(length, self._max_chunk)

    def to_completion(self, prompt_length: int, max_length: int) -> list[int]:
        """While a prompt is computed in chunks, and then token after token up to ``max_length``."""
        decoding = self._peak(max_length, 1)
        return [max(pair) for pair in zip(self.of_context(prompt_length), decoding, strict=True)]

    def _peak(self, length: int, chunk: int) -> list[int]:
        found = self._known.get((length, chunk))
        if found is None:
            if len(self._known) >= self.REMEMBERED:
                self._known.clear()
            found = self._known[length, chunk] = self._compute(length, chunk)
        return found

    def _compute(self, length: int, chunk: int) -> list[int]:
        everything = self._pages_needed(history=0, capacity=length)
        if everything == self._pages_needed(history=length, capacity=length):
            return everything  # No window has passed any block.
        # A step that starts one block later needs no fewer pages, as long as its chunk has the same size: the latest
        # such steps are the largest, one for each place in a block. Later steps only have smaller chunks.
        last = max(0, length - chunk)
        first = max(0, last - self._tokens_per_block + 1)
        needs = [
            self._pages_needed(history=start, capacity=min(start + chunk, length)) for start in range(first, last + 1)
        ]
        return [max(of_pool) for of_pool in zip(*needs, strict=True)]


def longest_fitting(peak: Callable[[int], list[int]], pages: list[int], max_length: int) -> int:
    """Tokens of the longest sequence, up to ``max_length``, whose ``peak`` pages an empty cache has; 0: none fits."""
    return largest_at_least_one(max_length, lambda length: fits(peak(length), pages))
