"""The machine's clock, and what a test lets pass besides."""

from __future__ import annotations

from kvmesh.net.clock import SystemClock

__all__ = ["ShiftedClock"]


class ShiftedClock(SystemClock):
    """Time goes on, and a test makes it jump."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.passed_s
