"""The built-in logits processors: penalties, logit bias and minimum length.

Order: penalties (repetition, then frequency and presence), logit bias, minimum length. Then the sampler applies
temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

import numpy as np
import torch

from kvmesh.engine.sampler_state import LogitsProcessor, ProcessorFactory
from kvmesh.engine.tokens import TokenHistory
from kvmesh.protocol.sampling import SamplingParams

__all__ = ["BUILTIN_FACTORIES", "LogitBias", "MinimumLength", "Penalties"]


class Penalties:
    """Repetition penalty over prompt and output (HF), presence and frequency penalties over the output (OpenAI).

    Token counts are kept up to date by reading the history's new tail, so a step costs the number of distinct tokens
    and not the length of the text.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._cursor = 0
        self._seen: dict[int, int] = {}
        """Token id -> occurrences in the output (0: in the prompt only)."""

    def apply(self, logits: torch.Tensor, history: TokenHistory) -> None:
        """See :class:`~kvmesh.engine.sampler_state.LogitsProcessor`."""
        self._read_new_tokens(history)
        if not self._seen:
            return
        ids = torch.tensor(list(self._seen.keys()), dtype=torch.int64, device=logits.device)
        counts = torch.tensor(list(self._seen.values()), dtype=torch.float32, device=logits.device)
        values = logits[ids]
        if self._repetition != 1.0:
            values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        values = values - self._frequency * counts - self._presence * (counts > 0)
        logits[ids] = values

    def _read_new_tokens(self, history: TokenHistory) -> None:
        if self._cursor == 0:
            self._seen = dict.fromkeys(np.unique(history.slice(0, history.prompt_length)).tolist(), 0)
            self._cursor = history.prompt_length
        for token in history.slice(self._cursor, history.length).tolist():
            self._seen[token] = self._seen.get(token, 0) + 1
        self._cursor = history.length


class LogitBias:
    """Adds a constant to chosen tokens; ids beyond the vocabulary were refused at admission."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._ids = torch.tensor(list(bias.keys()), dtype=torch.int64)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def apply(self, logits: torch.Tensor, history: TokenHistory) -> None:  # noqa: ARG002 - part of the protocol
        """See :class:`~kvmesh.engine.sampler_state.LogitsProcessor`."""
        logits.index_add_(0, self._ids.to(logits.device), self._values.to(logits.device))


class MinimumLength:
    """Makes ending tokens impossible until ``min_tokens`` tokens are generated."""

    def __init__(self, min_tokens: int, end_ids: frozenset[int]) -> None:
        self._min_tokens = min_tokens
        self._ids = torch.tensor(sorted(end_ids), dtype=torch.int64)

    def apply(self, logits: torch.Tensor, history: TokenHistory) -> None:
        """See :class:`~kvmesh.engine.sampler_state.LogitsProcessor`."""
        if history.output_length < self._min_tokens:
            logits[self._ids.to(logits.device)] = -torch.inf


def _penalties(params: SamplingParams, end_ids: frozenset[int]) -> LogitsProcessor | None:  # noqa: ARG001 - a ProcessorFactory
    if params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return None
    return Penalties(params)


def _logit_bias(params: SamplingParams, end_ids: frozenset[int]) -> LogitsProcessor | None:  # noqa: ARG001 - a ProcessorFactory
    return LogitBias(params.logit_bias) if params.logit_bias else None


def _minimum_length(params: SamplingParams, end_ids: frozenset[int]) -> LogitsProcessor | None:
    return MinimumLength(params.min_tokens, end_ids) if params.min_tokens > 0 and end_ids else None


BUILTIN_FACTORIES: tuple[ProcessorFactory, ...] = (_penalties, _logit_bias, _minimum_length)
