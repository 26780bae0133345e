"""Claims: the signed, single-use right of one receiver to a prompt that is still to be computed (generation first).

A claim on the wire is the msgpack of :class:`kvmesh.protocol.transfer.Claim` followed by its HMAC-SHA256 under a key of
its own, derived from the cluster secret; so is the address that tells a receiver whom to ask.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvmesh.protocol.disagg import ContextAddress
from kvmesh.protocol.transfer import Claim
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.transceiver.tickets import CLOCK_SKEW_MS, MAC_BYTES, MAX_TICKET_BYTES, Signer, TicketError
from kvmesh.transceiver.types import PeerKey

__all__ = ["check_claim", "open_address", "open_claim", "sign"]

T = TypeVar("T", bound=msgspec.Struct)


def sign(signer: Signer, statement: Claim | ContextAddress) -> bytes:
    """A statement as it travels."""
    payload = msgspec.msgpack.encode(statement)
    return payload + signer.mac(payload)


def open_claim(signer: Signer, token: bytes) -> Claim:
    """The claim in ``token``.

    Raises:
        TicketError: ``claim_forged`` when it was not signed with this secret or is no claim at all.
    """
    return _open(signer, token, Claim, "claim_forged", "claim")


def open_address(signer: Signer, token: bytes) -> ContextAddress:
    """The address in ``token``.

    Raises:
        TicketError: ``address_forged`` when no context engine of this cluster signed it, ``address_protocol`` when it
            is of another version.
    """
    address = _open(signer, token, ContextAddress, "address_forged", "address of the context server")
    if address.protocol != PROTOCOL_VERSION:
        raise TicketError(
            "address_protocol", f"the context server speaks protocol {address.protocol}, this engine {PROTOCOL_VERSION}"
        )
    return address


def check_claim(claim: Claim, *, transfer_id: int, owner: PeerKey, receiver: PeerKey, now_unix_ms: int | None) -> None:
    """Check what a valid signature does not say.

    Args:
        claim: an opened claim.
        transfer_id: the transfer that it is presented for.
        owner: this engine.
        receiver: who presents it, as it has introduced itself.
        now_unix_ms: the present by this engine's clock, which may be :data:`CLOCK_SKEW_MS` from the receiver's; None
            where it does not matter whether the claim has expired.

    Raises:
        TicketError: ``claim_protocol``, ``claim_mismatch``, ``claim_foreign``, ``claim_stale_epoch`` or
            ``claim_expired``.
    """
    if claim.protocol != PROTOCOL_VERSION:
        raise TicketError(
            "claim_protocol", f"the claim speaks protocol {claim.protocol}, this engine {PROTOCOL_VERSION}"
        )
    if claim.transfer_id != transfer_id:
        raise TicketError(
            "claim_mismatch", f"the claim is for transfer {claim.transfer_id}, presented for {transfer_id}"
        )
    claimant = PeerKey(claim.receiver_instance_id, claim.receiver_epoch)
    if claimant != receiver:
        raise TicketError("claim_mismatch", f"the claim is of {claimant}, presented by {receiver}")
    if claim.owner_instance_id != owner.instance_id:
        raise TicketError(
            "claim_foreign", f"the claim is to pages of {claim.owner_instance_id}, presented to {owner.instance_id}"
        )
    if claim.owner_epoch != owner.epoch:
        raise TicketError(
            "claim_stale_epoch",
            f"the claim is to epoch {claim.owner_epoch} of {owner.instance_id}, which is now at epoch {owner.epoch}",
        )
    if now_unix_ms is not None and now_unix_ms >= claim.expires_unix_ms + CLOCK_SKEW_MS:
        late_ms = now_unix_ms - claim.expires_unix_ms
        raise TicketError(
            "claim_expired",
            f"the claim to transfer {transfer_id} expired {late_ms} ms ago by the clock of {owner.instance_id}; "
            "are the clocks of both hosts right?",
        )


def _open(signer: Signer, token: bytes, kind: type[T], code: str, what: str) -> T:
    payload, mac = token[:-MAC_BYTES], token[-MAC_BYTES:]
    if not payload or len(token) > MAX_TICKET_BYTES or not signer.verifies(payload, mac):
        raise TicketError(code, f"the {what} was not signed by a member of this cluster")
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TicketError(code, f"the {what} cannot be read: {error}") from error
