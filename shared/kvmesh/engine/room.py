"""Makes room when pages run out: who gives way, and whether its cache is kept or computed again.

The last in rank gives way, to those that are served before it only. With a colder tier it is suspended, and its pages
may leave the device. Where that frees nothing, because the colder tiers are full too, the last in rank of all suspended
sequences loses its cache; so those before it keep theirs, and there is always somebody who can go on.
"""

from __future__ import annotations

from kvmesh.engine.paging import Pages
from kvmesh.engine.plan import SchedulerPolicy, StepPlan
from kvmesh.engine.queues import Queues
from kvmesh.engine.sequence import Sequence

__all__ = ["Room"]


class Room:
    """Takes pages from sequences for the sake of others.

    Args:
        queues: who runs and who waits.
        pages: where pages come from.
        policy: whether running sequences may be made to give way.
    """

    def __init__(self, queues: Queues, pages: Pages, policy: SchedulerPolicy) -> None:
        self._queues = queues
        self._pages = pages
        self._policy = policy

    def grow(self, seq: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Make room for the first ``num_tokens`` tokens of a running sequence; False: nobody is left to give way."""
        while not self._pages.grow(seq, num_tokens):
            if not self.give_way(seq, plan):
                return False
        return True

    def give_way(self, claimant: Sequence, plan: StepPlan) -> bool:
        """Make one sequence behind ``claimant`` give way; False when there is none."""
        victim = None if self._policy == "guaranteed_no_evict" else self._queues.victim(claimant)
        if victim is not None and self._pages.can_suspend and self._suspend(victim, plan):
            return True
        last = self._queues.last_suspended(claimant)
        if last is None or (victim is not None and victim.rank > last.rank):
            last = victim
        if last is None:
            return False
        self.release(last, plan)
        return True

    def release(self, seq: Sequence, plan: StepPlan) -> None:
        """Take the cache of a running or suspended sequence; it is computed again, but for what stays cached."""
        self._queues.remove(seq)
        self._pages.release(seq)
        self._give_up_chunk(seq, plan)
        plan.preempted.append(seq)
        self._queues.enqueue(seq)

    def _suspend(self, victim: Sequence, plan: StepPlan) -> bool:
        """Suspend a running sequence; whether that has made any page available."""
        before = self._pages.available_pages()
        self._pages.suspend(victim)
        self._queues.suspend(victim)
        self._give_up_chunk(victim, plan)
        plan.suspended.append(victim)
        return any(now > then for now, then in zip(self._pages.available_pages(), before, strict=True))

    @staticmethod
    def _give_up_chunk(seq: Sequence, plan: StepPlan) -> None:
        plan.chunks = [chunk for chunk in plan.chunks if chunk.seq is not seq]
