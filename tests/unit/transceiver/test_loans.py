"""Few pages are read with nothing but the hand-off; whatever is not as it should be takes the usual way, or fails."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.net.faults import FaultInjectedError, injected
from kvmesh.protocol.transfer import Loan, RequestData
from kvmesh.protocol.version import PROTOCOL_VERSION
from kvmesh.transceiver.borrowing import lent_parts, lent_sums
from kvmesh.transceiver.lending import MAX_LENT_PAGES, page_sums
from kvmesh.transceiver.planes.loans import Receipt
from kvmesh.transceiver.runs import encode_pages, only_pages
from kvmesh.transceiver.sessions import CANCEL_REPEAT_S
from kvmesh.transceiver.types import PeerKey, PoolMemory

Wire = Any
"""tests/unit/transceiver/conftest.py"""


@pytest.fixture
def wire(pull: Wire) -> Wire:
    """Two engines that know each other; the owner lends up to four pages."""
    for plane in (pull.context_plane, pull.generation_plane):
        plane.lends = True
        plane.quick_bytes = 4 * 256
    return pull


class Checksums:
    """Sums that are the page's number, times a factor."""

    def __init__(self, factor: int) -> None:
        self._factor = factor

    def running(self, parts: Any) -> Any:
        # What arrives is what lies at the owner.
        mirrored = [part._replace(local=part.remote) for part in parts]
        return SimpleNamespace(encoded=lambda: self.of(mirrored))

    def of(self, parts: Any) -> list[bytes]:
        return [(part.local.astype("<u8") * self._factor).tobytes() for part in parts]


def with_checksums(wire: Wire, at_context: int | None, at_generation: int | None) -> None:
    for engine, factor in ((wire.context, at_context), (wire.generation, at_generation)):
        object.__setattr__(engine, "checksums", None if factor is None else Checksums(factor))
    wire.generation_plane.factor = at_generation


def read_at_once(wire: Wire, transfer_id: int = 7, **asked: Any) -> None:
    """A transfer that ends without the owner's help."""
    wire.ask(transfer_id, wire.offer(transfer_id), **asked)
    assert wire.receiver.poll(0).completed == [transfer_id]
    assert wire.leases["generation", transfer_id].released == 1


def ended_usually(wire: Wire, transfer_id: int = 7) -> None:
    """The pages were asked for, and came."""
    wire.pump()
    assert wire.receiver.poll(0).completed == [transfer_id]
    assert wire.sender.poll(0).completed == [transfer_id]
    assert wire.released(transfer_id) == (1, 1)


# The good case.


def test_lent_pages_are_there_before_the_owner_hears_of_it(wire: Wire) -> None:
    read_at_once(wire)
    ((part,),) = wire.generation_plane.copied
    assert (part.remote.tolist(), part.local.tolist()) == ([10, 11, 12, 13], [20, 21, 22, 23])
    assert wire.leases["context", 7].released == 0
    release, seen = wire.leases["context", 7].release, []
    wire.leases["context", 7].release = lambda: (seen.append(wire.context_plane.lent == {}), release())
    assert wire.sender.poll(0).completed == [7]
    assert seen == [True], "nobody reads released pages"
    assert wire.released(7) == (1, 1)
    assert not wire.to_context, "nothing is said"
    assert not wire.to_generation
    assert wire.sender.table.counters.pages == wire.receiver.table.counters.pages == 4 + 4
    assert wire.sender.table.counters.nbytes == wire.receiver.table.counters.nbytes
    assert wire.sender.table.counters.refused == wire.sender.table.counters.dropped == 0
    assert wire.receiver.borrowing.borrowed_total == 1
    assert wire.generation_plane.open_sessions == 0


def test_both_ledgers_tell_of_it(wire: Wire) -> None:
    read_at_once(wire)
    wire.sender.poll(0)
    assert wire.states("context", 7) == wire.states("generation", 7) == ["registered", "completed"]


