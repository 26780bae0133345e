"""How much of a processor some work may take: a share in the long run, and more of it now and then."""

from __future__ import annotations

from kvmesh.net.clock import Clock, SystemClock

__all__ = ["Allowance"]


class Allowance:
    """Seconds that may be spent; they come back with time. Work is not interrupted, so it may be overdrawn.

    Args:
        share: seconds that come back in a second, above 0.
        most_s: that can be there at once.
        clock: by which they come back.
    """

    def __init__(self, share: float, most_s: float, clock: Clock | None = None) -> None:
        self._share = share
        self._most_s = most_s
        self._clock = clock or SystemClock()
        self._left_s = most_s
        self._as_of_s = self._clock.monotonic_s()

    def spend(self, seconds: float) -> None:
        """So much was worked."""
        self._earn()
        self._left_s -= seconds

    def rest_s(self) -> float:
        """How long to do nothing, 0 when there is something left."""
        self._earn()
        return max(0.0, -self._left_s / self._share)

    def _earn(self) -> None:
        now_s = self._clock.monotonic_s()
        self._left_s = min(self._most_s, self._left_s + (now_s - self._as_of_s) * self._share)
        self._as_of_s = now_s
