"""The batch sampler: from logits ``[R, vocab]`` to one token per row.

A draw is the inverse of the cumulative distribution in token-id order at ``philox.uniform(seed, position)``. Filters
only remove tokens from that one canonical order, so a row's result is a function of (its logits, its parameters, its
seed, its position) and of nothing else; no other row of the batch can change it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvmesh.engine.logits import BUILTIN_FACTORIES
from kvmesh.engine.philox import uniform
from kvmesh.engine.sampler_state import ProcessorFactory, SamplerState
from kvmesh.engine.tokens import TokenHistory
from kvmesh.protocol.sampling import SamplingParams, TokenLogprob

__all__ = ["BROKEN_LOGITS", "NO_CHOICE", "Sampled", "Sampler", "filtered_probabilities"]

BROKEN_LOGITS = -1
"""Instead of a token: the model's own logits of the row are not finite."""
NO_CHOICE = -2
"""Instead of a token: the row's parameters leave no token with a usable probability."""

_NUCLEUS_GUESS = 256
"""Most top-p nuclei are smaller than this; a wider one costs a full sort."""


class Sampled(NamedTuple):
    """The choice for one row; ``token_id`` is :data:`BROKEN_LOGITS` or :data:`NO_CHOICE` when there is none."""

    token_id: int
    logprob: TokenLogprob | None


class Sampler:
    """Chooses the next token of every row of a batch.

    Args:
        eos_token_ids: ids that end a sequence unless it ignores them.
        factories: logits processors on offer, in the order in which they apply.
    """

    def __init__(
        self, eos_token_ids: frozenset[int], factories: tuple[ProcessorFactory, ...] = BUILTIN_FACTORIES
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._factories = factories

    def state(self, params: SamplingParams, history: TokenHistory) -> SamplerState:
        """The sampler's view of a new sequence; ``history`` may already hold output (a hand-off)."""
        end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids |= self._eos_token_ids
        return SamplerState(params, history, end_ids, self._factories)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SamplerState]) -> list[Sampled]:
        """Choose one token per row. Does not append to the histories. May overwrite ``logits``.

        Args:
            logits: float32 ``[R, vocab]``, any device.
            rows: R states; row i's token follows ``rows[i].history``.
        """
        if not rows:
            return []
        if all(row.plain for row in rows):
            return [Sampled(token, None) for token in _argmax(logits)]
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = {i: torch.log_softmax(logits[i], dim=-1) for i in wanted}
        tokens = _argmax(logits)
        for i, row in enumerate(rows):
            for processor in row.processors:
                processor.apply(logits[i], row.history)
        for i, token in enumerate(_argmax(logits) if any(row.processors for row in rows) else tokens):
            # What the model itself broke stays the model's fault.
            if tokens[i] >= 0:
                tokens[i] = token if token >= 0 else NO_CHOICE
        for i, row in enumerate(rows):
            if not row.greedy and tokens[i] >= 0:
                tokens[i] = _draw(logits[i], row.params, row.history.length)
        return [
            Sampled(
                token, _token_logprob(raw[i], token, rows[i].params.logprobs or 0) if i in raw and token >= 0 else None
            )
            for i, token in enumerate(tokens)
        ]


def _argmax(logits: torch.Tensor) -> list[int]:
    """Most likely token per row, ``BROKEN_LOGITS`` where it is not finite or none is possible (argmax finds a NaN)."""
    # On host memory numpy's argmax is vectorised and several times faster than torch's.
    ids = torch.from_numpy(logits.numpy().argmax(axis=-1)) if logits.device.type == "cpu" else logits.argmax(dim=-1)
    values = logits.gather(-1, ids[:, None])[:, 0]
    pairs = zip(values.tolist(), ids.tolist(), strict=True)
    return [token if math.isfinite(value) else BROKEN_LOGITS for value, token in pairs]


def _draw(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    probabilities = filtered_probabilities(logits, params)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[-1]
    if not math.isfinite(total):
        return NO_CHOICE
    # Rounding must not carry the point onto the total: the first cumulative value ABOVE it always has a real token.
    point = torch.minimum(total * uniform(params.seed, position), torch.nextafter(total, torch.zeros_like(total)))
    token = int(torch.searchsorted(cumulative, point, right=True).item())
    return token if token < probabilities.shape[-1] else NO_CHOICE


def filtered_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Unnormalised probabilities in token-id order after temperature, top-k, top-p and min-p (HF's order).

    Tokens tied with the last one that a filter keeps are kept too, so the result does not depend on sort order.
    The largest value is 1.

    Args:
        logits: float32 ``[vocab]``, processed; not changed.
        params: temperature must be positive.
    """
    # Subtracting first keeps tiny temperatures finite.
    weights = torch.exp((logits - logits.max()) / params.temperature)
    vocabulary = weights.shape[-1]
    if 0 < params.top_k < vocabulary:
        weights = _keep_from(weights, torch.topk(weights, params.top_k).values[-1])
    if params.top_p < 1.0:
        weights = _keep_from(weights, _nucleus_edge(weights, params.top_p))
    if params.min_p > 0.0:
        weights = _keep_from(weights, weights.new_tensor(params.min_p))
    return weights


def _keep_from(weights: torch.Tensor, edge: torch.Tensor) -> torch.Tensor:
    return torch.where(weights >= edge, weights, 0.0)


def _nucleus_edge(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest weight in the smallest set of tokens whose share reaches ``top_p`` (at least one token)."""
    target = weights.sum(dtype=torch.float64) * top_p
    count = min(_NUCLEUS_GUESS, weights.shape[-1])
    while True:
        largest = torch.topk(weights, count).values
        reached = largest.cumsum(dim=-1, dtype=torch.float64) >= target
        if bool(reached[-1]) or count == weights.shape[-1]:
            # argmax of a boolean is the first True; none is true only when rounding hides the last crumb: keep all.
            return largest[int(reached.int().argmax().item())] if bool(reached[-1]) else largest[-1]
        count = weights.shape[-1]


def _token_logprob(raw: torch.Tensor, token: int, alternatives: int) -> TokenLogprob:
    top: list[tuple[int, float]] = []
    if alternatives:
        values, ids = torch.topk(raw, min(alternatives, raw.shape[-1]))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(raw[token]), top)
