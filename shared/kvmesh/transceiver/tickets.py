"""Tickets: the signed, single-use right to read one request's pages.

A ticket on the wire is the msgpack of :class:`kvmesh.protocol.transfer.Ticket` followed by its HMAC-SHA256 (32 bytes)
under a key derived from the cluster secret. Only page owners mint tickets; anyone with the secret can check one.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from collections import OrderedDict

import msgspec

from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.transfer import Claim, Ticket
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.transceiver.types import PeerKey

__all__ = [
    "CLOCK_SKEW_MS",
    "NEVER_UNIX_MS",
    "NONCE_BYTES",
    "PromptMismatchError",
    "Signer",
    "SpentNonces",
    "TicketError",
    "check_endpoint",
    "check_ticket",
]

MAC_BYTES = hashlib.sha256().digest_size
HASH_BLOCK_BYTES = hashlib.sha256().block_size
MAX_TICKET_BYTES = 4096
MAX_HOST_LENGTH = 253
"""Far above any real ticket; bounds what an unauthenticated peer can make us hash and decode."""
NONCE_BYTES = 16
CLOCK_SKEW_MS = 300_000
"""How far the clocks of two hosts may be apart: 5 minutes, as in Kerberos (RFC 4120, section 5.6). Each engine judges
what it signed itself by its own clock, exactly.
"""
MAX_SPENT_NONCES = 65_536
NEVER_UNIX_MS = (1 << 63) - 1
"""The expiry of a ticket for a transfer without a deadline."""

_decoder = msgspec.msgpack.Decoder(Ticket)
_encoder = msgspec.msgpack.Encoder()


class TicketError(ApiError):
    """A ticket that is not accepted: status 403 and a precise code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(403, message, type="permission_error", code=code)


class PromptMismatchError(TicketError):
    """A good ticket in the wrong request: its pages hold another prompt. Status 400, code ``ticket_mismatch``."""

    def __init__(self, message: str) -> None:
        super().__init__("ticket_mismatch", message)
        self.status, self.type = 400, "invalid_request_error"


class Signer:
    """Signs and opens byte strings for one purpose, so that a signature for one cannot serve another.

    Args:
        cluster_secret: what every member of the mesh shares.
        purpose: e.g. ``"ticket"``; part of the key.
    """

    def __init__(self, cluster_secret: bytes, purpose: str) -> None:
        key = hmac.digest(cluster_secret, f"kvmesh {purpose} 1".encode(), "sha256").ljust(HASH_BLOCK_BYTES, b"\0")
        # RFC 2104, section 4: the state after the padded key, computed once, takes half of the time of hmac.digest.
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in key))

    def mac(self, payload: bytes) -> bytes:
        """HMAC-SHA256 of ``payload``, 32 bytes."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(payload)
        outer.update(inner.digest())
        return outer.digest()

    def verifies(self, payload: bytes, mac: bytes) -> bool:
        """Whether ``mac`` is that of ``payload``; constant time."""
        return hmac.compare_digest(self.mac(payload), mac)

    def sign_ticket(self, ticket: Ticket) -> bytes:
        """The ticket as it travels."""
        payload = _encoder.encode(ticket)
        return payload + self.mac(payload)

    def open_ticket(self, token: bytes) -> Ticket:
        """The ticket in ``token``.

        Raises:
            TicketError: ``ticket_forged`` when it was not signed with this secret or is no ticket at all.
        """
        payload, mac = token[:-MAC_BYTES], token[-MAC_BYTES:]
        if not payload or len(token) > MAX_TICKET_BYTES or not self.verifies(payload, mac):
            raise TicketError("ticket_forged", "the transfer ticket was not signed by a member of this cluster")
        try:
            return _decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise TicketError("ticket_forged", f"the transfer ticket cannot be read: {error}") from error


@functools.lru_cache(maxsize=1024)
def check_endpoint(endpoint: str) -> None:
    """Check that somebody can be asked at an address.

    Raises:
        TicketError: ``endpoint_invalid``.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_name = host.isascii() and host.isprintable() and 0 < len(host) <= MAX_HOST_LENGTH
    is_port = port.isascii() and port.isdecimal() and len(port) <= len("65535") and 0 < int(port) < 1 << 16
    if not (endpoint.startswith("tcp://") and is_name and is_port):
        raise TicketError("endpoint_invalid", f"nobody can be reached at {endpoint[:MAX_HOST_LENGTH]!r}")


