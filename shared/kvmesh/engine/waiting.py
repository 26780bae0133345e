"""How polls of the transceiver wait inside the engine's loop: on the loop's own channel, and never past its next duty.

A poll may be told to wait for seconds. Here such a wait ends at once when a transfer progresses, when the front sends
something, and when the loop has anything else to do; the poll then returns with what it has, and the loop comes back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvmesh.engine.channel import MessageChannel
from kvmesh.net.clock import Clock
from kvmesh.net.doorbell import Doorbell

__all__ = ["LoopWaiter"]


class LoopWaiter:
    """A :class:`kvmesh.transceiver.timing.Waiter`.

    Args:
        channel: what the loop waits on; woken when a session changes.
        clock: the loop's.
    """

    def __init__(self, channel: MessageChannel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._limit_s = math.inf

    @property
    def bell(self) -> Doorbell:
        """See :attr:`kvmesh.transceiver.timing.Waiter.bell`."""
        return self._channel.bell

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Within the block, waits end ``seconds`` from now at the latest."""
        self._limit_s = self._clock.monotonic_s() + seconds
        try:
            yield
        finally:
            self._limit_s = math.inf

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """See :meth:`kvmesh.transceiver.timing.Waiter.wait`."""
        left_s = max(0.0, self._limit_s - self._clock.monotonic_s())
        changed.release()
        try:
            called = self._channel.wait(min(seconds, left_s))
        finally:
            changed.acquire()
        return not called and seconds < left_s

    def notify(self, _changed: threading.Condition) -> None:
        """See :meth:`kvmesh.transceiver.timing.Waiter.notify`. It is remembered if nobody waits now."""
        self._channel.bell.ring()
