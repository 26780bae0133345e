"""KV transfers between engines: a prompt's pages go from the engine that computed them to the one that decodes.

The path of one transfer, and the module that each step lives in:

1. The owner opens a send session over a page lease and signs a ticket (``sender``, ``tickets``).
2. The receiver opens a receive session; the first one for an owner introduces itself (``receiver``, ``links``,
   ``handshake``) over the control connections (``control``, ``connection``).
3. It presents the ticket and asks for the blocks that it lacks; the owner checks and grants them, or writes them
   (``sender``, ``serving``).
4. A data plane moves the bytes (``planes``): the receiver reads (built-in) or the owner writes (NIXL).
5. The receiver compares checksums (``integrity``) and acknowledges (``pulling``).
6. Each side's executor hears how it ended and leases are released, or kept in ``quarantine`` while anyone may still
   touch their pages (``table``).

Generation first, 1 and 2 change places: the receiver signs a claim to a prompt that is still to be computed
(``claims``), the owner remembers it (``early``, ``early_sender``), and the prompt goes out in slices (``promises``,
``slices``), whose arrival the receiver checks (``arrivals``).

States are pure functions (``states``), waits follow ``timing``, and which backend is used is decided
in :mod:`kvmesh.config.transfer_backend`.
Fault points: ``transceiver.before_request``, ``before_send``, ``during_transfer``, ``during_send`` (TCP, owner),
``after_write`` (NIXL) and ``before_ack``.
"""

from __future__ import annotations

from kvmesh.config.transfer_backend import ServerFacts, TransceiverConfigError
from kvmesh.transceiver.factory import create_transceiver
from kvmesh.transceiver.sessions import CANCEL_REPEAT_S
from kvmesh.transceiver.table import DuplicateTransferError
from kvmesh.transceiver.tickets import TicketError
from kvmesh.transceiver.timing import idle_wait_ms
from kvmesh.transceiver.transceiver import Transceiver, TransceiverDeadError
from kvmesh.transceiver.types import (
    PageLease,
    PoolMemory,
    TransceiverStats,
    TransferFailure,
    TransferNotes,
    TransferPoll,
    TransferSize,
)

__all__ = [
    "CANCEL_REPEAT_S",
    "DuplicateTransferError",
    "PageLease",
    "PoolMemory",
    "ServerFacts",
    "TicketError",
    "Transceiver",
    "TransceiverConfigError",
    "TransceiverDeadError",
    "TransceiverStats",
    "TransferFailure",
    "TransferNotes",
    "TransferPoll",
    "TransferSize",
    "create_transceiver",
    "idle_wait_ms",
]
