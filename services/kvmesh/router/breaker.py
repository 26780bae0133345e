"""A circuit breaker per server: no requests to one that just failed, until a probe finds it well.

Closed (used) → open (not used; probed when ``retry_at_s`` comes) → closed after a good probe, or open for longer.
A refusal of one request (4xx) and "busy" (429, 503) say nothing about the server's health and change nothing.
"""

from __future__ import annotations

import math

from kvmesh.net.clock import Clock

__all__ = ["Breaker"]

FAILURES_TO_OPEN = 3
"""Consecutive failed requests; one alone may be the request's own fault."""
FIRST_WAIT_S = 0.25
"""A restarted process is back in moments."""
MAX_WAIT_S = 10.0
"""A probe costs little; longer would only delay a server that has come back."""


class Breaker:
    """State of one server."""

    __slots__ = ("_clock", "_failures", "_wait_s", "opened_total", "retry_at_s", "well_at_s")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._wait_s = FIRST_WAIT_S
        self.retry_at_s: float | None = None
        """When to probe, in the clock's monotonic seconds; None while closed."""
        self.well_at_s = -math.inf
        """When something last went well, in the clock's monotonic seconds."""
        self.opened_total = 0

    @property
    def closed(self) -> bool:
        """Whether the server may be used."""
        return self.retry_at_s is None

    def succeeded(self) -> None:
        """A request, or a probe, went well."""
        self._failures = 0
        self._wait_s = FIRST_WAIT_S
        self.retry_at_s = None
        self.well_at_s = self._clock.monotonic_s()

    def failed(self) -> None:
        """A request failed by the server's fault: it answered 500, broke off or hangs."""
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            self._open()

    def unreachable(self) -> None:
        """No connection: it is down whatever it did before."""
        self._open()

    def probe_failed(self) -> None:
        """The probe found it still down: wait longer for the next."""
        self._wait_s = min(self._wait_s * 2, MAX_WAIT_S)
        self.retry_at_s = self._clock.monotonic_s() + self._wait_s

    def _open(self) -> None:
        if self.closed:
            self.opened_total += 1
            self.retry_at_s = self._clock.monotonic_s() + self._wait_s
