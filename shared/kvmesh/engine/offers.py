"""The context side of generation-first requests: who still waits for a receiver, and what goes out of a prompt when.

A request waits outside the scheduler's queue, holding no pages, until its receiver has asked for the prompt. Then it is
computed like any other; slices of it go out while that happens where transfers are pipelined, else all of it at the
end. Every slice has a lease of its own, which the transceiver keeps until nobody reads the pages any more.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from kvmesh.engine.sequence import Phase, Sequence
from kvmesh.protocol.transfer import Aux
from kvmesh.transceiver import Transceiver
from kvmesh.transceiver.slices import BlockSpan, chunk_blocks, group_spans

__all__ = ["EarlyOffers"]


@dataclass(slots=True)
class _Offer:
    seq: Sequence
    computed_to: int | None = None
    """Tokens behind the last chunk that was noted; None before the first."""
    has_sent: bool = False
    """Whether a slice of it goes out, or has."""


class EarlyOffers:
    """By transfer id, from the request's arrival until its whole prompt was offered.

    Args:
        transceiver: sends.
        windows: of each layer group in tokens, None for full attention.
        tokens_per_block: tokens in a block.
        settle: waits until what was computed is in the pages (on CUDA the stream may be behind).
    """

    def __init__(
        self,
        transceiver: Transceiver,
        windows: Many[int | None],
        tokens_per_block: int,
        settle: Callable[[], None],
    ) -> None:
        self._transceiver = transceiver
        self._windows = windows
        self._tokens_per_block = tokens_per_block
        self._settle = settle
        self._offers: dict[int, _Offer] = {}

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._offers

    @property
    def num_waiting(self) -> int:
        """Requests whose receiver has not come."""
        return sum(offer.seq.phase is Phase.AWAITING_RECEIVER for offer in self._offers.values())

    def is_waiting(self, transfer_id: int) -> bool:
        """Whether a request waits for its receiver."""
        offer = self._offers.get(transfer_id)
        return offer is not None and offer.seq.phase is Phase.AWAITING_RECEIVER

    def expect(self, seq: Sequence, prompt_digest: bytes) -> None:
        """Wait for the receiver of a request.

        Raises:
            ValueError: a transfer with this id is open already.
        """
        self._transceiver.expect_receiver(seq.transfer_id, seq.request_id, seq.history.prompt_length, prompt_digest)
        self._offers[seq.transfer_id] = _Offer(seq)
        seq.phase = Phase.AWAITING_RECEIVER

    def take_claimed(self) -> list[Sequence]:
        """Requests whose receiver has come since the last call: they may be computed now."""
        if not self._offers:
            return []
        claimed = [self._offers.get(transfer_id) for transfer_id in self._transceiver.take_claimed()]
        return [offer.seq for offer in claimed if offer is not None]

    def take(self, transfer_id: int) -> Sequence | None:
        """The request of a transfer that has ended before its prompt was offered; it is forgotten."""
        offer = self._offers.pop(transfer_id, None)
        return None if offer is None else offer.seq

    def chunk_done(self, seq: Sequence, start: int, end: int) -> None:
        """Tokens ``[start, end)`` of a prompt that goes on are in its pages: send what is full of it.

        Of a transfer that is over nothing more is sent; the executor hears of its end by itself.
        """
        offer = self._offers.get(seq.transfer_id)
        if offer is None:
            return
        span = self._span(offer, start, end, is_last=False)
        offer.computed_to = end
        if not span.is_empty:
            offer.has_sent = True
            self._send(seq, span, None)

    def prompt_done(self, seq: Sequence, aux: Aux) -> bool:
        """The prompt is computed, and ``aux`` says how it goes on: send what is left of it.

        Nothing is sent of a prompt whose first token ended the answer. But where a part is on its way the rest follows:
        the last slice tells the receiver that nobody writes into its pages any more.

        Returns:
            False when the transfer is over: its receiver will never have the prompt.
        """
        offer = self._offers.pop(seq.transfer_id, None)
        if offer is None:
            return False
        if aux.finished and not offer.has_sent:
            return self._transceiver.send_nothing(seq.transfer_id, aux)
        end = seq.history.prompt_length
        start = offer.computed_to
        return self._send(seq, self._span(offer, 0 if start is None else start, end, is_last=True), aux)

    def _span(self, offer: _Offer, start: int, end: int, *, is_last: bool) -> BlockSpan:
        is_first = offer.computed_to is None
        return chunk_blocks(start, end, self._tokens_per_block, is_first=is_first, is_last=is_last)

    def _send(self, seq: Sequence, span: BlockSpan, aux: Aux | None) -> bool:
        assert seq.cache is not None
        is_last = aux is not None
        length = seq.history.prompt_length
        spans = group_spans(span, self._windows, length, is_last=is_last)
        if is_last:
            lease = seq.cache.hold(length)
        else:
            # Pages that a window will pass must not be kept by a lease that sends none of them.
            groups = [group for group, sent in enumerate(spans) if not sent.is_empty]
            lease = seq.cache.hold(span.end * self._tokens_per_block, groups)
        self._settle()
        return self._transceiver.send_slice(seq.transfer_id, lease, spans, aux)
