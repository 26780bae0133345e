"""The interface of loans: how a plane lets the holder of a ticket read pages without asking for them.

A loan is read once: its reader takes it, in one step with the certainty that it still stood, after the last byte.
Until then its owner may take it back at any time, without asking anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvmesh.transceiver.planes.base import Part, Sums
from kvmesh.transceiver.types import PeerKey

__all__ = ["Loans", "Receipt"]


class Receipt(NamedTuple):
    """What a reader leaves with the owner, for its records: of two who read at once it may be the other one's."""

    reader: int
    """:attr:`PeerKey.number` of the reader."""
    num_pages: int
    num_bytes: int


class Loans(Protocol):
    """Methods may be called from different threads; none blocks, but :meth:`read` for as long as it copies."""

    def lend(self, transfer_id: int, nbytes: int) -> bytes:
        """Owner: let whoever presents what this returns read ``nbytes`` of a transfer, once.

        Returns:
            Empty where that is too much to be read at once.

        Raises:
            PlaneError: too much is lent at the moment.
        """

    def taken(self) -> list[tuple[int, Receipt]]:
        """Owner: the transfers that have been read since the last call, each once."""

    def recall(self, transfer_id: int) -> Receipt | None:
        """Owner: take a loan back, before anything else may happen to its pages. Unknown ones are ignored.

        Returns:
            What its reader has left, if it was read before, and :meth:`taken` has not told.
        """

    def stands(self, peer: PeerKey, access: bytes) -> bool:
        """Receiver: whether a loan can be read now; False for unknown peers."""

    def read(self, peer: PeerKey, parts: Sequence[Part], *, summed: bool) -> list[Sums]:
        """Receiver: copy pages of a peer, which are what was lent if the loan can be taken afterwards.

        Returns:
            By part the checksums of what was written, if they are asked for.

        Raises:
            PlaneError: they cannot be reached.
        """

    def take(self, peer: PeerKey, access: bytes, receipt: Receipt) -> bool:
        """Receiver: note that a loan was read.

        Returns:
            False when it did not stand any more: what was read may be anything.
        """