@pytest.mark.parametrize(("first", "expected"), [(1, [11, 12, 13]), (3, [13]), (4, [])])
def test_only_missing_pages_are_read(wire: Wire, first: int, expected: list[int]) -> None:
    with_checksums(wire, 3, 3)
    read_at_once(wire, first=first)
    (parts,) = wire.generation_plane.copied
    assert [page for part in parts for page in part.remote.tolist()] == expected
    wire.pump()
    assert wire.sender.poll(0).completed == [7]
    assert wire.sender.table.counters.pages == 4 + len(expected)


def test_windowed_groups_are_lent_too(make_wire: Callable[..., Wire], tools: SimpleNamespace) -> None:
    wire = make_wire("pull", groups=2)
    wire.pair()
    wire.context_plane.lends = True
    wire.context_plane.quick_bytes = wire.generation_plane.quick_bytes = 8 * 256
    with_checksums(wire, 3, 3)
    held, wanted = ([10, 11, 12, 13], [-1, -1, 42, 43]), ([20, 21, 22, 23], [-1, -1, 52, 53])
    token = wire.sender.open(7, "c7", tools.FakeLease(*held), 15, wire.ENDPOINT, tools.PROMPT_DIGEST)
    lease = tools.FakeLease(*wanted)
    wire.receiver.open(7, "g7", wire.handoff(token), lease, [1, 0], tools.PROMPT_DIGEST)
    assert wire.receiver.poll(0).completed == [7]
    (parts,) = wire.generation_plane.copied
    assert [(part.remote.tolist(), part.local.tolist()) for part in parts] == [
        ([11, 12, 13], [21, 22, 23]),
        ([42, 43], [52, 53]),
    ]


# What takes the usual way.


def test_the_first_contact_asks(make_wire: Callable[..., Wire]) -> None:
    wire = make_wire("pull")
    for plane in (wire.context_plane, wire.generation_plane):
        plane.lends, plane.quick_bytes = True, 4 * 256
    wire.ask(7, wire.offer(7))
    assert wire.receiver.poll(0).settled == 0
    ended_usually(wire)
    assert wire.receiver.borrowing.borrowed_total == 0


@pytest.mark.parametrize(
    "why", ["too many bytes", "not mapped", "taken back", "bounce here", "bounce there", "nothing lent", "no room"]
)
def test_who_cannot_read_at_once_asks(wire: Wire, why: str) -> None:
    tokens = 15
    if why == "too many bytes":
        tokens = 17
    elif why == "not mapped":
        wire.generation_plane.attached = False
    elif why == "bounce there":
        object.__setattr__(wire.context, "bounce", SimpleNamespace(gather=lambda job, offered: None))
    elif why == "nothing lent":
        wire.context_plane.lends = False
    elif why == "no room":
        wire.context_plane.lend_error = "there are too many loans"
    handoff = wire.offer(7, tokens=tokens)
    if why == "taken back":
        wire.context_plane.lent.clear()
    elif why == "bounce here":
        object.__setattr__(wire.generation, "bounce", SimpleNamespace(reserve=lambda pages, nbytes: None))
    wire.ask(7, handoff, tokens=tokens)
    assert type(wire.to_context[0]) is RequestData
    ended_usually(wire)
    assert wire.context_plane.lent == {}


def test_more_pages_than_a_ticket_names_are_not_lent(wire: Wire) -> None:
    wire.context_plane.quick_bytes = 1 << 20
    wire.offer(7, pages=range(MAX_LENT_PAGES), tokens=4 * MAX_LENT_PAGES)
    wire.offer(8, pages=range(MAX_LENT_PAGES + 1), tokens=4 * MAX_LENT_PAGES + 1)
    assert list(wire.context_plane.lent) == [7]


