"""How the next token is chosen: the engine-level sampling parameters of one sequence."""

from __future__ import annotations

import msgspec

__all__ = ["MAX_TEMPERATURE", "REPETITION_PENALTIES", "SamplingParams", "TokenLogprob"]

MAX_TEMPERATURE = 100.0
"""OpenAI's limit is 2; other servers allow more. Far below what would leave float32."""
REPETITION_PENALTIES = (0.01, 100.0)
"""Smallest and largest repetition penalty: logits times either stay far inside float32."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one sequence (``n`` is fanned out before the engine sees it).

    Stop *strings* are matched by the front process, which owns the text; the engine knows token ids only.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 means all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Always resolved to a number before it reaches an engine, so that a hand-off continues the same stream."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log-probabilities; k >= 0: the sampled token's and the k most likely ones'."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log, of the raw distribution before temperature and filters) of one sampled token."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """(token id, log-probability) of the most likely tokens, best first."""
