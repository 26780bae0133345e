"""The scheduler: which sequence computes how many tokens in the next step.

Decisions are made on plain data (ranks, counts, budgets); pages are asked for through
:class:`~kvmesh.engine.paging.Pages`, whose answer "no" is a scheduling result. Order of service in one step: decodes
first (a running stream must not wait for somebody's prompt), then prompts already being computed, then those that
wait, first come first served within a priority, until the token budget is spent.
"""

from __future__ import annotations

from itertools import islice

from kvmesh.engine.admission import MAX_DEFERRED, Admission
from kvmesh.engine.credits import ContextCredits
from kvmesh.engine.paging import Pages
from kvmesh.engine.plan import Chunk, SchedulerLimits, SchedulerPolicy, StepBudget, StepPlan, chunk_length
from kvmesh.engine.queues import Queues
from kvmesh.engine.room import Room
from kvmesh.engine.sequence import Phase, Sequence

__all__ = [
    "MAX_DEFERRED",
    "Chunk",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerPolicy",
    "StepPlan",
    "chunk_length",
]


class Scheduler:
    """Queues of one engine and the plan of each step.

    Args:
        limits: bounds of one step.
        pages: where pages come from.
        lending: holds prompts back whose pages might not be fetched; None: none are.
    """

    def __init__(self, limits: SchedulerLimits, pages: Pages, lending: ContextCredits | None = None) -> None:
        self._limits = limits
        self._pages = pages
        self._credits = lending
        self._queues = Queues()
        self._room = Room(self._queues, pages, limits.policy)
        self._admission = Admission(limits, pages, self._queues, self._room, lending)

    @property
    def waiting(self) -> list[Sequence]:
        """By rank: new and recomputed sequences without pages, and suspended ones with a cache."""
        return self._queues.waiting

    @property
    def running(self) -> list[Sequence]:
        """By rank: running and receiving sequences."""
        return self._queues.running

    @property
    def num_held_back(self) -> int:
        """Context prompts that wait until prompts before them are read."""
        return 0 if self._credits is None else self._credits.num_held_back

    def held_back_for_s(self) -> float | None:
        """Seconds until one of those may begin although nobody has come; None when none is held back, or for good."""
        return None if self._credits is None else self._credits.wait_s()

    def enqueue(self, seq: Sequence) -> None:
        """Queue a new sequence at its rank."""
        self._queues.enqueue(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence; its pages are the caller's to release. Unknown sequences are ignored."""
        self._queues.remove(seq)

    def schedule(self) -> StepPlan:
        """Plan one step: allocates pages for it, makes sequences give way for it, admits others to it."""
        self._prefetch()
        plan = StepPlan()
        budget = StepBudget(self._limits.max_num_tokens, self._limits.context_kv_cap_tokens)
        self._plan_running(plan, budget)
        if not plan.gave_way:
            # Else pages are short, and a sequence from the queue would only take them from the one just put there.
            self._admission.admit(plan, budget)
        if not plan.chunks and self._is_stuck():
            self._admission.admit(plan, budget, forced=True)
        return plan

    def pause(self) -> list[Sequence]:
        """Suspend every running sequence between two steps, for :meth:`go_on`.

        Raises:
            ValueError: one is receiving, so that its pages must stay where they are.
        """
        if any(seq.phase is not Phase.RUNNING for seq in self.running):
            raise ValueError("a sequence is receiving")
        paused = list(self.running)
        for seq in paused:
            self._pages.suspend(seq)
            self._queues.suspend(seq)
        return paused

    def go_on(self, paused: list[Sequence]) -> None:
        """Resume what :meth:`pause` suspended; what does not fit now waits in the queue as a suspended sequence."""
        for seq in paused:
            if not self._pages.resume(seq):
                break
            self._queues.start(seq)

    def _plan_running(self, plan: StepPlan, budget: StepBudget) -> None:
        decodes: list[Sequence] = []
        contexts: list[Sequence] = []
        for seq in self.running:
            if seq.phase is Phase.RUNNING:
                (decodes if seq.is_decoding else contexts).append(seq)
        for sequences, plan_next in ((decodes, self._admission.plan_decode), (contexts, self._admission.plan_chunk)):
            for seq in sequences:
                if budget.tokens <= 0 or len(plan.chunks) >= self._limits.max_batch_size:
                    return
                if seq.phase is Phase.RUNNING:  # Still: it may have given way to one before it.
                    plan_next(seq, plan, budget)

    def _prefetch(self) -> None:
        wanted = self._limits.disk_prefetch_num_reqs
        if not wanted:
            return
        queued = (seq for seq in self.waiting if seq.phase is Phase.WAITING and not seq.awaits_transfer)
        first = list(islice(queued, wanted))
        for seq in first:
            if not seq.prefetched:
                seq.prefetched = True
                self._pages.prefetch(seq, [other for other in first if other is not seq])

    def _is_stuck(self) -> bool:
        """Whether nothing will change by itself although sequences wait: no transfer will bring pages or work."""
        return (
            bool(self.waiting)
            and not self._pages.has_leases
            and all(seq.phase is Phase.RUNNING for seq in self.running)
        )
