"""The three transfer time settings as seconds, and the bounded waits that follow from them."""

from __future__ import annotations

import math
import threading
from typing import Final, NamedTuple, Protocol

from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.net.doorbell import Doorbell

__all__ = [
    "CONNECT_TIMEOUT_S",
    "BellWaiter",
    "TransferTimes",
    "Waiter",
    "idle_wait_ms",
]

FALLBACK_MS: Final = 1000
"""Stands in for an unset slice, interval or timeout where a wait needs a bound."""

CONNECT_TIMEOUT_S: Final = 10.0
"""Bound of connection set-up, which is not charged to any transfer."""


class TransferTimes(NamedTuple):
    """How long each side waits, in seconds.

    Attributes:
        timeout_s: the transfer deadline; on the sender it only flags, on the receiver it fails the task. Infinite
            where there is none.
        slice_s: length of one bounded wait on the sender's side.
        poll_s: length of one bounded wait on the receiver's side.
        connect_s: bound of connection set-up.
    """

    timeout_s: float
    slice_s: float
    poll_s: float
    connect_s: float = CONNECT_TIMEOUT_S

    @classmethod
    def from_config(cls, config: CacheTransceiverConfig, connect_s: float = CONNECT_TIMEOUT_S) -> TransferTimes:
        """The times that a configuration asks for; without a timeout nothing is ever overdue."""
        timeout_ms = config.kv_transfer_timeout_ms
        return cls(
            timeout_s=math.inf if timeout_ms is None else timeout_ms / 1000,
            slice_s=(config.kv_transfer_sender_future_timeout_ms or FALLBACK_MS) / 1000,
            poll_s=(config.kv_transfer_poll_interval_ms or FALLBACK_MS) / 1000,
            connect_s=connect_s,
        )

    def deadline_unix_ms(self, now_unix_ms: int) -> int | None:
        """When a transfer that begins now is overdue, in milliseconds since the Unix epoch; None for never."""
        return None if math.isinf(self.timeout_s) else now_unix_ms + round(self.timeout_s * 1000)


def idle_wait_ms(config: CacheTransceiverConfig, *, tracked_transfers: bool, busy: bool) -> int | None:
    """How long an executor may wait for new requests, in milliseconds.

    Args:
        config: the server's transfer settings.
        tracked_transfers: whether any transfer is open, on this or on a peer rank.
        busy: whether there is work to run now.

    Returns:
        0 when busy; None (no bound from transfers) when nothing is tracked; else the smaller of poll interval and
        transfer timeout. After such a wait the executor sweeps timeouts, then polls with 0, in this order.
    """
    if busy:
        return 0
    if not tracked_transfers:
        return None
    interval_ms = config.kv_transfer_poll_interval_ms or FALLBACK_MS
    timeout_ms = config.kv_transfer_timeout_ms
    return interval_ms if timeout_ms is None else min(interval_ms, timeout_ms)


class Waiter(Protocol):
    """How a poll waits for whoever changes sessions, on one thread. An executor brings its own, to hear of more."""

    @property
    def bell(self) -> Doorbell:
        """Ends waits. Peers ring it who have read pages on loan."""

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """Wait until :meth:`notify` or for ``seconds``, or shorter. The caller holds the lock of ``changed``, once.

        Returns:
            False when the caller's thread is needed elsewhere: the poll is to return with what it has.
        """

    def notify(self, changed: threading.Condition) -> None:
        """A session has changed. Called on any thread, which holds the lock of ``changed``; must not block."""


class BellWaiter:
    """Waits in real time, for nothing but changes of sessions."""

    def __init__(self) -> None:
        self.bell = Doorbell()

    def wait(self, changed: threading.Condition, seconds: float) -> bool:
        """See :meth:`Waiter.wait`."""
        changed.release()
        try:
            self.bell.wait(seconds)
            self.bell.silence()
        finally:
            changed.acquire()
        return True

    def notify(self, _changed: threading.Condition) -> None:
        """See :meth:`Waiter.notify`."""
        self.bell.ring()
