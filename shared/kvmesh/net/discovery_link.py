"""One place that knows whether the coordinator answers: back-off while it does not, and two log lines in all."""

from __future__ import annotations

import random

from kvmesh.telemetry import get_logger

__all__ = ["Backoff", "CoordinatorLink"]

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 2.0
"""A restarted coordinator is found again within this, well inside a lease."""

_log = get_logger("discovery")


class CoordinatorLink:
    """Whether the coordinator answers, and at which address; shared by everything in a process that talks to it.

    Args:
        urls: base URLs with commas between; of several coordinators any will do, for it names the one that leads.
    """

    def __init__(self, urls: str) -> None:
        self._urls = list(dict.fromkeys(url.strip().rstrip("/") for url in urls.split(",")))
        self.url = self._urls[0]
        self.connected = False
        self.losses = 0
        self._warned = False

    def succeeded(self) -> None:
        """It answered."""
        if self._warned:
            _log.info("coordinator is back", url=self.url)
        self._warned = False
        self.connected = True

    def failed(self, error: Exception, url: str) -> None:
        """It did not, at ``url``."""
        if not self._warned:
            _log.warning("coordinator does not answer; serving goes on without it", url=url, error=str(error))
            self.losses += 1
        self._warned = True
        self.connected = False
        self.try_next(url)

    def try_next(self, url: str) -> bool:
        """Ask the address after ``url`` from now on, unless that was changed already; whether there are several."""
        if self.url == url:
            self.url = self._urls[(self._urls.index(url) + 1) % len(self._urls)]
        return len(self._urls) > 1


class Backoff:
    """Exponential waits with jitter, so that a mesh does not come back in one stampede."""

    def __init__(self, first_s: float = FIRST_RETRY_S, most_s: float = MAX_RETRY_S) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def reset(self) -> None:
        """The last attempt succeeded."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        wait_s = self._next_s * random.uniform(0.75, 1.25)
        self._next_s = min(self._next_s * 2, self._most_s)
        return wait_s
