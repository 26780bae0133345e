"""A transfer from offer to acknowledgement, and everything that a peer or a plane can do wrong on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvmesh.net.faults import injected
from kvmesh.protocol.transfer import RequestData, ResultAck, Ticket, TransferResult
from kvmesh.transceiver.table import DuplicateTransferError
from kvmesh.transceiver.tickets import CLOCK_SKEW_MS, Signer, TicketError

Wire = Any
"""tests/unit/transceiver/conftest.py"""


def fail_injected() -> None:
    from kvmesh.net.faults import FaultInjectedError

    raise FaultInjectedError("injected")


def test_only_the_missing_pages_move_and_everything_is_released(wire: Wire) -> None:
    wire.ask(7, wire.offer(7, [5, 3, 9, 4]), [11, 12, 13, 14], first=1)
    wire.pump()

    (job,) = wire.context_plane.moved + wire.generation_plane.moved
    pulls = wire.generation_plane.direction == "pull"
    (part,) = job.parts
    source, target = (part.remote, part.local) if pulls else (part.local, part.remote)
    assert (source.tolist(), target.tolist()) == ([3, 9, 4], [12, 13, 14])

    assert wire.released(7) == (0, 0), "leases go on the executor's thread only"
    assert wire.receiver.poll(0)[:4] == ([7], [], [], [])
    assert wire.sender.poll(0)[:4] == ([7], [], [], [])
    assert wire.released(7) == (1, 1)
    assert wire.states("context", 7) == ["registered", "transferring", "completed"]
    assert wire.states("generation", 7) == ["registered", "transferring", "completed"]
    assert wire.receiver.table.counters.pages_reused == 1
    assert wire.context_plane.granted == {}
    assert wire.generation_plane.open_sessions == 0


def test_a_receiver_knows_when_its_pages_moved(wire: Wire) -> None:
    """decisions.md 12: the clock of the first slice runs from asking, and is a figure only."""
    wire.ask(7, wire.offer(7))
    plane = wire.generation_plane if wire.generation_plane.direction == "pull" else wire.context_plane
    plane.during = lambda: wire.clock.advance(1.5)
    began_ns = time.time_ns()
    wire.pump()
    notes = wire.receiver.poll(0).notes[7]
    assert notes.first_slice_s == 1.5
    start_ns, end_ns = notes.slices_ns
    assert began_ns <= start_ns <= end_ns <= time.time_ns()
    assert wire.sender.poll(0).notes == {}


def test_nothing_missing_still_frees_the_owner(wire: Wire) -> None:
    wire.ask(7, wire.offer(7), first=4)
    wire.pump()
    assert wire.receiver.poll(0).completed == [7]
    assert wire.sender.poll(0).completed == [7]
    assert wire.released(7) == (1, 1)


def test_pages_left_of_a_window_do_not_move(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull", groups=2)
    wire.ask(7, wire.offer(7, [5, 3, 9, 4]), [-1, -1, 13, 14])
    wire.pump()
    (job,) = wire.generation_plane.moved
    assert [part.remote.tolist() for part in job.parts] == [[9, 4]] * 2
    assert [part.local.tolist() for part in job.parts] == [[13, 14]] * 2
    assert wire.receiver.poll(0).completed == [7]


def test_many_transfers_of_one_pair_share_one_introduction(wire: Wire) -> None:
    for transfer_id in range(10, 30):
        wire.ask(transfer_id, wire.offer(transfer_id))
    wire.pump()
    assert wire.receiver.poll(0).completed == list(range(10, 30))
    assert wire.sender.poll(0).completed == list(range(10, 30))
    assert wire.dialled == [wire.ENDPOINT]


def test_a_transfer_is_open_once(wire: Wire) -> None:
    handoff = wire.offer(7)
    with pytest.raises(DuplicateTransferError):
        wire.offer(7)
    wire.ask(7, handoff)
    with pytest.raises(DuplicateTransferError):
        wire.ask(7, handoff)


@pytest.mark.parametrize("first", [[0, 0], []])
def test_arguments_that_do_not_fit_leave_the_lease_to_the_caller(wire: Wire, tools: Any, first: list[int]) -> None:
    lease = tools.FakeLease([1, 2, 3, 4])
    with pytest.raises(ValueError, match="layer groups"):
        wire.receiver.open(7, "r", wire.offer(7), lease, first, tools.PROMPT_DIGEST)
    with pytest.raises(ValueError, match="holds 2 blocks"):
        wire.sender.open(9, "r", tools.FakeLease([1, 2]), 15, "", tools.PROMPT_DIGEST)
    assert lease.released == 0
    assert not wire.receiver.table.open


# Tickets at the owner and at the receiver.


def refused(wire: Wire, transfer_id: int) -> Any:
    wire.pump()
    ((failed,), counters) = wire.receiver.poll(0).failed, wire.sender.table.counters
    assert failed.id == transfer_id
    assert counters.refused == 1
    assert wire.leases["generation", transfer_id].released == 1
    return failed


def resign(wire: Wire, handoff: Any, secret: bytes = b"", **changes: Any) -> Any:
    signer = Signer(secret, "ticket") if secret else wire.context.tickets
    ticket = wire.context.tickets.open_ticket(handoff.ticket)
    return signer.sign_ticket(msgspec.structs.replace(ticket, **changes))


def send_request(wire: Wire, transfer_id: int, token: bytes) -> None:
    """Ask behind the back of the receiver's own checks, as a hostile peer would."""
    wire.ask(transfer_id, wire.offer(transfer_id))
    request = wire.to_context.pop()
    assert isinstance(request, RequestData)
    wire.to_context.append(msgspec.structs.replace(request, ticket=token))


