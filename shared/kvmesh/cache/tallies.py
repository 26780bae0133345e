"""What sequences found in the cache and were given by it, by layer group (semantics §3.10).

A sequence counts from its first computed step on: until then its figures are its own, and vanish with it. So a sequence
that the scheduler makes, finds no room for and gives back counts once, when it really begins. Sequences that are not
to be counted keep theirs to themselves for ever. One that is made again after a release is no new prompt, and what it
finds is for the most part its own: of it counts only what is beyond the tokens that were there before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvmesh.cache.flows import PageFlows

__all__ = ["GroupTally", "SequenceTally", "Tallies", "Totals"]


class GroupTally(NamedTuple):
    """Pages of one layer group, over all sequences since the cache was made; a page is a block in the group."""

    group: int
    allocated: int = 0
    """Given to sequences; without scratch slots."""
    new: int = 0
    """Those of them that did not begin as a copy of a reused page: missed, generated, and those computed again."""
    missed: int = 0
    """New ones for blocks with prompt tokens."""
    generated: int = 0
    """New ones for blocks of generated tokens only."""
    reused_full: int = 0
    """Blocks found, whole."""
    reused_partial: int = 0
    """Blocks found for their leading tokens."""
    lookups: int = 0
    """State groups: prompts for which a state was looked for."""
    hits: int = 0
    """Those that found one."""
    misses: int = 0
    reused_tokens: int = 0
    """State groups: leading tokens that the found states stand for."""
    unreused_tokens: int = 0
    """The other tokens of those prompts."""
    aligned_hits: int = 0
    """States found at the end of a block."""
    unaligned_hits: int = 0
    """States found inside a block."""


class Totals(NamedTuple):
    """Sums over the layer groups, and tokens, by their names in :class:`kvmesh.cache.stats.CacheCounters`."""

    allocated_pages: int
    new_pages: int
    missed_blocks: int
    generated_blocks: int
    reused_full_blocks: int
    reused_partial_blocks: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int


_FIELDS = GroupTally._fields[1:]
_SUMMED = 6
"""Leading fields that attention and state groups have in common; the first ones of :class:`Totals`."""
_ALLOCATED, _NEW, _MISSED, _GENERATED, _FULL, _PARTIAL = range(_SUMMED)
_LOOKUPS = _FIELDS.index("lookups")


class Tallies:
    """The figures of one cache; its own thread is their only writer.

    Args:
        num_groups: layer groups.
        flows: where reuse is counted by level, too.
    """

    def __init__(self, num_groups: int, flows: PageFlows) -> None:
        self._rows = [[0] * len(_FIELDS) for _ in range(num_groups)]
        """By layer group, the fields of :class:`GroupTally` but the first. Plain numbers: there are few groups."""
        self._flows = flows
        self._prompt_tokens = self._cached_tokens = self._recomputed_tokens = 0

    def snapshot(self) -> tuple[GroupTally, ...]:
        """The figures by layer group."""
        return tuple(GroupTally(group, *row) for group, row in enumerate(self._rows))

    def totals(self) -> Totals:
        """Sums over the layer groups, and tokens of all sequences."""
        sums = [sum(column) for column in zip(*(row[:_SUMMED] for row in self._rows), strict=True)]
        return Totals._make([*sums, self._prompt_tokens, self._cached_tokens, self._recomputed_tokens])

    def created(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A sequence was created with ``prompt_tokens``, of which ``cached_tokens`` were found."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def created_again(self, known_tokens: int, cached_tokens: int) -> None:
        """A sequence went on from nothing but ``cached_tokens`` of the ``known_tokens`` that it had."""
        self._recomputed_tokens += known_tokens - cached_tokens

    def found(self, group: int, level: int, full: int, partial: int) -> None:
        """A prompt found blocks of an attention group on ``level``, whole and in part."""
        row = self._rows[group]
        row[_FULL] += full
        row[_PARTIAL] += partial
        self._flows.add("reused_full", level, group, full)
        if partial:
            self._flows.add("reused_partial", level, group, partial)

    def looked_up(self, group: int, prompt_tokens: int, cached_tokens: int, tokens_per_block: int) -> None:
        """A state was looked for; there is one where any token was found."""
        hit = cached_tokens > 0
        aligned = hit and cached_tokens % tokens_per_block == 0
        figures = (1, hit, not hit, cached_tokens, prompt_tokens - cached_tokens, aligned, hit and not aligned)
        row = self._rows[group]
        row[_LOOKUPS:] = [figure + more for figure, more in zip(row[_LOOKUPS:], figures, strict=True)]

    def given(self, group: int, pages: int, generated: int, again: int = False) -> None:
        """A sequence got ``pages`` new pages; of its new blocks the last ``generated`` are beyond the prompt.

        With ``again`` they are beyond what it had before its release, and it has missed nothing.
        """
        generated = min(pages, generated)
        row = self._rows[group]
        row[_ALLOCATED] += pages
        row[_NEW] += pages
        row[_GENERATED] += generated
        row[_MISSED] += 0 if again else pages - generated

    def given_one(self, group: int, copied: bool) -> None:
        """A sequence got the page of its state, or one for the copy of a block that was found in part."""
        row = self._rows[group]
        row[_ALLOCATED] += 1
        row[_NEW] += not copied


class SequenceTally:
    """What one sequence has to tell.

    Args:
        counted: False: nothing is told, ever.
        again: it was counted before, and released.
    """

    __slots__ = ("_waiting", "again", "counted")

    def __init__(self, *, counted: bool, again: bool = False) -> None:
        self.counted = counted
        self.again = again
        self._waiting: list[tuple[Callable[..., None], tuple[int, ...]]] | None = []
        """What is told with the first step; None after it."""

    def tell(self, what: Callable[..., None], *figures: int) -> None:
        """Call ``what``, mostly a method of :class:`Tallies`, with ``figures``: at once, or with the first step."""
        if self._waiting is not None:
            self._waiting.append((what, figures))
        elif self.counted:
            what(*figures)

    def count(self) -> None:
        """A step was computed: tell everything so far. Only the first call does something."""
        if self._waiting is None:
            return
        waiting, self._waiting = self._waiting, None
        if self.counted:
            for what, figures in waiting:
                what(*figures)
