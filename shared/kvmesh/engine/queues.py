"""The sequences of one engine in order of service: those that compute, and those that wait."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from kvmesh.engine.sequence import Phase, Sequence

__all__ = ["Queues"]


class Queues:
    """Two lists, both sorted by rank."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        """New and recomputed sequences, which hold no pages, and suspended ones, which hold a cache."""
        self.running: list[Sequence] = []
        """Running and receiving sequences: they hold pages."""

    def enqueue(self, seq: Sequence) -> None:
        """Queue a sequence without pages."""
        seq.phase = Phase.WAITING
        bisect.insort(self.waiting, seq, key=_rank)

    def start(self, seq: Sequence) -> None:
        """Move a sequence that has pages from the queue to the running."""
        self.waiting.remove(seq)
        seq.phase = Phase.RUNNING
        bisect.insort(self.running, seq, key=_rank)

    def suspend(self, seq: Sequence) -> None:
        """Put a running sequence back into the queue, with its cache."""
        self.running.remove(seq)
        seq.phase = Phase.SUSPENDED
        bisect.insort(self.waiting, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence; unknown ones are ignored."""
        for queue in (self.waiting, self.running):
            if seq in queue:
                queue.remove(seq)

    def victim(self, claimant: Sequence) -> Sequence | None:
        """The running sequence that gives way to ``claimant``: the last in rank, never one that is served before it.

        One that is receiving gives no pages: a peer writes into them. Nor does one that sends while it is computed; to
        make up for that, everybody else gives way to it.
        """
        behind = self._behind(self.running, claimant)
        return next((seq for seq in behind if seq.phase is Phase.RUNNING and not seq.pipelined), None)

    def last_suspended(self, claimant: Sequence) -> Sequence | None:
        """The suspended sequence that is last in rank, and behind ``claimant``; see :meth:`victim`."""
        return next((seq for seq in self._behind(self.waiting, claimant) if seq.phase is Phase.SUSPENDED), None)

    @staticmethod
    def _behind(queue: list[Sequence], claimant: Sequence) -> Iterator[Sequence]:
        for seq in reversed(queue):
            if seq.rank <= claimant.rank and not claimant.pipelined:
                return
            if seq is not claimant:
                yield seq


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