def test_what_is_taken_back_during_the_copy_is_asked_for(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.generation_plane.during = lambda: wire.context_plane.lent.clear()
    wire.ask(7, handoff)
    wire.generation_plane.during = lambda: None
    assert wire.receiver.borrowing.borrowed_total == 0
    assert wire.receiver.poll(0).settled == 0
    ended_usually(wire)


def test_damage_is_not_accepted_and_the_pages_are_asked_for(wire: Wire) -> None:
    """The second reading tells whether it was the owner's memory or the loan."""
    with_checksums(wire, 3, 4)
    wire.ask(7, wire.offer(7))
    assert wire.receiver.poll(0).settled == 0
    assert type(wire.to_context[0]) is RequestData
    wire.pump()
    assert wire.receiver.poll(0).failed[0].code == "checksum_mismatch"
    assert wire.sender.poll(0).failed[0].code == "receiver_failed"
    assert wire.released(7) == (1, 1)


@pytest.mark.parametrize(("at_context", "at_generation"), [(3, None), (None, 3), (3, 3)])
def test_a_pair_checks_when_both_do(wire: Wire, at_context: int | None, at_generation: int | None) -> None:
    with_checksums(wire, at_context, at_generation)
    seen: list[bool] = []
    read_pages = wire.generation_plane.read

    def read(*args: Any, summed: bool) -> Any:
        seen.append(summed)
        return read_pages(*args, summed=summed)

    wire.generation_plane.read = read
    read_at_once(wire)
    assert seen == [at_context is not None and at_generation is not None]


def relent(wire: Wire, transfer_id: int, **changes: Any) -> Any:
    """The hand-off of an owner whose loan is another one, but signed."""
    wire.offer(transfer_id)
    session = wire.sender.table.open[transfer_id]
    loan = msgspec.structs.replace(session.ticket.loan, **changes)
    return wire.handoff(wire.context.tickets.sign_ticket(msgspec.structs.replace(session.ticket, loan=loan)))


@pytest.mark.parametrize(
    "changes",
    [
        {"pages": []},
        {"pages": [b"\0" * 4]},
        {"pages": [b"\0" * 15]},
        {"pages": [encode_pages(np.array([10, -1, 12, 13], dtype=np.int32))]},
        {"checksums": [b"\0" * 8]},
        {"checksums": [b"\0" * 32, b"\0" * 32]},
    ],
)
def test_a_loan_that_makes_no_sense_is_asked_for(wire: Wire, changes: dict[str, Any]) -> None:
    with_checksums(wire, 3, 3)
    wire.ask(7, relent(wire, 7, **changes))
    assert type(wire.to_context[0]) is RequestData
    ended_usually(wire)


def test_another_loan_than_was_signed_is_refused(wire: Wire) -> None:
    """Else a client could have pages of others read into its request."""
    handoff = wire.offer(7)
    pages = wire.sender.table.open[7].ticket.loan.pages[0]
    assert handoff.ticket.count(pages) == 1
    other = encode_pages(np.array([1, 2, 3, 4], dtype=np.int32))
    with pytest.raises(Exception, match="not signed"):
        wire.ask(7, wire.handoff(handoff.ticket.replace(pages, other)))
    assert not wire.generation_plane.copied


# Taken back, before anything happens to the pages.


def test_pages_that_may_move_are_taken_back_first(wire: Wire) -> None:
    pool = wire.context.pools[0]
    host = PoolMemory(address=0, nbytes=pool.nbytes, num_pages=pool.num_pages, page_bytes=pool.page_bytes)
    object.__setattr__(wire.context, "pools", [pool, host])
    handoff = wire.offer(7)
    session = wire.sender.table.open[7]
    seen: list[bool] = []

    def let_move() -> bool:
        seen.append(wire.context_plane.lent == {})
        return True

    session.lease.let_move = let_move
    session.lease.keep_place = lambda: True
    session.lease.levels = lambda group: np.zeros(4, dtype=np.uint8)
    assert wire.sender.waiting.let_move() == 1
    assert seen == [True]
    wire.ask(7, handoff)
    assert wire.receiver.poll(0).settled == 0
    wire.pump()
    wire.sender.poll(0)
    ended_usually(wire)


@pytest.mark.parametrize("how", ["cancel", "precancel", "deadline"])
def test_an_end_takes_the_loan_back_before_the_lease_goes(wire: Wire, how: str) -> None:
    if how == "precancel":
        give_up(wire, 7)
    handoff = wire.offer(7)
    lease = wire.leases["context", 7]
    release, seen = lease.release, []

    def released() -> None:
        seen.append(wire.context_plane.lent == {})
        release()

    lease.release = released
    if how == "deadline":
        wire.clock.advance(61)
        assert wire.sender.sweep() == [7]
    if how in ("cancel", "deadline"):
        assert wire.sender.cancel(7)
    wire.sender.poll(0)
    assert seen == [True]
    if how == "deadline":
        handoff = None
    if handoff is not None:
        wire.ask(7, handoff)
        assert wire.receiver.poll(0).settled == 0, "it has to ask, and hears"
        wire.pump()
        assert wire.receiver.poll(0).failed[0].status == 404


def give_up(wire: Wire, transfer_id: int) -> None:
    wire.offer(transfer_id)
    token = wire.sender.table.open[transfer_id].token
    wire.sender.cancel(transfer_id)
    wire.sender.poll(0)
    wire.receiver.decline(transfer_id, wire.handoff(token))
    wire.pump()


def test_a_new_loan_of_the_same_transfer_is_another_one(wire: Wire) -> None:
    old = wire.offer(7)
    wire.sender.cancel(7)
    wire.sender.poll(0)
    wire.offer(7, pages=[30, 31, 32, 33])
    wire.ask(7, old)
    assert not wire.generation_plane.copied, "what the first ticket names is not lent any more"
    wire.pump()
    assert wire.receiver.poll(0).failed[0].status == 404
    assert 7 in wire.sender.table.open


def test_a_second_session_of_an_open_transfer_takes_nothing_back(wire: Wire) -> None:
    handoff = wire.offer(7)
    with pytest.raises(ValueError, match="open already"):
        wire.offer(7, pages=[30, 31, 32, 33])
    wire.ask(7, handoff)
    assert wire.receiver.poll(0).completed == [7]


def test_a_receiver_that_asks_is_the_only_reader(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.generation_plane.attached = False
    wire.ask(7, handoff)
    wire.deliver_to_context()
    assert wire.context_plane.lent == {}
    wire.generation_plane.attached = True
    ended_usually(wire)


# Receipts.


def another_reads(wire: Wire, transfer_id: int = 7, *, num_pages: int = 4) -> None:
    """A receiver that this owner does not know takes a loan."""
    assert transfer_id in wire.context_plane.lent
    assert transfer_id not in wire.context_plane.receipts
    wire.context_plane.receipts[transfer_id] = Receipt(1, num_pages, 256 * num_pages)


@pytest.mark.parametrize("look", ["never", "before it asks"])
def test_a_second_reading_by_the_same_receiver_is_refused(wire: Wire, look: str) -> None:
    """A ticket is good for one transfer, also where the owner stands still and has not seen the first."""
    handoff = wire.offer(7)
    wire.ask(7, handoff)
    assert wire.receiver.poll(0).completed == [7]
    if look == "before it asks":
        assert wire.sender.poll(0).completed == [7]
    wire.ask(7, handoff)
    assert len(wire.generation_plane.copied) == 1
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (403, "ticket_replayed")
    assert wire.sender.poll(0).completed == [7] * (look == "never")
    assert wire.sender.table.counters.refused == 1
    assert wire.leases["context", 7].released == 1


def test_of_two_that_read_at_once_one_may_use_it(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.generation_plane.during = lambda: another_reads(wire)
    wire.ask(7, handoff)
    wire.generation_plane.during = lambda: None
    assert wire.receiver.borrowing.borrowed_total == 0
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (403, "ticket_replayed")
    assert wire.sender.poll(0).completed == [7]
    assert wire.released(7) == (1, 1)


@pytest.mark.parametrize(("who", "peer"), [("one that is known", "generation"), ("a stranger", None)])
def test_the_owner_knows_who_has_read(wire: Wire, who: str, peer: str | None) -> None:
    if who == "a stranger":
        wire.offer(7)
        another_reads(wire)
    else:
        read_at_once(wire)
    wire.context.ledger.drain()
    assert wire.sender.poll(0).completed == [7]
    (event,) = wire.context.ledger.drain()
    assert (event.state, event.peer_instance_id, event.num_pages) == ("completed", peer, 4)


def test_what_a_receiver_has_read_before_its_death_is_completed(wire: Wire) -> None:
    """Nobody waits for its word."""
    read_at_once(wire)
    wire.sender.peer_dead("generation", 1)
    assert wire.context_plane.lent == {}
    assert wire.sender.poll(0).completed == [7]
    assert [event.peer_instance_id for event in wire.context.ledger.drain()] == [None, "generation"]


@pytest.mark.parametrize(("said", "counted"), [(1000, 4), (0, 0), (3, 3)])
def test_no_more_counts_as_read_than_was_lent(wire: Wire, said: int, counted: int) -> None:
    before = wire.sender.table.counters.pages, wire.sender.table.counters.nbytes
    wire.offer(7)
    another_reads(wire, num_pages=said)
    assert wire.sender.poll(0).completed == [7]
    after = wire.sender.table.counters.pages, wire.sender.table.counters.nbytes
    assert after == (before[0] + counted, before[1] + 256 * counted)


@pytest.mark.parametrize("how", ["cancel", "deadline", "late look", "declined", "pages are short", "asked for again"])
def test_what_was_read_before_is_completed(wire: Wire, how: str) -> None:
    """Whatever the owner would have done next with a session that it took for unread."""
    handoff = wire.offer(7)
    wire.ask(7, handoff)
    assert wire.receiver.poll(0).completed == [7]
    if how == "cancel":
        assert wire.sender.cancel(7)
    elif how == "deadline":
        wire.clock.advance(61)
        assert wire.sender.sweep() == []
    elif how == "late look":
        wire.clock.advance(61)
    elif how == "declined":
        wire.receiver.decline(7, handoff)
        wire.pump()
    elif how == "pages are short":
        pool = wire.context.pools[0]
        object.__setattr__(wire.context, "pools", [pool, pool])
        assert wire.sender.waiting.let_move() == 0
    else:
        wire.ask(7, handoff)
        wire.pump()
    ended = wire.sender.poll(0)
    assert (ended.completed, ended.timed_out) == ([7], [])
    assert wire.sender.table.counters.timed_out == 0
    assert wire.states("context", 7) == ["registered", "completed"]
    assert wire.leases["context", 7].released == 1
    assert wire.context_plane.lent == {}


def test_the_loser_of_two_is_answered_whoever_s_receipt_it_is(wire: Wire) -> None:
    """It has written its own last; its request comes before the owner has collected the end."""
    handoff = wire.offer(7)
    mine = Receipt(PeerKey("generation", 1).number, 4, 4 * 256)
    wire.generation_plane.during = lambda: wire.context_plane.receipts.__setitem__(7, mine)
    wire.ask(7, handoff)
    wire.generation_plane.during = lambda: None
    wire.sender.sweep()
    wire.pump()
    assert wire.receiver.poll(0).failed[0].code == "ticket_replayed"
    assert wire.sender.poll(0).completed == [7]


def test_who_looks_need_not_be_woken(wire: Wire) -> None:
    """Whoever else finds a loan read wakes the executor, whose poll collects it."""
    rung: list[None] = []
    wire.offer(7)
    wire.offer(8)
    wire.waiter.notify = lambda _changed: rung.append(None)
    another_reads(wire, 7)
    assert wire.sender.poll(0).completed == [7]
    assert rung == []
    another_reads(wire, 8)
    wire.sender.peer_dead("another", 1)
    assert rung == [None]


def test_an_end_of_one_transfer_waits_for_no_other(wire: Wire) -> None:
    wire.offer(7)
    read_at_once(wire, 8)
    assert wire.sender.poll(0).completed == [8]
    assert list(wire.context_plane.lent) == [7]


def test_a_poll_that_waits_ends_when_a_loan_is_read(wire: Wire) -> None:
    """Its bell has been rung."""
    handoff = wire.offer(7)

    def read() -> None:
        wire.ask(7, handoff)
        wire.waiter.between = lambda: None

    wire.waiter.between = read
    assert wire.sender.poll(1).completed == [7]
    assert len(wire.waiter.waits) == 1


# Expiry: a loan stays on one host, whose clock both sides read.


def test_an_expired_ticket_is_not_read_but_asked_for_and_refused(wire: Wire) -> None:
    """Its owner stands still, or is busy: it has not taken its loan back yet."""
    handoff = wire.offer(7)
    wire.clock.advance(60)
    assert wire.context_plane.lent, "nobody has swept"
    wire.ask(7, handoff)
    assert not wire.generation_plane.copied
    assert type(wire.to_context[0]) is RequestData
    wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (403, "ticket_expired")
    assert wire.sender.table.counters.refused == 1


def test_a_ticket_that_expires_during_the_copy_is_refused(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.generation_plane.during = lambda: wire.clock.advance(60)
    wire.ask(7, handoff)
    wire.generation_plane.during = lambda: None
    assert wire.receiver.borrowing.borrowed_total == 0
    wire.pump()
    assert wire.receiver.poll(0).failed[0].code == "ticket_expired"


@pytest.mark.parametrize("later_s", [1, 59, 60, 61, 300])
def test_no_ticket_is_read_twice_by_one_receiver(wire: Wire, later_s: int) -> None:
    """Whose owner stands still, and has not seen it."""
    handoff = wire.offer(7)
    wire.ask(7, handoff)
    assert wire.receiver.poll(0).completed == [7]
    wire.clock.advance(later_s)
    wire.ask(7, handoff)
    assert len(wire.generation_plane.copied) == 1
    assert type(wire.to_context[-1]) is RequestData


# Slices in the trace.


def test_a_loan_is_one_slice(wire: Wire) -> None:
    wire.ask(7, wire.offer(7))
    (notes,) = wire.receiver.poll(0).notes.values()
    assert len(notes.slices_ns) == 2


def test_a_loan_that_falls_through_is_none(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.generation_plane.during = lambda: wire.context_plane.lent.clear()
    wire.ask(7, handoff)
    assert wire.receiver.table.open[7].notes is None
    assert wire.receiver.table.open[7].control.take_slices() == []


# Faults, cancels, deaths.


def fail_injected() -> None:
    raise FaultInjectedError("injected")


@pytest.mark.parametrize("point", ["before_request", "during_transfer", "before_ack"])
def test_a_failure_goes_the_usual_way_and_ends_both_sides_there(wire: Wire, point: str) -> None:
    with injected(f"transceiver.{point}", fail_injected):
        wire.ask(7, wire.offer(7))
        assert wire.receiver.borrowing.borrowed_total == 0
        wire.pump()
    (failure,) = wire.receiver.poll(0).failed
    assert failure == (7, 502, "transfer_failed", "injected")
    wire.pump()
    ended = wire.sender.poll(0)
    assert [failure.id for failure in ended.failed] + ended.cancelled == [7]
    assert wire.released(7) == (1, 1)


@pytest.mark.parametrize(("point", "times"), [("before_request", 1), ("during_transfer", 2), ("before_ack", 1)])
def test_the_points_of_a_transfer_are_passed_in_order(wire: Wire, point: str, times: int) -> None:
    """Before it, between its slices and after the last, and before it is taken."""
    passed: list[tuple[int, int]] = []
    handoff = wire.offer(7)
    with injected(
        f"transceiver.{point}", lambda: passed.append((len(wire.generation_plane.copied), len(wire.to_context)))
    ):
        wire.ask(7, handoff)
    assert passed == [(int(point == "before_ack"), 0)] * times
    assert wire.receiver.poll(0).completed == [7]


def test_a_defect_costs_its_own_loan_only(wire: Wire, capsys: pytest.CaptureFixture[str]) -> None:
    def defect(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("a defect")

    read_pages = wire.generation_plane.read
    wire.generation_plane.read = defect
    wire.ask(7, wire.offer(7))
    wire.generation_plane.read = read_pages
    ended_usually(wire)
    read_at_once(wire, 8)


def test_a_cancel_before_it_was_opened_reads_nothing(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.receiver.answers.on_cancel(wire.ENDPOINT, SimpleNamespace(transfer_id=7, session=0))
    wire.ask(7, handoff)
    assert wire.receiver.poll(0).cancelled == [7]
    assert not wire.generation_plane.copied
    wire.pump()
    assert wire.sender.poll(0).cancelled == [7]


def test_an_owner_that_is_over_lends_nothing(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.receiver.lives.peer_dead("context", 1, certain=False)
    wire.ask(7, handoff)
    assert wire.receiver.poll(0).failed[0].code == "peer_dead"
    assert not wire.generation_plane.copied


def test_a_copy_that_was_whole_outlives_its_owner(wire: Wire) -> None:
    handoff = wire.offer(7)
    wire.generation_plane.during = lambda: wire.receiver.lives.peer_dead("context", 1)
    wire.ask(7, handoff)
    assert wire.receiver.poll(0).completed == [7]


def test_a_death_during_a_copy_that_cannot_be_used_fails_at_once(wire: Wire) -> None:
    handoff = wire.offer(7)

    def dies() -> None:
        wire.context_plane.lent.clear()
        wire.receiver.lives.peer_dead("context", 1)

    wire.generation_plane.during = dies
    wire.ask(7, handoff)
    assert wire.receiver.poll(0).failed[0].code == "peer_dead"
    assert wire.leases["generation", 7].released == 1


def test_an_open_transfer_is_not_read_again(wire: Wire) -> None:
    """The pages of the second lease are its caller's, who hears that there is an open one."""
    handoff = wire.offer(7)
    wire.generation_plane.attached = False
    wire.ask(7, handoff)
    wire.generation_plane.attached = True
    with pytest.raises(ValueError, match="open already"):
        wire.ask(7, handoff)
    assert not wire.generation_plane.copied
    ended_usually(wire)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(
        st.sampled_from(
            [
                "read",
                "deliver",
                "drop",
                "owner cancels",
                "receiver cancels",
                "poll",
                "wait",
                "move",
                "dead",
                "reconnect",
            ]
        ),
        max_size=14,
    )
)
def test_whatever_happens_nothing_is_lost(make_wire: Callable[..., Wire], events: list[str]) -> None:
    """After any history both leases go back once, unless the owner's deadline has still to come."""
    wire = make_wire("pull")
    wire.pair()
    for plane in (wire.context_plane, wire.generation_plane):
        plane.lends, plane.quick_bytes = True, 4 * 256
    handoff = wire.offer(7)
    asked = False
    for event in events:
        if event == "read" and not asked:
            asked = True
            wire.ask(7, handoff)
        elif event == "deliver":
            wire.pump()
        elif event == "drop":
            wire.to_context.clear()
            wire.to_generation.clear()
            wire.receiver.lives.on_disconnected(wire.ENDPOINT)
        elif event == "reconnect":
            wire.receiver.lives.on_connected(wire.ENDPOINT)
        elif event == "owner cancels":
            wire.sender.cancel(7)
        elif event == "receiver cancels":
            wire.receiver.cancel(7)
        elif event == "poll":
            wire.sender.poll(0)
            wire.receiver.poll(0)
        elif event == "wait":
            wire.clock.advance(CANCEL_REPEAT_S)
            wire.receiver.sweep()
        elif event == "move":
            wire.sender.waiting.let_move()
        elif event == "dead":
            wire.sender.peer_dead("another", 1)
        session = wire.sender.table.open.get(7)
        assert (7 in wire.context_plane.lent) <= (session is not None and not session.terminal)
    wire.clock.advance(61)
    for _ in range(4):
        for side in (wire.sender, wire.receiver):
            for overdue in side.sweep():
                side.cancel(overdue)
            side.cancel(7)
            side.poll(0)
        wire.receiver.lives.on_connected(wire.ENDPOINT)
        wire.pump()
        wire.clock.advance(CANCEL_REPEAT_S)
    assert wire.leases["context", 7].released == 1
    assert wire.context_plane.lent == wire.context_plane.receipts == {}
    if asked:
        assert wire.leases["generation", 7].released == 1


# Pure functions.


def layout(heads: int) -> PageLayout:
    layers = tuple(
        LayerCacheSpec(layer_index=index, num_kv_heads=heads, head_dim=8, dtype="float32") for index in range(2)
    )
    return PageLayout.build(CacheRequirements(layers), 4)


@given(
    held=st.lists(st.integers(-1, 99), min_size=1, max_size=12),
    data=st.data(),
)
def test_lent_pages_and_their_sums_go_together(held: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(held)))
    kept = data.draw(st.lists(st.booleans(), min_size=len(held) - first, max_size=len(held) - first))
    wanted = np.array([5 + i if keep else -1 for i, keep in enumerate(kept)], dtype=np.int32)
    same = layout(1)
    ids = np.array(held, dtype=np.int32)
    sums = page_sums(Checksums(7), same, [ids])  # type: ignore[arg-type]
    loan = Loan(access=b"", pages=[encode_pages(ids)], checksums=sums)
    expected = [page for page, keep in zip(held[first:], kept, strict=True) if keep]
    local = only_pages(wanted)
    (part,) = lent_parts(loan, same, [first], [wanted], [local])
    assert part.remote.tolist() == expected
    assert part.local.tolist() == [page for page in wanted.tolist() if page >= 0]
    (theirs,) = lent_sums(loan, [first], [wanted])
    assert np.frombuffer(theirs, "<u8").tolist() == [max(0, 7 * page) for page in expected]


def test_unequal_layouts_ask(wire: Wire) -> None:
    """Pieces of pages move between them."""
    link = wire.receiver.links.get(wire.ENDPOINT)
    # What is not known to be equal counts as unequal.
    link.pairing = link.pairing._replace(layout=msgspec.structs.replace(link.pairing.layout))
    wire.ask(7, wire.offer(7))
    assert type(wire.to_context[0]) is RequestData
    ended_usually(wire)


class OldTicket(msgspec.Struct, kw_only=True):
    """As servers know it that lend nothing."""

    transfer_id: int
    owner_instance_id: str
    owner_epoch: int
    num_tokens: int
    prompt_digest: bytes
    layout_digest: str
    expires_unix_ms: int
    nonce: bytes
    control_endpoint: str = ""
    protocol: int = PROTOCOL_VERSION


def test_servers_that_know_no_loans_take_the_ticket_and_ask(wire: Wire) -> None:
    token = wire.offer(7).ticket
    payload = token[: -len(wire.context.tickets.mac(b""))]
    known = msgspec.msgpack.decode(payload, type=OldTicket)
    assert known.transfer_id == 7
    again = msgspec.msgpack.encode(known)
    wire.ask(7, wire.handoff(again + wire.context.tickets.mac(again)))
    assert type(wire.to_context[0]) is RequestData
    ended_usually(wire)
