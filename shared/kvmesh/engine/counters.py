"""The engine's own counters, and the statistics message made of them, the cache's and the transceiver's."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.engine.plan import StepPlan

__all__ = ["EngineCounters"]


@dataclass(slots=True)
class EngineCounters:
    """Counted since start by the executor's thread alone."""

    iteration: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    suspended: int = 0
    """Times that a sequence gave way and kept its cache."""
    resumed: int = 0
    """Times that such a sequence went on."""
    recomputed: int = 0
    """Times that a sequence gave way and lost its cache."""
    lost: int = 0
    """Suspended sequences that started anew because a page was damaged in a cold tier."""
    starved: int = 0
    """Requests that failed because nothing could go on for want of pages."""
    integrity_checks: int = 0
    integrity_failures: int = 0

    @property
    def preemptions(self) -> int:
        """Times that a sequence gave way, with or without its cache."""
        return self.suspended + self.recomputed

    def note(self, plan: StepPlan) -> None:
        """Count what a plan did to sequences."""
        self.suspended += len(plan.suspended)
        self.resumed += len(plan.resumed)
        self.recomputed += len(plan.preempted)
        self.lost += len(plan.lost)
