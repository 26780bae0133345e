from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvmesh.protocol.transfer import Ticket
from kvmesh.transceiver.tickets import CLOCK_SKEW_MS, MAX_TICKET_BYTES, Signer, SpentNonces, TicketError, check_ticket
from kvmesh.transceiver.types import PeerKey

NOW_MS = 1_700_000_000_000
OWNER = PeerKey("context-1", 3)


def ticket(**changes: Any) -> Ticket:
    fields = {
        "transfer_id": 42,
        "owner_instance_id": "context-1",
        "owner_epoch": 3,
        "num_tokens": 100,
        "prompt_digest": b"p" * 32,
        "layout_digest": "abc",
        "expires_unix_ms": NOW_MS + 1000,
        "nonce": b"n" * 16,
    }
    return Ticket(**{**fields, **changes})


@pytest.fixture
def signer() -> Signer:
    return Signer(b"secret", "ticket")


def code_of(error: pytest.ExceptionInfo[TicketError]) -> str | None:
    assert error.value.status == 403
    return error.value.code


def test_a_signed_ticket_opens(signer: Signer) -> None:
    assert signer.open_ticket(signer.sign_ticket(ticket())) == ticket()


@pytest.mark.parametrize("position", [0, 10, -33, -1])
def test_a_changed_byte_is_a_forgery(signer: Signer, position: int) -> None:
    token = bytearray(signer.sign_ticket(ticket()))
    token[position] ^= 1
    with pytest.raises(TicketError) as error:
        signer.open_ticket(bytes(token))
    assert code_of(error) == "ticket_forged"


@pytest.mark.parametrize(
    "token", [b"", b"short", b"x" * 32, b"x" * (MAX_TICKET_BYTES + 1)], ids=["empty", "short", "only a mac", "huge"]
)
def test_what_is_no_ticket_is_a_forgery(signer: Signer, token: bytes) -> None:
    with pytest.raises(TicketError) as error:
        signer.open_ticket(token)
    assert code_of(error) == "ticket_forged"


def test_a_signed_thing_that_is_no_ticket_is_refused(signer: Signer) -> None:
    payload = msgspec.msgpack.encode({"transfer_id": 1})
    with pytest.raises(TicketError) as error:
        signer.open_ticket(payload + signer.mac(payload))
    assert code_of(error) == "ticket_forged"


@pytest.mark.parametrize("other", [Signer(b"another secret", "ticket"), Signer(b"secret", "hello")])
def test_another_secret_or_purpose_does_not_sign_tickets(signer: Signer, other: Signer) -> None:
    with pytest.raises(TicketError) as error:
        signer.open_ticket(other.sign_ticket(ticket()))
    assert code_of(error) == "ticket_forged"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"protocol": 99}, "ticket_protocol"),
        ({"transfer_id": 43}, "ticket_mismatch"),
        ({"owner_instance_id": "context-2"}, "ticket_foreign"),
        ({"owner_epoch": 2}, "ticket_stale_epoch"),
        ({"owner_epoch": 4}, "ticket_stale_epoch"),
        ({"expires_unix_ms": NOW_MS}, "ticket_expired"),
    ],
)
def test_what_a_signature_does_not_say(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(TicketError) as error:
        check_ticket(ticket(**changes), transfer_id=42, now_unix_ms=NOW_MS, owner=OWNER)
    assert code_of(error) == code


def test_a_good_ticket_passes_at_both_ends() -> None:
    check_ticket(ticket(), transfer_id=42, now_unix_ms=NOW_MS, owner=OWNER)
    check_ticket(ticket(owner_epoch=9), transfer_id=42, now_unix_ms=NOW_MS)


def test_a_receiver_allows_for_the_clock_of_another_host_and_the_owner_judges_its_own_ticket_exactly() -> None:
    late = ticket(expires_unix_ms=NOW_MS - CLOCK_SKEW_MS + 1)
    check_ticket(late, transfer_id=42, now_unix_ms=NOW_MS)
    with pytest.raises(TicketError, match="by this host's clock; are the clocks of both hosts right"):
        check_ticket(late, transfer_id=42, now_unix_ms=NOW_MS + 1)
    with pytest.raises(TicketError, match=r"which lives for kv_transfer_timeout_ms, expired 0 ms ago$"):
        check_ticket(ticket(expires_unix_ms=NOW_MS), transfer_id=42, now_unix_ms=NOW_MS, owner=OWNER)


def test_a_ticket_is_used_once() -> None:
    spent = SpentNonces()
    spent.spend(ticket(), NOW_MS)
    with pytest.raises(TicketError) as error:
        spent.spend(ticket(), NOW_MS)
    assert code_of(error) == "ticket_replayed"


def test_spent_nonces_are_forgotten_when_their_tickets_expire_and_bounded() -> None:
    spent = SpentNonces(capacity=3)
    for number in range(10):
        spent.spend(ticket(nonce=bytes([number])), NOW_MS)
        assert len(spent) <= 3
    spent.spend(ticket(nonce=b"later", expires_unix_ms=NOW_MS + 9000), NOW_MS + 1000)
    assert len(spent) == 1
