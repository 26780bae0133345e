"""KV transfers between engines: a prompt's pages go from the engine that computed them to the one that decodes."""

from __future__ import annotations

from kvmesh.transceiver.factory import create_transceiver
from kvmesh.transceiver.resolve import ServerFacts, TransceiverConfigError
from kvmesh.transceiver.table import DuplicateTransferError
from kvmesh.transceiver.tickets import TicketError
from kvmesh.transceiver.timing import idle_wait_ms
from kvmesh.transceiver.transceiver import Transceiver, TransceiverDeadError
from kvmesh.transceiver.types import PageLease, PoolMemory, TransceiverStats, TransferFailure, TransferPoll

__all__ = [
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
    "TransferPoll",
    "create_transceiver",
    "idle_wait_ms",
]
