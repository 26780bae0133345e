"""The engine's side of KV transfers: leases, deadlines and endings, over whatever transceiver there is.

Pages are never looked up again once a transfer has begun: the lease taken at its start names them. The sequence that
asked may go away at any time; the transceiver keeps the lease until every reader and writer is terminal.
"""

from __future__ import annotations

import contextlib
from typing import Literal, NamedTuple

from kvmesh.config import CacheTransceiverConfig
from kvmesh.engine.offers import EarlyOffers
from kvmesh.engine.sequence import Sequence
from kvmesh.engine.waiting import LoopWaiter
from kvmesh.hashing import v2_partial_key, v2_root
from kvmesh.net.clock import Clock
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.transfer import Aux
from kvmesh.transceiver import (
    CANCEL_REPEAT_S,
    PageLease,
    TicketError,
    Transceiver,
    TransferFailure,
    TransferNotes,
    TransferPoll,
    TransferSize,
    idle_wait_ms,
)

__all__ = ["TransferDesk", "TransferEnd"]

_FORBIDDEN = 403
_UNAVAILABLE = 503
_RETRY_AFTER_S = 1


class TransferEnd(NamedTuple):
    """A received prompt is here (``error`` is None) or will not come; or nobody takes one that is being computed."""

    seq: Sequence
    error: ApiError | None
    aux: Aux | None = None
    """Generation first: what the context server said with the prompt."""