def test_a_forged_ticket_is_refused_and_harms_nobody(wire: Wire) -> None:
    handoff = wire.offer(8)
    send_request(wire, 7, resign(wire, handoff, b"guessed secret", transfer_id=7))
    failed = refused(wire, 7)
    assert (failed.status, failed.code) == (403, "ticket_forged")
    # The pages of the real one can still be had.
    wire.ask(8, handoff)
    wire.pump()
    assert wire.receiver.poll(0).completed == [8]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"transfer_id": 99}, "ticket_mismatch"),
        ({"owner_instance_id": "another"}, "ticket_foreign"),
        ({"owner_epoch": 0}, "ticket_stale_epoch"),
        ({"expires_unix_ms": 0}, "ticket_expired"),
        ({"protocol": 7}, "ticket_protocol"),
    ],
)
def test_tickets_that_say_something_else(wire: Wire, changes: dict[str, Any], code: str) -> None:
    send_request(wire, 7, resign(wire, wire.offer(8), **{"transfer_id": 7, **changes}))
    failed = refused(wire, 7)
    assert (failed.status, failed.code) == (403, code)


def test_a_ticket_is_redeemed_once(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.ask(7, handoff)
    wire.pump()
    wire.receiver.poll(0)
    wire.ask(7, handoff)
    failed = refused(wire, 7)
    assert (failed.status, failed.code) == (403, "ticket_replayed")
    assert wire.sender.poll(0).completed == [7]


def test_a_signed_ticket_for_pages_that_are_not_held(wire: Wire) -> None:
    send_request(wire, 7, resign(wire, wire.offer(8), transfer_id=7, nonce=b"another"))
    failed = refused(wire, 7)
    assert (failed.status, failed.code) == (404, "transfer_unknown")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"ticket": b"nonsense"}, "ticket_forged"),
        ({"control_endpoint": "tcp://attacker"}, "ticket_mismatch"),
        ({"instance_id": "attacker"}, "ticket_mismatch"),
        ({"epoch": 9}, "ticket_mismatch"),
    ],
)
def test_a_receiver_dials_nobody_that_the_ticket_does_not_name(
    wire: Wire, tools: Any, changes: dict[str, Any], code: str
) -> None:
    handoff = wire.handoff(wire.offer(7).ticket, **changes)
    lease = tools.FakeLease([1, 2, 3, 4])
    with pytest.raises(TicketError) as error:
        wire.receiver.open(7, "r", handoff, lease, [0], tools.PROMPT_DIGEST)
    assert error.value.code == code
    assert lease.released == 0
    assert not wire.to_context
    assert wire.dialled == [wire.ENDPOINT]


