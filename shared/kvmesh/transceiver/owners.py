"""Whom a receive session asks, and with what right: hand-offs and addresses are checked before anything is opened."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from typing import NamedTuple

from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.transfer import CancelSession, Claim, Loan, Ticket
from kvmesh.transceiver.claims import open_address, sign
from kvmesh.transceiver.local import LocalEngine
from kvmesh.transceiver.tickets import (
    NEVER_UNIX_MS,
    NONCE_BYTES,
    PromptMismatchError,
    TicketError,
    check_endpoint,
    check_ticket,
)
from kvmesh.transceiver.types import PeerKey

__all__ = ["Decline", "Owner", "Owners"]

CLAIM_MS = 120_000
"""Life of a claim where transfers have no deadline."""


class Owner(NamedTuple):
    """The engine that holds the pages."""

    peer: PeerKey
    endpoint: str
    token: bytes
    """The ticket it has signed, or the claim that this engine has."""
    num_tokens: int
    is_claim: bool = False
    loan: Loan | None = None
    """Pages that may be read unasked."""
    expires_unix_ms: int = NEVER_UNIX_MS
    """Of the ticket."""


class Decline(NamedTuple):
    """What is said to an owner whose pages will not be asked for."""

    peer: PeerKey
    endpoint: str
    cancel: CancelSession


class Owners:
    """Reads what a router brings.

    Args:
        engine: this engine.
        on_refused: called before a :class:`TicketError` or :class:`PromptMismatchError` is raised; counts it.
    """

    def __init__(self, engine: LocalEngine, on_refused: Callable[[], None]) -> None:
        self._engine = engine
        self._on_refused = on_refused

    def of_handoff(self, transfer_id: int, handoff: HandOff, prompt_digest: bytes) -> Owner:
        """The owner of a prompt that is computed.

        Raises:
            TicketError: 403, the hand-off was not signed in this cluster, has expired or is for something else.
            PromptMismatchError: 400, the pages on offer hold another prompt than ``prompt_digest`` names.
        """
        ticket = self._ticket(transfer_id, handoff)
        if not hmac.compare_digest(ticket.prompt_digest, prompt_digest):
            # Else pages of one prompt would become reusable here under the keys of another.
            self._on_refused()
            raise PromptMismatchError(
                f"the hand-off of transfer {transfer_id} is for another prompt or cache_salt than this request's"
            )
        return Owner(
            peer=_key(ticket),
            endpoint=handoff.control_endpoint,
            token=handoff.ticket,
            num_tokens=ticket.num_tokens,
            loan=ticket.loan,
            expires_unix_ms=ticket.expires_unix_ms,
        )

    def of_address(self, transfer_id: int, address: bytes, num_tokens: int, prompt_digest: bytes) -> Owner:
        """The owner of a prompt that it has still to compute, with a claim to it.

        Raises:
            TicketError: 403, no context engine of this cluster signed the address.
        """
        engine = self._engine
        try:
            where = open_address(engine.addresses, address)
            check_endpoint(where.control_endpoint)
        except TicketError:
            self._on_refused()
            raise
        now_ms = engine.now_unix_ms()
        expires_ms = engine.times.deadline_unix_ms(now_ms) or now_ms + CLAIM_MS
        claim = Claim(
            transfer_id=transfer_id,
            owner_instance_id=where.instance_id,
            owner_epoch=where.epoch,
            receiver_instance_id=engine.key.instance_id,
            receiver_epoch=engine.key.epoch,
            num_tokens=num_tokens,
            prompt_digest=prompt_digest,
            expires_unix_ms=expires_ms,
            lifetime_ms=expires_ms - now_ms,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        peer = PeerKey(where.instance_id, where.epoch)
        return Owner(peer, where.control_endpoint, sign(engine.claims, claim), num_tokens, is_claim=True)

    def decline_handoff(self, transfer_id: int, handoff: HandOff) -> Decline:
        """What gives the pages of a hand-off back.

        Raises:
            TicketError: 403, as in :meth:`of_handoff`.
        """
        ticket = self._ticket(transfer_id, handoff)
        cancel = CancelSession(transfer_id=transfer_id, ticket=handoff.ticket)
        return Decline(_key(ticket), ticket.control_endpoint, cancel)

    def decline_address(self, transfer_id: int, address: bytes) -> Decline:
        """What frees an owner from a prompt that was never asked for.

        Raises:
            TicketError: 403, as in :meth:`of_address`.
        """
        owner = self.of_address(transfer_id, address, 0, b"")
        return Decline(owner.peer, owner.endpoint, CancelSession(transfer_id=transfer_id, claim=owner.token))

    def _ticket(self, transfer_id: int, handoff: HandOff) -> Ticket:
        try:
            ticket = self._engine.tickets.open_ticket(handoff.ticket)
            check_ticket(ticket, transfer_id=transfer_id, now_unix_ms=self._engine.now_unix_ms())
            check_endpoint(ticket.control_endpoint)
            said = (handoff.control_endpoint, handoff.instance_id, handoff.epoch)
            if said != (ticket.control_endpoint, ticket.owner_instance_id, ticket.owner_epoch):
                raise TicketError(
                    "ticket_mismatch", f"the hand-off of transfer {transfer_id} is not what its ticket says"
                )
        except TicketError:
            self._on_refused()
            raise
        return ticket


def _key(ticket: Ticket) -> PeerKey:
    return PeerKey(ticket.owner_instance_id, ticket.owner_epoch)
