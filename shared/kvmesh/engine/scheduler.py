"""The scheduler: which sequence computes how many tokens in the next step.

Decisions are made on plain data (ranks, counts, budgets); pages are asked for through :class:`Pages`, whose answer "no"
is a scheduling result. Order of service in one step: decodes first (a running stream must not wait for somebody's
prompt), then prompts already being computed, then new ones, first come first served within a priority, until the token
budget is spent.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np

from kvmesh.engine.sequence import Phase, Sequence

__all__ = [
    "Chunk",
    "Pages",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerPolicy",
    "StepPlan",
    "chunk_length",
    "pick_victim",
]

SchedulerPolicy = Literal["guaranteed_no_evict", "max_utilization"]

MAX_DEFERRED = 32
"""Sequences that one step may pass over because their prefix is being computed; bounds the comparing of prompts."""


class Pages(Protocol):
    """The page side of scheduling. Every answer is about now; "no" changes nothing."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens in one page."""
        ...

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens occupy."""
        ...

    def reservable_blocks(self) -> int:
        """Pages that sequences can own in all: the pool without what outgoing transfers still hold."""
        ...

    def available_blocks(self) -> int:
        """Pages that can be had now: free ones and those that only the reuse tree keeps."""
        ...

    def open(self, seq: Sequence, *, match: bool = True) -> bool:
        """Attach a cache, reusing the longest known prefix unless ``match`` is False; sets ``num_computed``."""
        ...

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for the first ``num_tokens`` tokens."""
        ...

    def release(self, seq: Sequence) -> None:
        """Commit what is computed for reuse and detach the cache; ``num_computed`` becomes 0."""
        ...

    def matched(self, seq: Sequence) -> int:
        """Tokens that :meth:`open` would reuse now, without side effects."""
        ...


class SchedulerLimits(NamedTuple):
    """Bounds of one step and of the queue."""

    max_batch_size: int
    """Sequences in one step."""
    max_num_tokens: int
    """Tokens in one step: the budget that decodes and prefill chunks share."""
    chunked_prefill: bool = True
    policy: SchedulerPolicy = "max_utilization"


class Chunk(NamedTuple):
    """Tokens ``start .. start + length`` of a sequence, computed in this step."""

    seq: Sequence
    start: int
    length: int
    sample: bool
    """Whether the chunk ends at the newest token, so that its logits choose the next one."""


@dataclass(slots=True)
class StepPlan:
    """What the next step computes, and what had to give way."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    receiving: list[Sequence] = field(default_factory=list)
    """Admitted sequences whose prompt's pages are allocated and must now be fetched."""
    blocked: bool = False
    """Somebody could have computed but for want of pages."""


def chunk_length(pending: int, budget: int, limits: SchedulerLimits) -> int:
    """Tokens of a ``pending`` context to compute with ``budget`` tokens left in this step; 0 means not now.

    Without chunked prefill a context goes whole or waits for a step of its own; only a recomputed context longer than
    a whole step's budget (its prompt did fit) is still split.
    """
    if limits.chunked_prefill or pending > limits.max_num_tokens:
        return min(pending, budget)
    return pending if pending <= budget else 0


def pick_victim(running: list[Sequence], claimant: Sequence) -> Sequence | None:
    """Who gives up its pages for ``claimant``: the last in rank, and never one that is served before the claimant."""
    for candidate in reversed(running):
        if candidate.rank <= claimant.rank:
            return None
        if candidate.phase is Phase.RUNNING:
            return candidate
    return None