def check_ticket(
    ticket: Ticket, *, transfer_id: int, owner: PeerKey | None = None, now_unix_ms: int | None = None
) -> None:
    """Check what a valid signature does not say.

    Args:
        ticket: an opened ticket.
        transfer_id: the transfer it is presented for.
        owner: this engine when it is asked for pages; None at a receiver, which reads the owner from the ticket.
        now_unix_ms: the present by this engine's clock, which at a receiver may be :data:`CLOCK_SKEW_MS` from the
            owner's; None where it does not matter whether the ticket has expired.

    Raises:
        TicketError: ``ticket_protocol``, ``ticket_mismatch``, ``ticket_foreign``, ``ticket_stale_epoch`` or
            ``ticket_expired``.
    """
    if ticket.protocol != PROTOCOL_VERSION:
        raise TicketError(
            "ticket_protocol", f"the ticket speaks protocol {ticket.protocol}, this engine {PROTOCOL_VERSION}"
        )
    if ticket.transfer_id != transfer_id:
        raise TicketError(
            "ticket_mismatch", f"the ticket is for transfer {ticket.transfer_id}, presented for {transfer_id}"
        )
    if owner is not None and ticket.owner_instance_id != owner.instance_id:
        raise TicketError(
            "ticket_foreign", f"the ticket is for pages of {ticket.owner_instance_id}, presented to {owner.instance_id}"
        )
    if owner is not None and ticket.owner_epoch != owner.epoch:
        raise TicketError(
            "ticket_stale_epoch",
            f"the ticket is of epoch {ticket.owner_epoch} of {owner.instance_id}, which is now at epoch {owner.epoch}",
        )
    skew_ms = CLOCK_SKEW_MS if owner is None else 0
    if now_unix_ms is not None and now_unix_ms >= ticket.expires_unix_ms + skew_ms:
        late_ms = now_unix_ms - ticket.expires_unix_ms
        clocks = "" if owner is not None else " by this host's clock; are the clocks of both hosts right?"
        raise TicketError(
            "ticket_expired",
            f"the ticket for transfer {transfer_id}, which lives for kv_transfer_timeout_ms, expired {late_ms} ms "
            f"ago{clocks}",
        )


class SpentNonces:
    """The nonces of tickets and claims that were redeemed, kept while those could pass as valid; bounded."""

    def __init__(self, capacity: int = MAX_SPENT_NONCES) -> None:
        self._capacity = capacity
        self._spent: OrderedDict[bytes, int] = OrderedDict()
        """By nonce, when it expires."""

    def __len__(self) -> int:
        return len(self._spent)

    def spend(self, right: Ticket | Claim, now_unix_ms: int) -> None:
        """Mark a ticket, or a claim, as used.

        Args:
            right: what is redeemed.
            now_unix_ms: the present by this engine's clock.

        Raises:
            TicketError: ``ticket_replayed`` or ``claim_replayed`` when it was used before.
        """
        spent = self._spent
        while spent and (len(spent) >= self._capacity or next(iter(spent.values())) <= now_unix_ms):
            spent.popitem(last=False)
        if right.nonce in spent:
            kind = "ticket" if isinstance(right, Ticket) else "claim"
            raise TicketError(f"{kind}_replayed", f"the {kind} for transfer {right.transfer_id} was already used")
        skew_ms = 0 if isinstance(right, Ticket) else CLOCK_SKEW_MS
        spent[right.nonce] = right.expires_unix_ms + skew_ms
