"""The engine's side of KV transfers: leases, deadlines and endings, over whatever transceiver there is.

Pages are never looked up again once a transfer has begun: the lease taken at its start names them. The sequence that
asked may go away at any time; the transceiver keeps the lease until every reader and writer is terminal.
"""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.config import CacheTransceiverConfig
from kvmesh.engine.sequence import Sequence
from kvmesh.net.clock import Clock
from kvmesh.protocol.errors import ApiError
from kvmesh.transceiver import Transceiver
from kvmesh.transceiver.timing import idle_wait_ms
from kvmesh.transceiver.types import TransferPoll

__all__ = ["TransferDesk", "TransferEnd", "poll_pause_s"]


SHORTEST_PAUSE_S = 0.001
"""The polling step of a transfer that has just begun."""
LONGEST_PAUSE_S = 0.1
PAUSE_SHARE = 0.05
"""A pause is this share of the time since the last change: a transfer is noticed at most 5 % late, at little cost."""


def poll_pause_s(quiet_s: float, bound_s: float) -> float:
    """Pause between two looks at open transfers, ``quiet_s`` after anything changed; at most ``bound_s``.

    The loop waits for requests during the pause, so a new one, an abort or a ping never waits for a transfer.
    """
    return min(max(SHORTEST_PAUSE_S, min(quiet_s * PAUSE_SHARE, LONGEST_PAUSE_S)), bound_s)


class TransferEnd(NamedTuple):
    """A received prompt is here (``error`` is None), or will not come."""

    seq: Sequence
    error: ApiError | None


class TransferDesk:
    """Starts, polls and cancels transfers. Single-threaded, never blocks unless asked to.

    Args:
        transceiver: moves the pages.
        config: for the idle wait and for messages.
        clock: for time stamps.
    """

    def __init__(self, transceiver: Transceiver, config: CacheTransceiverConfig, clock: Clock) -> None:
        self.transceiver = transceiver
        self._config = config
        self._clock = clock
        self._receiving: dict[int, Sequence] = {}
        self._sending: dict[int, str] = {}
        """Outgoing transfer id -> request id, so that an abort after the hand-off finds it."""
        self._cancelling: set[int] = set()
        """Cancelled, but not drained yet: asked again in every sweep."""
        self._changed_s = clock.monotonic_s()
        """When a transfer last began or ended."""

    @property
    def num_receiving(self) -> int:
        """Sequences whose prompt is on its way."""
        return len(self._receiving)

    @property
    def is_tracking(self) -> bool:
        """Whether any transfer is open, or its pages are not back yet."""
        return self.transceiver.has_tracked_transfers

    def idle_wait_s(self) -> float | None:
        """How long an idle loop may wait before it looks at the tracked transfers again; None when there are none."""
        bound_ms = idle_wait_ms(self._config, tracked_transfers=self.is_tracking, busy=False)
        if bound_ms is None:
            return None
        return poll_pause_s(self._clock.monotonic_s() - self._changed_s, bound_ms / 1e3)

    def knows(self, transfer_id: int) -> bool:
        """Whether a transfer with this id is open at this engine."""
        return transfer_id in self._receiving or transfer_id in self._sending or transfer_id in self._cancelling

    def send(self, seq: Sequence) -> bytes:
        """Offer the pages of a finished prompt; returns the hand-off for the generation server.

        The lease outlives the sequence's cache, which may be closed right after.
        """
        assert seq.cache is not None
        length = seq.history.prompt_length
        lease = seq.cache.hold(length)
        handoff = self.transceiver.respond_and_send(
            seq.transfer_id, seq.request_id, lease, num_tokens=length, seed=seq.params.seed
        )
        self._sending[seq.transfer_id] = seq.request_id
        self._changed_s = self._clock.monotonic_s()
        return handoff

    def receive(self, seq: Sequence, first_missing_blocks: list[int]) -> None:
        """Ask for the blocks of a prompt from ``first_missing_blocks`` (one per layer group) on.

        Raises:
            ApiError: the hand-off is not accepted (403), or its sender cannot be reached or does not fit (503).
        """
        assert seq.cache is not None
        assert seq.handoff is not None
        lease = seq.cache.hold(seq.history.prompt_length)
        self.transceiver.request_and_receive(seq.transfer_id, seq.request_id, seq.handoff, lease, first_missing_blocks)
        seq.timings.transfer_start_ns = self._clock.unix_ns()
        self._receiving[seq.transfer_id] = seq
        self._changed_s = self._clock.monotonic_s()

    def sweep(self) -> None:
        """Flag transfers past their deadline and go on cancelling; called in every iteration, idle ones too."""
        if self.is_tracking:
            self.transceiver.sweep_timeouts()
        self._cancelling = {open_id for open_id in self._cancelling if not self.transceiver.cancel_request(open_id)}

    def poll(self) -> list[TransferEnd]:
        """What has ended since the last poll; does not wait."""
        if not self.is_tracking:
            return []
        outgoing = self.transceiver.check_context_transfer_status(0)
        incoming = self.transceiver.check_gen_transfer_status(0)
        if any(outgoing) or any(incoming):
            self._changed_s = self._clock.monotonic_s()
        self._settle_outgoing(outgoing)
        return self._settle_incoming(incoming)

    def cancel(self, transfer_id: int) -> None:
        """Stop a transfer in either direction; its pages return once the peer is quiet."""
        self._receiving.pop(transfer_id, None)
        self._sending.pop(transfer_id, None)
        if not self.transceiver.cancel_request(transfer_id):
            self._cancelling.add(transfer_id)

    def outgoing_of(self, request_id: str) -> int | None:
        """The open outgoing transfer of a finished context request."""
        return next((transfer_id for transfer_id, owner in self._sending.items() if owner == request_id), None)

    def _settle_outgoing(self, poll: TransferPoll) -> None:
        for transfer_id in (*poll.completed, *poll.cancelled, *(failure.id for failure in poll.failed)):
            self._sending.pop(transfer_id, None)
            self._cancelling.discard(transfer_id)
        for transfer_id in poll.timed_out:
            self.cancel(transfer_id)

    def _settle_incoming(self, poll: TransferPoll) -> list[TransferEnd]:
        ends = [self._end(transfer_id, None) for transfer_id in poll.completed]
        ends += [
            self._end(
                failure.id,
                ApiError(failure.status, failure.message, type="service_unavailable_error", code=failure.code),
            )
            for failure in poll.failed
        ]
        ends += [self._end(transfer_id, _cancelled_by_sender()) for transfer_id in poll.cancelled]
        for transfer_id in poll.timed_out:
            ends.append(self._end(transfer_id, self._timeout()))
            self.cancel(transfer_id)
        return [end for end in ends if end is not None]

    def _end(self, transfer_id: int, error: ApiError | None) -> TransferEnd | None:
        self._cancelling.discard(transfer_id)
        seq = self._receiving.pop(transfer_id, None)
        if seq is None:
            return None  # Cancelled here before: its sequence is gone.
        seq.timings.transfer_end_ns = self._clock.unix_ns()
        return TransferEnd(seq, error)

    def _timeout(self) -> ApiError:
        return ApiError(
            503,
            f"The KV cache did not arrive within kv_transfer_timeout_ms ({self._config.kv_transfer_timeout_ms} ms); "
            "send the request again.",
            type="service_unavailable_error",
            code="kv_transfer_timeout",
            retry_after_s=1,
        )


def _cancelled_by_sender() -> ApiError:
    return ApiError(
        503,
        "The context server cancelled the transfer of the KV cache; send the request again.",
        type="service_unavailable_error",
        code="kv_transfer_cancelled",
        retry_after_s=1,
    )
