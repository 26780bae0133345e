"""What each server is doing for this router, and what others say it does for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvmesh.protocol.members import Load

__all__ = ["Loads", "ServerLoad"]


class ServerLoad(NamedTuple):
    """The load that policies weigh."""

    requests: int
    tokens: int


class _Counts:
    __slots__ = ("foreign_requests", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.foreign_requests = 0


class Loads:
    """Active requests and their tokens per server.

    What this router sent is counted exactly and at once. Heartbeats tell the rest: a server's reported requests beyond
    ours, at the moment of the report, are other routers' and are added until the next report.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    @contextmanager
    def track(self, instance_id: str, tokens: int) -> Iterator[None]:
        """Count one request with ``tokens`` at a server for the length of the block, however it ends."""
        counts = self._counts.setdefault(instance_id, _Counts())
        counts.requests += 1
        counts.tokens += tokens
        try:
            yield
        finally:
            counts.requests -= 1
            counts.tokens -= tokens
            assert counts.requests >= 0
            assert counts.tokens >= 0

    def heard(self, instance_id: str, load: Load) -> None:
        """A heartbeat of the server arrived."""
        counts = self._counts.setdefault(instance_id, _Counts())
        counts.foreign_requests = max(0, load.running + load.waiting + load.in_transfer - counts.requests)

    def forget(self, instance_id: str) -> None:
        """The server left. Requests still running there go on being counted, to no effect."""
        counts = self._counts.pop(instance_id, None)
        if counts is not None and counts.requests:
            counts.foreign_requests = 0
            self._counts[instance_id] = counts

    def of(self, instance_id: str) -> ServerLoad:
        """The load now; nothing for an unknown server."""
        counts = self._counts.get(instance_id)
        if counts is None:
            return ServerLoad(0, 0)
        return ServerLoad(counts.requests + counts.foreign_requests, counts.tokens)
