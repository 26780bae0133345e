"""``round_robin``: servers in turn, whatever their load."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.router.policy.types import Candidate, Decision, Question, Scored

__all__ = ["RoundRobin", "decide"]


def decide(candidates: Sequence[Candidate], turn: int) -> Decision:
    """The ``turn``-th candidate in the order of instance ids, so that the order does not depend on who joined first."""
    ordered = sorted(candidates)
    return Decision(
        policy="round_robin",
        chosen=ordered[turn % len(ordered)].instance_id,
        reason=f"turn {turn}",
        candidates=[Scored(instance_id=candidate.instance_id) for candidate in ordered],
    )


class RoundRobin:
    """:func:`decide` with its turn."""

    name = "round_robin"
    needs_matches = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], question: Question) -> Decision:
        """See :class:`kvmesh.router.policy.types.Policy`."""
        del question
        decision = decide(candidates, self._turn)
        self._turn += 1
        return decision

    def forget(self, instance_id: str) -> None:
        """Nothing is remembered of a server."""
