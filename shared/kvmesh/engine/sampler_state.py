"""What the sampler keeps per sequence: its parameters, its logits processors and its tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from kvmesh.engine.tokens import TokenHistory
from kvmesh.protocol.sampling import SamplingParams

__all__ = ["GREEDY_BELOW", "LogitsProcessor", "ProcessorFactory", "SamplerState"]

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy: so little noise picks the maximum anyway, and smaller ones leave float32."""


class LogitsProcessor(Protocol):
    """Changes one sequence's logits before the draw: the seam for penalties, biases and, later, grammars.

    A processor must derive what it knows from the token history alone (keeping a cursor into it is fine): after a
    preemption or a hand-off a new instance sees the same history and must act the same.
    """

    def apply(self, logits: torch.Tensor, history: TokenHistory) -> None:
        """Change ``logits`` (float32 ``[vocab]``) in place for the token that follows ``history``."""
        ...


class ProcessorFactory(Protocol):
    """Decides whether a sequence with these parameters needs a processor."""

    def __call__(self, params: SamplingParams, end_ids: frozenset[int]) -> LogitsProcessor | None:
        """Return a fresh processor, or None when these parameters ask for nothing.

        Args:
            params: the sequence's sampling parameters.
            end_ids: token ids that end the sequence.
        """
        ...


class SamplerState:
    """One sequence as the sampler sees it.

    Args:
        params: sampling parameters.
        history: the sequence's tokens, shared with the scheduler (the caller appends, the sampler only reads).
        end_ids: token ids that end this sequence (EOS unless ignored, and the stop ids).
        factories: processors on offer, applied in this order.
    """

    __slots__ = ("end_ids", "greedy", "history", "params", "plain", "processors")

    def __init__(
        self,
        params: SamplingParams,
        history: TokenHistory,
        end_ids: frozenset[int],
        factories: tuple[ProcessorFactory, ...],
    ) -> None:
        self.params = params
        self.history = history
        self.end_ids = end_ids
        self.processors: tuple[LogitsProcessor, ...] = tuple(
            processor for factory in factories if (processor := factory(params, end_ids)) is not None
        )
        self.greedy = params.temperature < GREEDY_BELOW
        self.plain = self.greedy and not self.processors and params.logprobs is None
        """Nothing but an argmax is wanted."""
