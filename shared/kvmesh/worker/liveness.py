"""Whether the engines' loops turn: what heartbeats say of it, and when it has to be said at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvmesh.engine.stream import EngineDeadError
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.protocol.errors import ApiError
from kvmesh.telemetry import get_logger

__all__ = ["HEALTH_TIMEOUT_S", "Liveness"]

HEALTH_TIMEOUT_S = 10.0
"""Longest step after which the executor must have answered a ping: a full prefill chunk on one slow core."""

CHECK_S = 2.0
"""Between two pings of engines that answer."""

RETRY_S = 0.1
"""Between two pings of engines that do not: the next one is answered as soon as they turn again."""

_log = get_logger("worker")


class Liveness:
    """Pings engines, for as long as they live.

    Args:
        on_change: called when :attr:`healthy` has changed.
        clock: waits between pings.
    """

    def __init__(self, on_change: Callable[[], None], clock: Clock | None = None) -> None:
        self.healthy = True
        """Whether the last ping was answered in time."""
        self._on_change = on_change
        self._clock = clock or SystemClock()

    async def watch(self, ping: Callable[[float], Awaitable[None]]) -> None:
        """Ping until the engines have ended, of which others tell.

        Args:
            ping: waits for the answer of every engine, for so many seconds at most; raises ApiError when none comes,
                EngineDeadError when none can.
        """
        while True:
            await self._clock.sleep(CHECK_S if self.healthy else RETRY_S)
            try:
                await ping(HEALTH_TIMEOUT_S)
            except EngineDeadError:
                self._set(False)
                return
            except ApiError as error:
                if self.healthy:
                    _log.warning("the executor does not answer; no new requests until it does", error=error.message)
                self._set(False)
            else:
                if not self.healthy:
                    _log.info("the executor answers again")
                self._set(True)

    def _set(self, healthy: bool) -> None:
        if healthy != self.healthy:
            self.healthy = healthy
            self._on_change()
