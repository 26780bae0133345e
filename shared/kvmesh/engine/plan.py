"""What one step computes, and the bounds that it obeys: plain data between the scheduler and the executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvmesh.engine.sequence import Sequence

__all__ = ["Chunk", "SchedulerLimits", "SchedulerPolicy", "StepBudget", "StepPlan", "chunk_length"]

SchedulerPolicy = Literal["guaranteed_no_evict", "max_utilization"]


class SchedulerLimits(NamedTuple):
    """Bounds of one step and of the queue."""

    max_batch_size: int
    """Sequences in one step."""
    max_num_tokens: int
    """Tokens in one step: the budget that decodes and prefill chunks share."""
    chunked_prefill: bool = True
    policy: SchedulerPolicy = "max_utilization"
    prefix_aware: bool = True
    """Whether a prompt waits for another one that is computing its beginning, and cached tokens cost no budget."""
    context_kv_cap_tokens: int | None = None
    """Most tokens that the context chunks of one step attend to, summed; None: as many as they like."""
    disk_prefetch_num_reqs: int = 0
    """Queued prompts whose disk-tier pages are fetched ahead."""


class Chunk(NamedTuple):
    """Tokens ``start .. start + length`` of a sequence, computed in this step."""

    seq: Sequence
    start: int
    length: int
    sample: bool
    """Whether the chunk ends at the newest token, so that its logits choose the next one."""


@dataclass(slots=True)
class StepPlan:
    """What the next step computes, and who came, went or got nothing."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """New or recomputed sequences that got pages."""
    receiving: list[Sequence] = field(default_factory=list)
    """Admitted sequences whose prompt's pages are allocated and must now be fetched."""
    suspended: list[Sequence] = field(default_factory=list)
    """Running sequences that gave way and keep their cache."""
    resumed: list[Sequence] = field(default_factory=list)
    """Suspended sequences that run again."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that gave way and lost their cache: what they had is computed again."""
    lost: list[Sequence] = field(default_factory=list)
    """Suspended sequences with a damaged page in a cold tier, which start anew."""
    refused: list[Sequence] = field(default_factory=list)
    """Sequences that could have computed but for want of pages."""

    @property
    def gave_way(self) -> bool:
        """Whether a sequence lost its place in this step: pages are short."""
        return bool(self.suspended or self.preempted)

    @property
    def is_idle(self) -> bool:
        """Whether nothing was scheduled, moved or evicted."""
        return not (self.chunks or self.admitted or self.resumed or self.lost or self.gave_way)


@dataclass(slots=True)
class StepBudget:
    """What is left of a step's bounds while it is planned."""

    tokens: int
    context_kv_tokens: int | None = None
    """Tokens that further context chunks may attend to; None: no bound."""

    def admits(self, end: int) -> bool:
        """Whether a context chunk that attends to the first ``end`` tokens of its sequence still fits the step."""
        return self.context_kv_tokens is None or end <= self.context_kv_tokens

    def take(self, length: int, *, attends: int = 0, cached: int = 0) -> None:
        """A chunk of ``length`` tokens is planned.

        Args:
            length: its tokens.
            attends: for a context chunk, the tokens that it attends to.
            cached: reused tokens that are charged as if they were computed.
        """
        self.tokens = max(0, self.tokens - length - cached)
        if self.context_kv_tokens is not None:
            self.context_kv_tokens -= attends


def chunk_length(pending: int, budget: int, limits: SchedulerLimits) -> int:
    """Tokens of a ``pending`` context to compute with ``budget`` tokens left in this step; 0 means not now.

    Without chunked prefill a context goes whole or waits for a step of its own; only a recomputed context longer than
    a whole step's budget (its prompt did fit) is still split.
    """
    if limits.chunked_prefill or pending > limits.max_num_tokens:
        return min(pending, budget)
    return pending if pending <= budget else 0
