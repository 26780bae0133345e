"""Who comes from the queue into a step: suspended sequences, prompts to be received, and first chunks of new prompts.

The queue is served in order of rank. The first that gets no pages ends it, so that nobody is overtaken for want of
pages; passed over are only those that wait for a seat, for tokens of the step's budget, for a prefix that another
sequence is computing, or for the readers of prompts before them.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.engine.credits import ContextCredits
from kvmesh.engine.paging import Pages
from kvmesh.engine.plan import Chunk, SchedulerLimits, StepBudget, StepPlan, chunk_length
from kvmesh.engine.prefixes import UnfinishedPrefixes
from kvmesh.engine.queues import Queues
from kvmesh.engine.reservation import PeakPages, fits
from kvmesh.engine.room import Room
from kvmesh.engine.sequence import Phase, Sequence

__all__ = ["MAX_DEFERRED", "Admission"]

MAX_DEFERRED = 32
"""Sequences that one step may pass over because their prefix is being computed; bounds the looking up of prompts."""


class Admission:
    """Gives pages and chunks to sequences from the queue, and chunks to running ones.

    Args:
        limits: bounds of one step.
        pages: where pages come from.
        queues: who runs and who waits.
        room: makes others give way.
        lending: holds prompts back whose pages might not be fetched; None: none are.
    """

    def __init__(
        self, limits: SchedulerLimits, pages: Pages, queues: Queues, room: Room, lending: ContextCredits | None = None
    ) -> None:
        self._limits = limits
        self._pages = pages
        self._queues = queues
        self._room = room
        self._credits = lending
        self._peak = PeakPages(pages.pages_needed, pages.tokens_per_block, limits.max_num_tokens)
        self._block = pages.pages_needed(history=0, capacity=1)
        self._refusal: tuple[int, list[int]] | None = None
        """Arrival of the sequence that got no pages last, and what was available then."""

    def plan_decode(self, seq: Sequence, plan: StepPlan, budget: StepBudget) -> bool:
        """Give a running sequence its next token, if there is a page for it."""
        start = seq.num_computed
        if not self._room.grow(seq, start + 1, plan):
            plan.refused.append(seq)
            return False
        budget.tokens -= 1
        plan.chunks.append(Chunk(seq, start, 1, sample=True))
        return True

    def plan_chunk(self, seq: Sequence, plan: StepPlan, budget: StepBudget) -> bool:
        """Give a running sequence its next chunk, if budgets and pages allow."""
        length = self._next_length(seq, budget)
        if length == 0:
            return False
        if not self._room.grow(seq, seq.num_computed + length, plan):
            plan.refused.append(seq)
            return False
        self._add_chunk(seq, length, plan, budget)
        return True

    def admit(self, plan: StepPlan, budget: StepBudget, *, forced: bool = False) -> None:
        """Serve the queue.

        Args:
            plan: of this step.
            budget: what is left of it.
            forced: nothing else can go on: the first in the queue, and only it, takes what it needs from all behind it.
        """
        limit = self._limits.max_batch_size
        # Receivers have seats of their own, so that transfers overlap with a full batch of decodes; a received sequence
        # then waits among the running for a place in the step.
        receiver_seats = 2 * limit - len(self._queues.running)
        seats = limit - sum(other.phase is Phase.RUNNING for other in self._queues.running)
        prefixes: UnfinishedPrefixes | None = None
        deferred = 0
        queue = list(self._queues.waiting)
        if self._credits is not None:
            self._credits.begin_pass()
        if budget.tokens <= 0 or seats <= 0 or len(plan.chunks) >= limit:
            queue = [seq for seq in queue if seq.awaits_transfer or seq.phase is Phase.SUSPENDED or forced]
        for seq in queue:
            if forced:
                self._serve(seq, plan, budget, forced=True)
                return
            if seq.awaits_transfer:
                if receiver_seats <= 0:
                    continue
            elif budget.tokens <= 0 or seats <= 0 or len(plan.chunks) >= limit:
                if receiver_seats <= 0 or seq.phase is Phase.SUSPENDED:
                    return
                continue
            elif not self._may_begin(seq):
                continue
            elif seq.phase is Phase.WAITING and self._limits.prefix_aware:
                prefixes = prefixes or self._unfinished_prefixes()
                if self._is_deferred(seq, prefixes):
                    deferred += 1
                    if deferred == MAX_DEFERRED:
                        return
                    continue
            lends = self._credits is not None and self._credits.concerns(seq)
            if not self._serve(seq, plan, budget, forced=False):
                return
            if lends and self._credits is not None:
                self._credits.began(seq, self._queues.running)
            receiver_seats -= 1
            seats -= seq.phase is Phase.RUNNING
            if prefixes is not None and seq.phase is Phase.RUNNING and not seq.is_decoding:
                prefixes.add(self._pages.block_keys(seq))

    def _may_begin(self, seq: Sequence) -> bool:
        if self._credits is None or not self._credits.concerns(seq):
            return True
        return self._credits.permits(seq, self._queues.running)

    def _serve(self, seq: Sequence, plan: StepPlan, budget: StepBudget, *, forced: bool) -> bool:
        if seq.awaits_transfer:
            return self._attempt(seq, plan, forced, self._start_receiver) and self._note_receiver(seq, plan)
        if seq.phase is Phase.SUSPENDED:
            if self._attempt(seq, plan, forced, self._start_suspended):
                plan.resumed.append(seq)
                self.plan_chunk(seq, plan, budget)
                return True
            if not self._start_anew(seq, plan, forced):
                return False
        if not self._has_budget(seq, budget):
            return False
        if not self._attempt(seq, plan, forced, lambda seq: self._start_prompt(seq, budget)):
            return False
        plan.admitted.append(seq)
        cached = 0 if self._limits.prefix_aware else seq.num_computed
        self._add_chunk(seq, self._next_length(seq, budget), plan, budget, cached=cached)
        return True

    def _attempt(self, seq: Sequence, plan: StepPlan, forced: bool, start: Callable[[Sequence], bool]) -> bool:
        """Try to start ``seq``; after a "no" that is repeated only when there are more pages than there were then."""
        if forced or not self._is_hopeless(seq):
            while not start(seq):
                if self._pages.is_lost(seq) or not forced or not self._room.give_way(seq, plan):
                    self._refusal = seq.arrival, self._pages.available_pages()
                    break
            else:
                return True
        plan.refused.append(seq)
        return False

    def _is_hopeless(self, seq: Sequence) -> bool:
        if not self._queues.running:
            return False
        available = self._pages.available_pages()
        return not fits(self._headroom(), available) or (
            self._refusal is not None and self._refusal[0] == seq.arrival and fits(available, self._refusal[1])
        )

    def _start_anew(self, seq: Sequence, plan: StepPlan, forced: bool) -> bool:
        """Take the cache of a suspended sequence that cannot be resumed, if it never will be."""
        if self._pages.is_lost(seq):
            self._pages.discard(seq)
            self._queues.remove(seq)
            self._queues.enqueue(seq)
            plan.lost.append(seq)
        elif forced:
            self._room.release(seq, plan)  # Nobody behind it has any page: its own cache is in its way.
        else:
            return False
        return True

    def _start_suspended(self, seq: Sequence) -> bool:
        if self._pages.is_lost(seq) or not self._can_reserve(seq) or not self._pages.resume(seq):
            return False
        if not self._leaves_headroom(seq):
            self._pages.suspend(seq)
            return False
        self._queues.start(seq)
        return True

    def _start_prompt(self, seq: Sequence, budget: StepBudget) -> bool:
        if not self._can_reserve(seq) or not self._open(seq):
            return False
        length = self._next_length(seq, budget)
        if length == 0 or not self._leaves_headroom(seq) or not self._pages.grow(seq, seq.num_computed + length):
            self._pages.release(seq)
            return False
        self._queues.start(seq)
        return True

    def _start_receiver(self, seq: Sequence) -> bool:
        if not self._can_reserve(seq) or not self._open(seq):
            return False
        if not self._pages.grow(seq, seq.history.prompt_length):
            self._pages.release(seq)
            return False
        self._queues.start(seq)
        seq.phase = Phase.RECEIVING
        return True

    @staticmethod
    def _note_receiver(seq: Sequence, plan: StepPlan) -> bool:
        plan.admitted.append(seq)
        plan.receiving.append(seq)
        return True

    def _open(self, seq: Sequence) -> bool:
        if self._pages.open(seq):
            return True
        # Reuse itself can need more pages than there are (a shared page and its private copy at once). When nobody else
        # holds any, waiting would be for ever: start without reuse.
        return not self._queues.running and self._pages.open(seq, match=False)

    def _headroom(self) -> list[int]:
        """A block for each that runs: without it, the next block boundary would put the newcomer back."""
        return [pages * len(self._queues.running) for pages in self._block]

    def _leaves_headroom(self, seq: Sequence) -> bool:
        """Whether the pages that ``seq`` still needs for its tokens so far leave one block for each that runs."""
        if not self._queues.running:
            return True
        length = seq.history.length
        if seq.num_pending <= self._limits.max_num_tokens:
            needed = self._pages.pages_needed(history=seq.num_computed, capacity=length)
        else:
            needed = self._peak.of_context(length)
        owned = self._pages.owned_pages(seq)
        more = [max(0, most - has) + spare for most, has, spare in zip(needed, owned, self._headroom(), strict=True)]
        return fits(more, self._pages.available_pages())

    def _can_reserve(self, seq: Sequence) -> bool:
        if self._limits.policy == "guaranteed_no_evict":
            others = self._queues.running
        elif seq.pipelined:
            # Two that cannot be preempted must not wait for each other's pages.
            others = [other for other in self._queues.running if other.pipelined]
        else:
            return True
        reserved = [self._to_completion(other) for other in (*others, seq)]
        return fits([sum(of_pool) for of_pool in zip(*reserved, strict=True)], self._pages.reservable_pages())

    def _to_completion(self, seq: Sequence) -> list[int]:
        return self._peak.to_completion(seq.history.prompt_length, seq.max_cached_length)

    def _unfinished_prefixes(self) -> UnfinishedPrefixes:
        return UnfinishedPrefixes(
            self._pages.block_keys(seq)
            for seq in self._queues.running
            if seq.phase is Phase.RUNNING and not seq.is_decoding
        )

    def _is_deferred(self, seq: Sequence, prefixes: UnfinishedPrefixes) -> bool:
        """Whether a running sequence is computing a prefix that this one would otherwise compute again.

        Waiting a few steps for it saves a whole prefill (``n`` choices of one prompt, a burst behind one preamble).
        """
        blocks = prefixes.shared_blocks(self._pages.block_keys(seq))
        size = self._pages.tokens_per_block
        return blocks > 0 and blocks * size >= self._pages.matched(seq) + size

    def _has_budget(self, seq: Sequence, budget: StepBudget) -> bool:
        """Whether the first chunk of a prompt can be in this step, judged before it gets a cache."""
        if self._limits.chunked_prefill and self._limits.context_kv_cap_tokens is None:
            return True
        start = self._pages.matched(seq)
        length = chunk_length(seq.history.length - start, budget.tokens, self._limits)
        return length > 0 and budget.admits(start + length)

    def _next_length(self, seq: Sequence, budget: StepBudget) -> int:
        """Tokens of the next chunk; 0: not in this step."""
        length = chunk_length(seq.num_pending, budget.tokens, self._limits)
        if length == 0 or seq.is_decoding:
            return length
        end = self._pages.chunk_end(seq, seq.num_computed + length)
        return end - seq.num_computed if budget.admits(end) else 0

    @staticmethod
    def _add_chunk(seq: Sequence, length: int, plan: StepPlan, budget: StepBudget, *, cached: int = 0) -> None:
        start = seq.num_computed
        budget.take(length, attends=0 if seq.is_decoding else start + length, cached=cached)
        plan.chunks.append(Chunk(seq, start, length, sample=length == seq.num_pending))
