"""Admission credits: how much of its cache a page owner lends to prompts that are finished and not yet read.

Without a bound, a generation server that never fetches would fill the context server with its prompts, and everybody
else would wait for their timeout. Up to a share of each pool prompts start as they come. Beyond it one starts at a
time: the next when somebody has come for the last, or, if nobody does, after a time in which such prompts cannot fill
what is left of the pool before the first of them times out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from kvmesh.engine.paging import Pages
from kvmesh.engine.sequence import Phase, Sequence
from kvmesh.net.clock import Clock

__all__ = ["ContextCredits", "lent_share", "patience_s"]


@dataclass(slots=True)
class _Overdrawn:
    """The last prompt that began beyond the share."""

    seq: Sequence
    part: float
    """Of the fullest pool, that its own pages take."""
    finished_s: float | None = None


def lent_share(totals: Many[int], left: Many[int], under_way: Iterable[Many[int]]) -> float:
    """Part of the fullest pool that is lent, or will be.

    Args:
        totals: pages by pool.
        left: pages by pool that transfers do not hold.
        under_way: by prompt that is being computed, the pages by pool that it adds.
    """
    lent = [total - rest for total, rest in zip(totals, left, strict=True)]
    for pages in under_way:
        lent = [one + more for one, more in zip(lent, pages, strict=True)]
    return max((one / total for one, total in zip(lent, totals, strict=True) if total), default=0.0)


def patience_s(part: float, share: float, timeout_s: float) -> float:
    """How long the next prompt waits after one that took ``part`` of a pool and that nobody comes for.

    At that rate such prompts fill what the share leaves in ``timeout_s``, when the first of them is given up.
    """
    if part == 0:
        return 0.0
    return float("inf") if share >= 1 else timeout_s * part / (1 - share)


class ContextCredits:
    """Says which context prompts may begin; driven by the scheduler, single-threaded.

    Args:
        share: of each pool that may be lent without restriction, above 0 and at most 1.
        totals: pages by pool now; asked once a pass over the queue, between which memory may move between pools.
        pages: where pages come from.
        timeout_s: after which a transfer that nobody asks for is given up.
        is_unread: whether the transfer of this id is open and nobody has come for it.
        clock: for the waits.
    """

    def __init__(
        self,
        share: float,
        totals: Callable[[], Many[int]],
        pages: Pages,
        timeout_s: float,
        is_unread: Callable[[int], bool],
        clock: Clock,
    ) -> None:
        self._share = share
        self._read_totals = totals
        self._totals = totals()
        self._pages = pages
        self._timeout_s = timeout_s
        self._is_unread = is_unread
        self._clock = clock
        self._overdrawn: _Overdrawn | None = None
        self._again_s: float | None = None
        self.num_held_back = 0
        """Prompts that the last pass over the queue has held back."""

    @staticmethod
    def concerns(seq: Sequence) -> bool:
        """Whether a sequence is a prompt whose reader is not known yet."""
        return seq.kind == "context" and not seq.generation_first and seq.phase is Phase.WAITING

    def begin_pass(self) -> None:
        """The queue is looked through from its start."""
        self.num_held_back = 0
        self._again_s = None
        self._totals = self._read_totals()

    def permits(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether a prompt may begin beside those that run."""
        has_begun = self._overdrawn is not None and self._overdrawn.seq is seq  # and gave way since
        if has_begun or self._lent(running) < self._share or self._settled():
            return True
        self.num_held_back += 1
        return False

    def began(self, seq: Sequence, running: Iterable[Sequence]) -> None:
        """A prompt has begun; whether it is among ``running`` already does not matter."""
        others = [other for other in running if other is not seq]
        if self._lent(others) >= self._share:
            part = lent_share(self._totals, self._totals, [self._adds(seq)])
            self._overdrawn = _Overdrawn(seq, part)

    def wait_s(self) -> float | None:
        """Seconds until a prompt that was held back may begin although nobody has come; None when there is none."""
        return None if self._again_s is None else max(0.0, self._again_s - self._clock.monotonic_s())

    def _lent(self, running: Iterable[Sequence]) -> float:
        under_way = (self._adds(seq) for seq in running if seq.kind == "context" and not seq.generation_first)
        return lent_share(self._totals, self._pages.reservable_pages(), under_way)

    def _adds(self, seq: Sequence) -> list[int]:
        """Pages by pool that a prompt takes beside those that it found."""
        all_pages = self._pages.pages_needed(history=0, capacity=seq.history.prompt_length)
        found = self._pages.pages_needed(history=0, capacity=seq.num_cached) if seq.num_cached else [0] * len(all_pages)
        return [max(0, one - other) for one, other in zip(all_pages, found, strict=True)]

    def _settled(self) -> bool:
        """Whether the last prompt beyond the share has been asked for, is over, or was waited for long enough."""
        last = self._overdrawn
        if last is None:
            return True
        if last.seq.phase is not Phase.FINISHED:
            return False
        now_s = self._clock.monotonic_s()
        if last.finished_s is None:
            last.finished_s = now_s
        until_s = last.finished_s + patience_s(last.part, self._share, self._timeout_s)
        if not self._is_unread(last.seq.transfer_id) or now_s >= until_s:
            self._overdrawn = None
            return True
        if until_s < float("inf"):
            self._again_s = until_s
        return False
