"""What an authenticated peer says and does not make sense: it fails its own transfer, with a sentence, and no more."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvmesh.protocol.disagg import ContextAddress
from kvmesh.protocol.transfer import Aux, CancelSession, Refused, RequestData, TransferResult
from kvmesh.transceiver.claims import sign
from kvmesh.transceiver.tickets import TicketError

Wire = Any
"""tests/unit/transceiver/conftest.py"""

AUX = Aux(first_tokens=[1], seed=1, prompt_tokens=15, finished=True)


def answered(wire: Wire) -> TransferResult:
    """A transfer whose owner has answered; the answer, which has not been delivered."""
    wire.ask(9, wire.offer(9))
    wire.deliver_to_context()
    wire.context.workers.run()
    answer: TransferResult = wire.to_generation.pop()
    return answer


def over(wire: Wire) -> None:
    wire.pump()
    for _ in range(2):
        wire.receiver.poll(0)
        wire.sender.poll(0)
    assert wire.released(9) == (1, 1)
    assert len(wire.sender.table.open) == len(wire.receiver.table.open) == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"src_tiers": [b"\2\2\2\2"]}, "tiers that do not exist"),
        ({"src_tiers": [b"\1"]}, "list of tiers does not fit"),
        ({"aux": AUX}, "first tokens came"),
        ({"is_last": False}, "a slice came"),
    ],
    ids=str,
)
def test_an_answer_that_makes_no_sense_fails_the_transfer(wire: Wire, changes: dict[str, Any], says: str) -> None:
    answer = answered(wire)
    wire.receiver.answers.on_result(wire.ENDPOINT, msgspec.structs.replace(answer, **changes))
    wire.pump()
    poll = wire.receiver.poll(0)
    assert poll.completed == []
    assert says in poll.failed[0].message
    wire.to_generation.append(msgspec.structs.replace(answer, status="cancelled"))
    over(wire)


@pytest.mark.parametrize(
    "changes",
    [{"src_pages": []}, {"src_pages": [b"123"]}, {"src_pages": [np.arange(3, dtype="<i4").tobytes()]}],
    ids=["no routes", "half an id", "too few"],
)
def test_pages_that_do_not_fit_fail_the_transfer(pull: Wire, changes: dict[str, Any]) -> None:
    answer = answered(pull)
    pull.receiver.answers.on_result(pull.ENDPOINT, msgspec.structs.replace(answer, **changes))
    pull.pump()
    assert "the owner's answer makes no sense" in pull.receiver.poll(0).failed[0].message
    over(pull)


@pytest.mark.parametrize("index", [-1, 1, 1 << 62])
def test_checksums_of_a_slice_that_is_none_are_dropped(wire: Wire, index: int) -> None:
    answer = answered(wire)
    before = wire.receiver.table.counters.dropped
    senseless = TransferResult(transfer_id=9, session=answer.session, status="checksums", slice_index=index)
    wire.receiver.answers.on_result(wire.ENDPOINT, senseless)
    assert wire.receiver.table.counters.dropped == before + 1
    wire.receiver.answers.on_result(wire.ENDPOINT, answer)
    wire.pump()
    assert wire.receiver.poll(0).completed == [9]
    over(wire)


# Requests that come twice, and refusals.


def test_a_request_that_comes_twice_is_served_once(wire: Wire) -> None:
    wire.ask(9, wire.offer(9))
    [request] = wire.to_context
    wire.pump()
    wire.sender.on_request(wire.ROUTE, request)
    assert wire.sender.table.counters.refused == 0
    assert list(wire.to_generation) == []
    assert wire.receiver.poll(0).completed == [9]
    over(wire)


@pytest.mark.parametrize("code", ["ticket_replayed", "ticket_expired", "hello_required"])
def test_a_refusal_does_not_say_that_nobody_writes(push: Wire, code: str) -> None:
    """§6.1: the first copy of the request may be served while the second one is refused."""
    push.ask(9, push.offer(9))
    number = push.receiver.table.open[9].session
    refused = Refused(transfer_id=9, session=number, status=403, code=code, message="no")

    def during() -> None:
        push.receiver.answers.on_refused(push.ENDPOINT, refused)
        assert [failure.code for failure in push.receiver.poll(0).failed] == [code]
        push.deliver_to_context()
        push.deliver_to_generation()
        push.receiver.poll(0)
        assert push.released(9)[1] == 0, "the owner is writing"

    push.context_plane.during = during
    push.pump()
    push.receiver.poll(0)
    assert push.released(9)[1] == 1
    over(push)


def test_a_refused_receiver_gives_up_nobody_elses_prompt(push: Wire) -> None:
    """What it asks to be stopped is its own session; the ticket, which others may have, does not go along."""
    push.ask(9, push.offer(9))
    number = push.receiver.table.open[9].session
    push.to_context.clear()
    push.receiver.answers.on_refused(
        push.ENDPOINT, Refused(transfer_id=9, session=number, status=404, code="transfer_unknown", message="no")
    )
    assert list(push.to_context) == [CancelSession(transfer_id=9, session=number)]
    push.pump()
    push.receiver.poll(0)
    assert push.leases["generation", 9].released == 1
    assert not push.sender.table.open[9].terminal
    push.sender.cancel(9)
    over(push)


def test_an_owner_that_does_not_know_the_receiver_says_whether_it_writes(push: Wire) -> None:
    push.ask(9, push.offer(9))
    request = push.to_context.pop()
    assert isinstance(request, RequestData)
    push.sender.peer_dead("generation", 1)
    push.to_context.append(request)
    push.deliver_to_context()
    push.deliver_to_generation()
    assert [failure.code for failure in push.receiver.poll(0).failed] == ["hello_required"]
    push.sender.cancel(9)
    over(push)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "tcp://context", "udp://context:1", "tcp://:1", "tcp://conte\0xt:1", "tcp://c\u00f6ntext:1"),
        *("tcp://context:0", "tcp://context:65536", "tcp://context:\u0663", "tcp://context:1x", "tcp://a:99999999"),
        f"tcp://{'c' * 254}:1",
    ],
)
def test_an_address_where_nobody_can_be_is_not_dialled(wire: Wire, tools: Any, endpoint: str) -> None:
    """A ticket is signed by a member of the cluster, which may still have said something senseless."""
    offered = wire.offer(9).ticket
    ticket = msgspec.structs.replace(wire.context.tickets.open_ticket(offered), control_endpoint=endpoint)
    handoff = wire.handoff(wire.context.tickets.sign_ticket(ticket), control_endpoint=endpoint)
    address = ContextAddress(control_endpoint=endpoint, instance_id="context", epoch=1)
    lease = tools.FakeLease([1, 2, 3, 4])
    claimed = (9, "g9", sign(wire.context.addresses, address), lease, [0], 15, tools.PROMPT_DIGEST)
    for ask in (
        lambda: wire.receiver.open(9, "g9", handoff, lease, [0], tools.PROMPT_DIGEST),
        lambda: wire.receiver.open_claimed(*claimed),
        lambda: wire.receiver.decline(9, handoff),
    ):
        with pytest.raises(TicketError) as caught:
            ask()
        assert (caught.value.status, caught.value.code) == (403, "endpoint_invalid")
    assert lease.released == 0
    assert len(wire.receiver.table.open) == 0
    assert wire.dialled == [wire.ENDPOINT]


def test_an_old_ticket_takes_no_link_away(wire: Wire) -> None:
    """Its owner is over, and another life has the address."""
    old = wire.offer(9)
    wire.generation.fences.end("context", 0)
    stale = msgspec.structs.replace(wire.context.tickets.open_ticket(old.ticket), owner_epoch=0)
    token = wire.context.tickets.sign_ticket(stale)
    link = wire.receiver.links.get(wire.ENDPOINT)
    wire.receiver.decline(9, wire.handoff(token, epoch=0))
    assert wire.receiver.links.get(wire.ENDPOINT) is link
    assert not wire.to_context
    wire.ask(9, old)
    wire.pump()
    assert wire.receiver.poll(0).completed == [9]
    over(wire)


# Defects.


def defect() -> None:
    raise ZeroDivisionError


def test_a_defect_in_moving_ends_one_transfer_and_no_thread(wire: Wire) -> None:
    """Whatever a plane raises: the threads of a peer go on, and with them the engine."""
    mover = wire.generation_plane if wire.generation_plane.direction == "pull" else wire.context_plane
    mover.during = defect
    wire.ask(9, wire.offer(9))
    wire.pump()
    [failure] = wire.receiver.poll(0).failed
    assert "log" in failure.message
    over(wire)
    mover.during = lambda: None
    wire.ask(8, wire.offer(8))
    wire.pump()
    assert wire.receiver.poll(0).completed == [8]


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_a_defect_in_attaching_refuses_the_peer(
    make_wire: Any, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = make_wire(direction)
    for plane in (wire.context_plane, wire.generation_plane):
        monkeypatch.setattr(plane, "attach", lambda *_: defect())
    wire.ask(9, wire.offer(9))
    wire.pump()
    [failure] = wire.receiver.poll(0).failed
    assert failure.status == 503
    assert "cannot reach the memory of" in failure.message
    wire.sender.cancel(9)
    over(wire)
