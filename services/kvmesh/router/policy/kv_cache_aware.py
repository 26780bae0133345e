"""``kv_cache_aware``: the server with the least to do for this prompt, in blocks; the default.

    credit  = 1.0 * device + 0.75 * (host - device) + 0.25 * (disk - host)      tokens, at most the prompt
    missing = (prompt_tokens - credit) / tokens_per_block                       blocks to compute or to fetch
    load    = active_requests                     (use_tokens: false)
            = active_tokens / tokens_per_block    (use_tokens: true)
    cost    = missing + load_weight * load

The least cost wins and ties take turns. The order is that of TensorRT-LLM's ``match_blocks - load_weight * active``.
A server with more than ``load_cap`` active requests gets no credit, so a popular prefix cannot bury its holder.

When nothing is known of matches (no indexer, or it is silent) every credit is 0 and the policy is least load.
Weakness: the load counts requests of equal weight by default; ``use_tokens`` weighs them by their prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.router.policy.types import Candidate, Decision, Question, Scored, take_turns

__all__ = ["KvCacheAware", "KvCacheAwareArgs", "credit_tokens", "decide", "tier_credit"]

HOST_CREDIT = 0.75
"""A block in host memory is copied instead of computed (Dynamo's default weight)."""
DISK_CREDIT = 0.25
"""A block on disk is read instead of computed (Dynamo's default weight)."""


class KvCacheAwareArgs(NamedTuple):
    """The policy's settings; see :class:`kvmesh.config.routing.KvCacheAwarePolicy`."""

    use_tokens: bool = False
    load_weight: float = 1.0
    load_cap: int | None = None


def tier_credit(device_tokens: int, host_tokens: int, disk_tokens: int) -> float:
    """What leading tokens are worth by where they are held; a colder tier's count includes the warmer ones'."""
    return (
        device_tokens
        + HOST_CREDIT * max(host_tokens - device_tokens, 0)
        + DISK_CREDIT * max(disk_tokens - max(host_tokens, device_tokens), 0)
    )


def credit_tokens(candidate: Candidate, prompt_tokens: int) -> float:
    """Prompt tokens that need not be computed there, colder tiers counting less."""
    return min(tier_credit(candidate.device_tokens, candidate.host_tokens, candidate.disk_tokens), prompt_tokens)


def decide(candidates: Sequence[Candidate], prompt_tokens: int, args: KvCacheAwareArgs, turn: int) -> Decision:
    """The candidate of least cost; see the module's formula. ``turn`` settles ties."""
    ordered = sorted(candidates)
    scored = [_score(candidate, prompt_tokens, args) for candidate in ordered]
    chosen = take_turns([entry.cost or 0.0 for entry in scored], turn)
    credit = scored[chosen].terms["credit_tokens"]
    return Decision(
        policy="kv_cache_aware",
        chosen=ordered[chosen].instance_id,
        reason=f"least cost; credited with {credit:g} of {prompt_tokens} tokens",
        candidates=scored,
    )


def _score(candidate: Candidate, prompt_tokens: int, args: KvCacheAwareArgs) -> Scored:
    capped = args.load_cap is not None and candidate.active_requests > args.load_cap
    credit = 0.0 if capped else credit_tokens(candidate, prompt_tokens)
    missing = (prompt_tokens - credit) / candidate.tokens_per_block
    load = candidate.active_tokens / candidate.tokens_per_block if args.use_tokens else candidate.active_requests
    return Scored(
        instance_id=candidate.instance_id,
        cost=missing + args.load_weight * load,
        terms={
            "credit_tokens": credit,
            "missing_blocks": missing,
            "load": float(load),
            "over_load_cap": float(capped),
        },
    )


class KvCacheAware:
    """:func:`decide` with its turn."""

    name = "kv_cache_aware"
    needs_matches = True

    def __init__(self, args: KvCacheAwareArgs | None = None) -> None:
        self._args = args or KvCacheAwareArgs()
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], question: Question) -> Decision:
        """See :class:`kvmesh.router.policy.types.Policy`."""
        decision = decide(candidates, question.prompt_tokens, self._args, self._turn)
        self._turn += 1
        return decision

    def forget(self, instance_id: str) -> None:
        """Nothing is remembered of a server; the indexer forgets its blocks."""