class Scheduler:
    """Queues of one engine and the plan of each step.

    Args:
        limits: bounds of one step.
        pages: where pages come from.
    """

    def __init__(self, limits: SchedulerLimits, pages: Pages) -> None:
        self._limits = limits
        self._pages = pages
        self.waiting: list[Sequence] = []
        """Sorted by rank; holds no pages."""
        self.running: list[Sequence] = []
        """Sorted by rank; holds pages."""

    def enqueue(self, seq: Sequence) -> None:
        """Queue a new or preempted sequence at its rank."""
        seq.phase = Phase.WAITING
        bisect.insort(self.waiting, seq, key=_rank)

    def start(self, seq: Sequence) -> None:
        """Put a sequence that already has its pages (a received one) among the running."""
        seq.phase = Phase.RUNNING
        bisect.insort(self.running, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence; its pages are the caller's to release. Unknown sequences are ignored."""
        for queue in (self.waiting, self.running):
            if seq in queue:
                queue.remove(seq)

    def schedule(self) -> StepPlan:
        """Plan one step: allocates pages for it, preempts for it, admits new sequences to it."""
        plan = StepPlan()
        budget = self._plan_running(plan, self._limits.max_num_tokens, decoding=True)
        budget = self._plan_running(plan, budget, decoding=False)
        self._admit(plan, budget)
        return plan

    def _plan_running(self, plan: StepPlan, budget: int, *, decoding: bool) -> int:
        # A copy: preemption removes from the list, always behind the sequence being planned.
        for seq in list(self.running):
            if budget <= 0 or len(plan.chunks) >= self._limits.max_batch_size:
                break
            if seq.phase is not Phase.RUNNING or seq.is_decoding is not decoding:
                continue
            length = chunk_length(seq.num_pending, budget, self._limits)
            if length == 0:
                continue
            if not self._make_room(seq, seq.num_computed + length, plan):
                plan.blocked = True
                continue
            budget -= self._add_chunk(plan, seq, length)
        return budget

    def _make_room(self, seq: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        while not self._pages.grow(seq, num_tokens):
            if self._limits.policy == "guaranteed_no_evict":
                return False
            victim = pick_victim(self.running, seq)
            if victim is None:
                return False
            self._preempt(victim, plan)
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        self.running.remove(victim)
        self._pages.release(victim)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.seq is not victim]
        plan.preempted.append(victim)
        self.enqueue(victim)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        if plan.preempted:
            return  # Pages are short: a new sequence would only take them from the one that was just put back.
        limit = self._limits.max_batch_size
        # Receivers have seats of their own, so that transfers overlap with a full batch of decodes; a received sequence
        # then waits among the running for a place in the step.
        receiver_seats = 2 * limit - len(self.running)
        seats = limit - sum(other.phase is Phase.RUNNING for other in self.running)
        deferred = 0
        for seq in list(self.waiting):
            if seq.awaits_transfer:
                if receiver_seats <= 0:
                    continue
                admitted = self._admit_receiver(seq, plan)
            elif budget <= 0 or seats <= 0 or len(plan.chunks) >= limit:
                if receiver_seats <= 0:
                    return
                continue
            elif self._shares_unfinished_prefix(seq):
                deferred += 1
                if deferred == MAX_DEFERRED:
                    return
                continue
            else:
                length = self._admit_first_chunk(seq, budget, plan)
                budget -= length
                seats -= 1
                admitted = length > 0
            if not admitted:
                plan.blocked = True
                return
            receiver_seats -= 1

    def _admit_receiver(self, seq: Sequence, plan: StepPlan) -> bool:
        if not self._can_reserve(seq) or not self._open(seq):
            return False
        if not self._pages.grow(seq, seq.history.prompt_length):
            self._pages.release(seq)
            return False
        self.waiting.remove(seq)
        self.start(seq)
        seq.phase = Phase.RECEIVING
        plan.admitted.append(seq)
        plan.receiving.append(seq)
        return True

    def _admit_first_chunk(self, seq: Sequence, budget: int, plan: StepPlan) -> int:
        # One page more for each that runs already: without it, the next block boundary would put this one back.
        wanted = self._pages.blocks_for(seq.history.length) + len(self.running)
        if self.running and wanted > self._pages.available_blocks():
            return 0
        if not self._can_reserve(seq) or not self._open(seq):
            return 0
        length = chunk_length(seq.num_pending, budget, self._limits)
        if length == 0 or not self._pages.grow(seq, seq.num_computed + length):
            self._pages.release(seq)
            return 0
        self.waiting.remove(seq)
        self.start(seq)
        plan.admitted.append(seq)
        return self._add_chunk(plan, seq, length)

    def _open(self, seq: Sequence) -> bool:
        if self._pages.open(seq):
            return True
        # Reuse itself can need more pages than there are (a shared page and its private copy at once). When nobody else
        # holds any, waiting would be for ever: start without reuse.
        return not self.running and self._pages.open(seq, match=False)

    def _can_reserve(self, seq: Sequence) -> bool:
        if self._limits.policy != "guaranteed_no_evict":
            return True
        reserved = sum(self._pages.blocks_for(other.max_cached_length) for other in self.running)
        wanted = self._pages.blocks_for(seq.max_cached_length)
        return reserved + wanted <= self._pages.reservable_blocks()

    def _shares_unfinished_prefix(self, seq: Sequence) -> bool:
        """Whether a running sequence is computing a prefix that this one would otherwise compute again.

        Waiting a few steps for it saves a whole prefill (``n`` choices of one prompt, a burst behind one preamble).
        """
        size = self._pages.tokens_per_block
        mine = seq.history.all()
        best = 0
        for other in self.running:
            if other.is_decoding or other.scope != seq.scope or other.phase is not Phase.RUNNING:
                continue
            theirs = other.history.all()
            common = min(mine.size, theirs.size)
            differs = np.flatnonzero(mine[:common] != theirs[:common])
            shared = int(differs[0]) if differs.size else common
            best = max(best, shared // size * size)
        return best > 0 and best >= self._pages.matched(seq) + size

    @staticmethod
    def _add_chunk(plan: StepPlan, seq: Sequence, length: int) -> int:
        plan.chunks.append(Chunk(seq, seq.num_computed, length, sample=length == seq.num_pending))
        return length


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