def test_an_expired_hand_off_is_refused_before_anyone_is_asked(wire: Wire, tools: Any) -> None:
    handoff = wire.offer(7)
    wire.clock.advance(60 + CLOCK_SKEW_MS // 1000)
    with pytest.raises(TicketError, match=f"expired {CLOCK_SKEW_MS} ms ago"):
        wire.receiver.open(7, "r", handoff, tools.FakeLease([1, 2, 3, 4]), [0], tools.PROMPT_DIGEST)


def test_a_stranger_learns_nothing_from_the_refusal_of_its_introduction(pull: Wire) -> None:
    hello = pull.generation.handshake.hello("context", b"a route")
    pull.sender.on_hello(b"another route", hello)
    (reply,) = pull.to_generation
    assert "not signed with the cluster secret" in reply.refused
    said = [getattr(reply, name) for name in ("instance_id", "layout_digest", "layout_summary", "backend")]
    assert (said, reply.epoch) == ([""] * 4, 0)
    assert reply.layout == reply.agent == reply.process == reply.auth == b""
    assert pull.sender.receivers.route(pull.generation.key) == pull.ROUTE, "its connection was not taken over"


def test_a_stranger_is_asked_to_introduce_itself(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    (request,) = wire.to_context
    wire.to_context.clear()
    wire.sender.on_request(b"a stranger", request)
    (answer,) = wire.to_generation
    assert (answer.status, answer.code) == (403, "hello_required")


# What a plane or a peer can do wrong.


def test_pages_that_the_owner_lacks_fail_both_sides(wire: Wire) -> None:
    wire.ask(7, wire.offer(7, [5, -1, 9, 4]))
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert "block 1 is wanted" in failure.message
    (failure,) = wire.sender.poll(0).failed
    assert (failure.status, failure.code) == (409, "pages_mismatch")
    assert wire.released(7) == (1, 1)


def test_lists_of_another_length_fail_both_sides(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    request = wire.to_context.pop()
    wire.to_context.append(msgspec.structs.replace(request, dst_pages=[b"\0" * 4]))
    wire.pump()
    assert wire.receiver.poll(0).failed[0].code == "transfer_failed"
    assert wire.sender.poll(0).failed[0].code == "pages_mismatch"


def test_a_failed_move_fails_both_sides(wire: Wire) -> None:
    for plane in (wire.context_plane, wire.generation_plane):
        plane.move_error = "the cable was cut"
    wire.ask(7, wire.offer(7))
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert failure == (7, 502, "transfer_failed", "the cable was cut")
    assert wire.sender.poll(0).failed[0].status == 502
    assert wire.released(7) == (1, 1)


@pytest.mark.parametrize("point", ["transceiver.before_request", "transceiver.before_send", "transceiver.before_ack"])
def test_an_injected_failure_fails_both_sides(wire: Wire, point: str) -> None:
    with injected(point, fail_injected):
        wire.ask(7, wire.offer(7))
        wire.pump()
    assert wire.receiver.poll(0).failed[0].message == "injected"
    ended = wire.sender.poll(0)
    assert [failure.id for failure in ended.failed] + ended.cancelled == [7]
    assert wire.released(7) == (1, 1)


class Checksums:
    """Sums that say what they are told to."""

    def __init__(self, value: int) -> None:
        self._value = value

    def running(self, parts: Any) -> Any:
        return SimpleNamespace(add_all=lambda: None, encoded=lambda: self.of(parts))

    def of(self, parts: Any) -> list[bytes]:
        return [bytes([self._value] * 8 * len(part.local)) for part in parts]


def with_checksums(wire: Wire, at_context: int, at_generation: int) -> None:
    object.__setattr__(wire.context, "checksums", Checksums(at_context))
    object.__setattr__(wire.generation, "checksums", Checksums(at_generation))


def test_pages_are_checked(wire: Wire) -> None:
    with_checksums(wire, 5, 5)
    wire.ask(7, wire.offer(7))
    wire.pump()
    assert wire.receiver.poll(0).completed == [7]
    assert wire.sender.poll(0).completed == [7]


def test_damaged_pages_are_not_accepted(wire: Wire) -> None:
    with_checksums(wire, 5, 6)
    wire.ask(7, wire.offer(7))
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert failure.code == "checksum_mismatch"
    assert failure.message == "part 0: 4 of 4 pages arrived damaged, the first at index 0"
    assert wire.sender.poll(0).failed[0].code == "receiver_failed"
    assert wire.released(7) == (1, 1)


@pytest.mark.parametrize(("at_context", "at_generation"), [(True, False), (False, True)])
def test_one_side_alone_does_not_check(wire: Wire, at_context: bool, at_generation: bool) -> None:
    with_checksums(wire, 5, 6)
    for engine, on in ((wire.context, at_context), (wire.generation, at_generation)):
        if not on:
            object.__setattr__(engine, "checksums", None)
    wire.ask(7, wire.offer(7))
    wire.pump()
    assert wire.receiver.poll(0).completed == [7]


def quick(wire: Wire) -> None:
    wire.context_plane.quick_bytes = wire.generation_plane.quick_bytes = 4 * 256


def test_a_few_pages_move_without_another_thread(pull: Wire) -> None:
    quick(pull)
    with_checksums(pull, 5, 5)
    pull.ask(7, pull.offer(7))
    pull.deliver_to_context()
    (ready,) = pull.to_generation
    assert (ready.status, ready.checksums) == ("ready", [b"\x05" * 8 * 4]), "in one message"
    pull.deliver_to_generation()
    pull.deliver_to_context()
    assert not pull.context.workers.run()  # type: ignore[attr-defined]
    assert not pull.generation.workers.run()  # type: ignore[attr-defined]
    assert pull.receiver.poll(0).completed == [7]
    assert pull.sender.poll(0).completed == [7]
    assert pull.released(7) == (1, 1)


def test_more_pages_are_moved_by_a_worker(pull: Wire) -> None:
    quick(pull)
    pull.ask(7, pull.offer(7, tokens=17), tokens=17)
    pull.deliver_to_context()
    assert not pull.to_generation
    pull.pump()
    assert pull.receiver.poll(0).completed == [7]


def test_a_few_damaged_pages_are_not_accepted(pull: Wire) -> None:
    quick(pull)
    with_checksums(pull, 5, 6)
    pull.ask(7, pull.offer(7))
    pull.pump()
    assert pull.receiver.poll(0).failed[0].code == "checksum_mismatch"
    assert pull.sender.poll(0).failed[0].code == "receiver_failed"
    assert pull.released(7) == (1, 1)


def test_a_quick_move_that_fails_fails_both_sides(pull: Wire) -> None:
    quick(pull)
    pull.generation_plane.move_error = "the memory is gone"
    pull.ask(7, pull.offer(7))
    pull.pump()
    assert pull.receiver.poll(0).failed == [(7, 502, "transfer_failed", "the memory is gone")]
    assert pull.sender.poll(0).failed[0].code == "receiver_failed"
    assert pull.released(7) == (1, 1)


@pytest.mark.parametrize("side", ["context", "generation"])
def test_a_cancel_before_a_quick_answer_ends_both_sides(pull: Wire, side: str) -> None:
    quick(pull)
    pull.ask(7, pull.offer(7))
    if side == "generation":
        assert pull.receiver.cancel(7)
    else:
        assert pull.sender.cancel(7)
    pull.pump()
    assert pull.receiver.poll(0).cancelled == [7]
    assert pull.sender.poll(0).cancelled == [7]
    assert not pull.generation_plane.moved
    assert pull.released(7) == (1, 1)


def test_pages_whose_checksums_never_come_are_not_accepted(wire: Wire) -> None:
    with_checksums(wire, 5, 5)
    wire.ask(7, wire.offer(7))
    wire.deliver_to_context()
    wire.context.workers.run()
    checksums = wire.to_generation.pop()
    assert checksums.status == "checksums"
    wire.pump()
    assert wire.receiver.poll(0)[:4] == ([], [], [], [])
    assert wire.generation.ledger.drain()[-1].state == "transferring"
    wire.receiver.lives.peer_dead("context", 1)
    assert wire.receiver.poll(0).failed[0].code == "peer_dead"


def test_an_owner_that_grants_another_number_of_pages_is_not_believed(pull: Wire) -> None:
    pull.ask(7, pull.offer(7))
    pull.deliver_to_context()
    pull.context.workers.run()
    answer = pull.to_generation.pop()
    pull.to_generation.append(msgspec.structs.replace(answer, src_pages=[b"\0" * 4]))
    pull.pump()
    assert "1 pages are granted where 4 are wanted" in pull.receiver.poll(0).failed[0].message
    assert not pull.generation_plane.moved


def test_answers_to_an_older_session_are_dropped(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    wire.deliver_to_context()
    (session,) = wire.receiver.table.open.values()
    old = TransferResult(transfer_id=7, session=session.session - 1, status="failed", message="old")
    wire.receiver.answers.on_result(wire.ENDPOINT, old)
    wire.receiver.answers.on_result("tcp://another", msgspec.structs.replace(old, session=session.session))
    assert wire.receiver.table.counters.dropped == 2
    wire.pump()
    assert wire.receiver.poll(0).completed == [7]


def test_answers_of_the_wrong_kind_or_twice_are_dropped(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    (session,) = wire.receiver.table.open.values()
    wrong = "done" if wire.generation_plane.direction == "pull" else "ready"
    wire.receiver.answers.on_result(
        wire.ENDPOINT, TransferResult(transfer_id=7, session=session.session, status=wrong, src_pages=[b"\0" * 16])
    )
    assert wire.receiver.table.counters.dropped == 1
    assert not session.terminal
    wire.deliver_to_context()
    wire.context.workers.run()
    wire.to_generation.append(wire.to_generation[-1])
    wire.pump()
    assert wire.receiver.poll(0).completed == [7]


def test_acknowledgements_of_others_do_not_release_pages(wire: Wire) -> None:
    wire.offer(7)
    for route in (wire.ROUTE, b"a stranger"):
        wire.sender.on_ack(route, ResultAck(transfer_id=7, session=1, status="done"))
    assert wire.sender.poll(0)[:4] == ([], [], [], [])
    assert wire.sender.table.open[7].status.state == "init"


def test_an_acknowledgement_that_cannot_be_is_dropped(pull: Wire) -> None:
    pull.ask(7, pull.offer(7))
    pull.deliver_to_context()
    (session,) = pull.sender.table.open.values()
    pull.sender.on_ack(pull.ROUTE, ResultAck(transfer_id=7, session=session.session, status="done"))
    assert pull.sender.table.counters.dropped == 1
    pull.pump()
    assert pull.sender.poll(0).completed == [7]


# Pairing.


def test_engines_that_do_not_match_are_refused_with_both_values(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull")
    mine = wire.generation.handshake.mine
    wire.generation.handshake.mine = mine._replace(layout_digest="e" * 64, layout_summary="another layout")
    wire.ask(7, wire.offer(7))
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (503, "pairing_refused")
    for part in ("d" * 16, "e" * 16, "a layout", "another layout"):
        assert part in failure.message
    # The owner has its pages back without waiting for the ticket to expire.
    assert wire.sender.poll(0).cancelled == [7]
    assert wire.released(7) == (1, 1)


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_memory_that_cannot_be_reached_fails_the_transfer(make_wire: Callable[..., Wire], direction: str) -> None:
    wire = make_wire(direction)
    for plane in (wire.context_plane, wire.generation_plane):
        plane.attach_error = "no way"
    wire.ask(7, wire.offer(7))
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert failure.status == 503
    assert "no way" in failure.message
    assert wire.sender.poll(0).cancelled == [7]
    # Next time it is tried again.
    for plane in (wire.context_plane, wire.generation_plane):
        plane.attach_error = None
    wire.ask(8, wire.offer(8))
    wire.pump()
    assert wire.receiver.poll(0).completed == [8]


def test_another_engine_at_the_address_is_not_taken_for_the_owner(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull")
    token = resign(wire, wire.offer(7), owner_epoch=2)
    wire.ask(7, wire.handoff(token, epoch=2))
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert "context#1 answers at tcp://context:1, where context#2 is expected" in failure.message


def test_tickets_are_minted_with_what_must_be_known(pull: Wire) -> None:
    ticket = pull.context.tickets.open_ticket(pull.offer(7).ticket)
    assert isinstance(ticket, Ticket)
    assert (ticket.transfer_id, ticket.owner_instance_id, ticket.owner_epoch, ticket.num_tokens) == (
        7,
        "context",
        1,
        15,
    )
    assert ticket.expires_unix_ms == pull.clock.unix_ns() // 1_000_000 + 60_000
    assert ticket.control_endpoint == pull.ENDPOINT
    assert len(ticket.nonce) == 16


def test_a_ticket_of_another_prompt_moves_nothing(wire: Any, tools: Any) -> None:
    handoff = wire.offer(7)
    lease = tools.FakeLease([1, 2, 3, 4])
    with pytest.raises(TicketError) as error:
        wire.receiver.open(7, "r", handoff, lease, [0], b"q" * 32)
    assert (error.value.status, error.value.type, error.value.code) == (
        400,
        "invalid_request_error",
        "ticket_mismatch",
    )
    wire.pump()
    assert lease.released == 0, "it stays the caller's"
    assert not wire.context_plane.moved
    assert not wire.generation_plane.moved
    wire.ask(7, handoff)
    wire.pump()
    assert wire.receiver.poll(0).completed == [7], "the ticket is not spent"
