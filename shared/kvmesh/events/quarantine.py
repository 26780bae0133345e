"""Events that cannot be used: counted by reason, and now and then one is shown in the log by its first bytes."""

from __future__ import annotations

from collections.abc import Mapping

from kvmesh.events.decoding import SAMPLE_BYTES
from kvmesh.events.records import RecordBatch
from kvmesh.net.clock import Clock
from kvmesh.telemetry import get_logger

__all__ = ["LOG_INTERVAL_S", "Quarantine"]

LOG_INTERVAL_S = 10.0
"""Between two lines about the same reason."""

_log = get_logger("events.quarantine")


class Quarantine:
    """Of one publisher.

    Args:
        publisher: its name in the log.
        clock: of the interval.
    """

    def __init__(self, publisher: str, clock: Clock) -> None:
        self._publisher = publisher
        self._clock = clock
        self._totals: dict[str, int] = {}
        self._silent_until_s: dict[str, float] = {}

    @property
    def totals(self) -> Mapping[str, int]:
        """Events left out, by reason."""
        return self._totals

    def add(self, batch: RecordBatch) -> None:
        """Note what a batch had to leave out."""
        for reason, count in batch.rejected.items():
            self._note(reason, count, batch.samples[reason])

    def unreadable(self, payload: bytes, sequence: int) -> None:
        """A whole batch that could not be read; it has no events to count."""
        self._tell("unreadable batch", payload, sequence=sequence)

    def _note(self, reason: str, count: int, first_bytes: bytes) -> None:
        self._totals[reason] = self._totals.get(reason, 0) + count
        self._tell("event left out", first_bytes, reason=reason, so_far=self._totals[reason])

    def _tell(self, what: str, data: bytes, **facts: object) -> None:
        now_s = self._clock.monotonic_s()
        key = str(facts.get("reason", what))
        if now_s >= self._silent_until_s.get(key, now_s):
            self._silent_until_s[key] = now_s + LOG_INTERVAL_S
            _log.warning(what, publisher=self._publisher, first_bytes=data[:SAMPLE_BYTES].hex(" "), **facts)
