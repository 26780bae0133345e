"""The engine's own counters, and the statistics message made of them, the cache's and the transceiver's."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineCounters"]


@dataclass(slots=True)
class EngineCounters:
    """Counted since start by the executor's thread alone."""

    iteration: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    integrity_checks: int = 0
    integrity_failures: int = 0
