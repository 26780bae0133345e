"""``load_balancing``: the server with the fewest active requests, or tokens.

    cost = active_requests            (use_tokens: false)
    cost = active_tokens              (use_tokens: true)

Ties take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.router.policy.types import Candidate, Decision, Question, Scored, take_turns

__all__ = ["LoadBalancing", "decide"]


def decide(candidates: Sequence[Candidate], *, use_tokens: bool, turn: int) -> Decision:
    """The least loaded candidate; ``turn`` settles ties."""
    ordered = sorted(candidates)
    costs = [float(candidate.active_tokens if use_tokens else candidate.active_requests) for candidate in ordered]
    chosen = take_turns(costs, turn)
    unit = "tokens" if use_tokens else "requests"
    return Decision(
        policy="load_balancing",
        chosen=ordered[chosen].instance_id,
        reason=f"fewest active {unit} ({costs[chosen]:g})",
        candidates=[
            Scored(
                instance_id=candidate.instance_id,
                cost=cost,
                terms={"active_requests": candidate.active_requests, "active_tokens": candidate.active_tokens},
            )
            for candidate, cost in zip(ordered, costs, strict=True)
        ],
    )


class LoadBalancing:
    """:func:`decide` with its turn."""

    name = "load_balancing"
    needs_matches = False

    def __init__(self, *, use_tokens: bool = False) -> None:
        self._use_tokens = use_tokens
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], question: Question) -> Decision:
        """See :class:`kvmesh.router.policy.types.Policy`."""
        del question
        decision = decide(candidates, use_tokens=self._use_tokens, turn=self._turn)
        self._turn += 1
        return decision

    def forget(self, instance_id: str) -> None:
        """Nothing is remembered of a server."""