class TransferDesk:
    """Starts, polls and cancels transfers. Single-threaded; only :meth:`wait` waits.

    Args:
        transceiver: moves the pages; its polls wait with ``waiter``.
        config: for the idle wait and for messages.
        waiter: bounds those waits.
        clock: for time stamps.
        offers: the context side of generation-first requests.
    """

    def __init__(
        self,
        transceiver: Transceiver,
        config: CacheTransceiverConfig,
        waiter: LoopWaiter,
        clock: Clock,
        offers: EarlyOffers,
    ) -> None:
        self.transceiver = transceiver
        self.offers = offers
        self._config = config
        self._waiter = waiter
        self._clock = clock
        self._receiving: dict[int, tuple[Sequence, TransferSize]] = {}
        self._sending: dict[int, str] = {}
        """Outgoing transfer id -> request id, so that an abort after the hand-off finds it."""
        self._cancelling: set[int] = set()
        """Cancelled, but not drained yet: asked again in every sweep."""
        self._ended: list[TransferEnd] = []
        """Seen while waiting, for the next look."""

    @property
    def num_receiving(self) -> int:
        """Sequences whose prompt is on its way."""
        return len(self._receiving)

    @property
    def is_tracking(self) -> bool:
        """Whether any transfer is open, or its pages are not back yet."""
        return self.transceiver.has_tracked_transfers

    def idle_wait_s(self) -> float | None:
        """How long a loop without work may wait before it looks at the tracked transfers; None when there are none.

        A transfer that progresses ends such a wait; the bound is for peers that say nothing.
        """
        awaits_quiet = self.transceiver.awaits_quiet
        bound_ms = idle_wait_ms(self._config, tracked_transfers=self.is_tracking or awaits_quiet, busy=False)
        if bound_ms is None:
            return None
        if self._cancelling or awaits_quiet:
            return min(bound_ms / 1e3, CANCEL_REPEAT_S)
        return bound_ms / 1e3

    def wait(self, bound_s: float, *, blocked: bool) -> bool:
        """Wait, ``bound_s`` at most, for a transfer that holds up everything else; what ends is for the next look.

        Args:
            bound_s: when the loop has something else to do.
            blocked: sequences need pages that are in use.

        Returns:
            Whether there was such a transfer. It has not necessarily ended: any message, and any progress, ends the
            wait.
        """
        with self._waiter.limited(bound_s):
            if blocked and self._sending:
                poll = self.transceiver.check_context_transfer_status(1)
            elif self._receiving:
                poll = self.transceiver.check_gen_transfer_status(1)
            else:
                return False
        self._ended += self._settle(poll)
        return True

    def make_way(self) -> bool:
        """Pages are short: let finished prompts that wait to be fetched move to a colder tier; whether any now may."""
        return bool(self._sending) and self.transceiver.let_waiting_pages_move() > 0

    def knows(self, transfer_id: int) -> bool:
        """Whether a transfer with this id is open at this engine."""
        return (
            transfer_id in self._receiving
            or transfer_id in self._sending
            or transfer_id in self._cancelling
            or transfer_id in self.offers
        )

    def expect(self, seq: Sequence) -> None:
        """Generation first: keep a context request until its receiver has asked for the prompt.

        Raises:
            ApiError: 400, a transfer with this id is open already.
        """
        try:
            self.offers.expect(seq, _prompt_digest(seq))
        except ValueError as error:
            message = f"The request cannot wait for its receiver: {error}."
            raise bad_request(message, param="disaggregated_params") from error

    def offer(self, seq: Sequence, aux: Aux) -> None:
        """Generation first: the prompt is computed; send what has not been sent of it, and ``aux``.

        Raises:
            ApiError: 503, the receiver is gone.
        """
        if not self.offers.prompt_done(seq, aux):
            raise _cancelled_by_peer("generation")
        self._sending[seq.transfer_id] = seq.request_id

    def send(self, seq: Sequence) -> bytes:
        """Offer the pages of a finished prompt; returns the hand-off for the generation server.

        The lease outlives the sequence's cache, which may be closed right after.

        Raises:
            ApiError: 400, a transfer with this id is open already.
        """
        assert seq.cache is not None
        length = seq.history.prompt_length
        lease = seq.cache.hold(length)
        try:
            handoff = self.transceiver.respond_and_send(
                seq.transfer_id,
                seq.request_id,
                lease,
                num_tokens=length,
                seed=seq.params.seed,
                prompt_digest=_prompt_digest(seq),
            )
        except Exception as error:
            lease.release()
            if not isinstance(error, ValueError):
                raise
            raise bad_request(f"The KV cache cannot be offered: {error}.", param="disaggregated_params") from error
        self._sending[seq.transfer_id] = seq.request_id
        return handoff

    def receive(self, seq: Sequence, first_missing_blocks: list[int]) -> None:
        """Ask for the blocks of a prompt from ``first_missing_blocks`` (one per layer group) on.

        Raises:
            ApiError: the hand-off is not accepted (403), or is for another prompt or does not fit (400).
        """
        assert seq.cache is not None
        lease = seq.cache.hold(seq.history.prompt_length)
        began_ns = self._clock.unix_ns()
        try:
            size = self._request(seq, lease, first_missing_blocks)
        except Exception as error:
            lease.release()
            if not isinstance(error, ValueError):
                raise
            raise bad_request(
                f"The hand-off does not fit the request: {error}.", param="disaggregated_params", code="invalid_handoff"
            ) from error
        seq.timings.transfer_start_ns = began_ns
        self._receiving[seq.transfer_id] = seq, size

    def _request(self, seq: Sequence, lease: PageLease, first_missing_blocks: list[int]) -> TransferSize:
        digest = _prompt_digest(seq)
        if seq.handoff is None:
            return self.transceiver.claim_and_receive(
                seq.transfer_id,
                seq.request_id,
                seq.ctx_address,
                lease,
                first_missing_blocks,
                seq.history.prompt_length,
                digest,
            )
        return self.transceiver.request_and_receive(
            seq.transfer_id, seq.request_id, seq.handoff, lease, first_missing_blocks, digest
        )

    def decline(self, transfer_id: int, source: HandOff | bytes) -> None:
        """Tell the context server that nobody will ask for these pages here.

        Args:
            transfer_id: of the transfer.
            source: its hand-off; generation first, the address of the context server.
        """
        with contextlib.suppress(TicketError):  # Then there is nothing that this engine may decline.
            if isinstance(source, HandOff):
                self.transceiver.decline(transfer_id, source)
            else:
                self.transceiver.decline_claim(transfer_id, source)

    def look(self) -> list[TransferEnd]:
        """What has ended since the last look; called in every iteration, idle ones too, and never waits.

        Timeouts are swept first, so that an overdue transfer is cancelled even if nothing else happens.
        """
        ends, self._ended = self._ended, []
        self._cancelling = {one for one in self._cancelling if not self.transceiver.cancel_request(one)}
        if not (self.is_tracking or self.transceiver.awaits_quiet):
            return ends
        overdue = self.transceiver.sweep_timeouts()
        ends += self._settle(self.transceiver.check_context_transfer_status(0))
        ends += self._settle(self.transceiver.check_gen_transfer_status(0))
        return ends + [end for transfer_id in overdue if (end := self._expire(transfer_id)) is not None]

    def cancel(self, transfer_id: int) -> None:
        """Stop a transfer in either direction; its pages return once the peer is quiet."""
        self.offers.take(transfer_id)
        self._receiving.pop(transfer_id, None)
        self._sending.pop(transfer_id, None)
        # It may have ended in a wait, and its sequence have been aborted before the next look.
        self._ended = [end for end in self._ended if end.seq.transfer_id != transfer_id]
        if not self.transceiver.cancel_request(transfer_id):
            self._cancelling.add(transfer_id)

    def outgoing_of(self, request_id: str) -> int | None:
        """The open outgoing transfer of a finished context request."""
        return next((transfer_id for transfer_id, owner in self._sending.items() if owner == request_id), None)

    def _settle(self, poll: TransferPoll) -> list[TransferEnd]:
        ends = [self._end(transfer_id, None, poll.notes.get(transfer_id)) for transfer_id in poll.completed]
        ends += [self._end(failure.id, _failure(failure)) for failure in poll.failed]
        ends += [self._end(transfer_id, self._cancelled(transfer_id)) for transfer_id in poll.cancelled]
        ends += [self._expire(transfer_id) for transfer_id in poll.timed_out]
        return [end for end in ends if end is not None]

    def _expire(self, transfer_id: int) -> TransferEnd | None:
        is_waiting = self.offers.is_waiting(transfer_id)
        end = self._end(transfer_id, self._no_receiver() if is_waiting else self._timeout())
        self.cancel(transfer_id)
        return end

    def _end(self, transfer_id: int, error: ApiError | None, notes: TransferNotes | None = None) -> TransferEnd | None:
        self._sending.pop(transfer_id, None)
        if (seq := self.offers.take(transfer_id)) is not None:
            # Whatever a receiver says: before its prompt was offered, a transfer cannot end well.
            return TransferEnd(seq, error or _cancelled_by_peer("generation"))
        aux = self.transceiver.take_aux(transfer_id)
        incoming = self._receiving.pop(transfer_id, None)
        if incoming is None:
            return None  # An outgoing one, or cancelled here before: nobody waits for it.
        seq, size = incoming
        seq.timings.transfer_end_ns = self._clock.unix_ns()
        if notes is not None:
            seq.timings.first_slice_s = notes.first_slice_s
            seq.timings.slices = notes.slices_ns if seq.traced else []
        if error is not None:
            return TransferEnd(seq, error)
        if aux is None or not aux.finished:
            seq.timings.transfer_pages, seq.timings.transfer_bytes = size
        return TransferEnd(seq, None, aux)

    def _cancelled(self, transfer_id: int) -> ApiError:
        return _cancelled_by_peer("generation" if transfer_id in self.offers else "context")

    def _timeout(self) -> ApiError:
        return ApiError(
            503,
            f"The KV cache did not arrive within kv_transfer_timeout_ms ({self._config.kv_transfer_timeout_ms} ms); "
            "send the request again.",
            type="service_unavailable_error",
            code="kv_transfer_timeout",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _no_receiver(self) -> ApiError:
        return ApiError(
            503,
            "No generation server has asked for this prompt within kv_transfer_timeout_ms "
            f"({self._config.kv_transfer_timeout_ms} ms); send the request again.",
            type="service_unavailable_error",
            code="kv_receiver_timeout",
            retry_after_s=_RETRY_AFTER_S,
        )


def _prompt_digest(seq: Sequence) -> bytes:
    """SHA-256 of the scope's root key and all tokens of the prompt: as one block, so that block sizes play no part."""
    return v2_partial_key(seq.history.slice(0, seq.history.prompt_length), v2_root(seq.scope))


def _failure(failure: TransferFailure) -> ApiError:
    kind = "permission_error" if failure.status == _FORBIDDEN else "service_unavailable_error"
    again_s = _RETRY_AFTER_S if failure.status == _UNAVAILABLE else None
    return ApiError(failure.status, failure.message, type=kind, code=failure.code, retry_after_s=again_s)


def _cancelled_by_peer(peer: Literal["context", "generation"]) -> ApiError:
    return ApiError(
        503,
        f"The {peer} server cancelled the transfer of the KV cache; send the request again.",
        type="service_unavailable_error",
        code="kv_transfer_cancelled",
        retry_after_s=_RETRY_AFTER_S,
    )
