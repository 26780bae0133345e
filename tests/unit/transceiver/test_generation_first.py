"""§5.3, §6.4, §6.5: prompts that are claimed before they are computed, between two sides that tests pump by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvmesh.net.faults import injected
from kvmesh.protocol.disagg import ContextAddress
from kvmesh.protocol.transfer import Aux, Claim, RequestData, ResultAck, TransferResult
from kvmesh.transceiver.claims import sign
from kvmesh.transceiver.slices import BlockSpan
from kvmesh.transceiver.states import SessionState
from kvmesh.transceiver.table import DuplicateTransferError
from kvmesh.transceiver.tickets import CLOCK_SKEW_MS, Signer, TicketError
from kvmesh.transceiver.workers import WorkerBusyError

Wire = Any
"""tests/unit/transceiver/conftest.py"""

TOKENS = 15
BLOCKS = 4
DIGEST = b"p" * 32
AUX = Aux(first_tokens=[42], seed=7, prompt_tokens=TOKENS, cached_tokens=3)
PAGES = [10, 11, 12, 13]
TARGETS = [20, 21, 22, 23]


@pytest.fixture
def leases(tools: SimpleNamespace) -> dict[str, list[Any]]:
    """All leases that a test has made, by side."""
    return {"context": [], "generation": [], "make": tools.FakeLease}


@pytest.fixture
def early(leases: dict[str, list[Any]]) -> SimpleNamespace:
    """What an executor does in generation first, for each side of a wire."""

    def promise(wire: Wire, transfer_id: int = 7, *, tokens: int = TOKENS, digest: bytes = DIGEST) -> None:
        wire.sender.early.expect(transfer_id, f"c{transfer_id}", tokens, digest)

    def address(wire: Wire, **changes: Any) -> bytes:
        where = ContextAddress(control_endpoint=wire.ENDPOINT, instance_id="context", epoch=1)
        return sign(wire.context.addresses, msgspec.structs.replace(where, **changes))

    def claim(wire: Wire, transfer_id: int = 7, *, first: int = 0, at: bytes | None = None, **fields: Any) -> None:
        lease = leases["make"](*[TARGETS] * wire.generation.num_groups)
        wire.receiver.open_claimed(
            transfer_id,
            f"g{transfer_id}",
            address(wire) if at is None else at,
            lease,
            [first] * wire.generation.num_groups,
            fields.get("tokens", TOKENS),
            fields.get("digest", DIGEST),
        )
        leases["generation"].append(lease)

    def send(wire: Wire, first: int, end: int, aux: Aux | None = None, transfer_id: int = 7) -> bool:
        groups = wire.context.num_groups
        lease = leases["make"](*[PAGES[:end]] * groups)
        leases["context"].append(lease)
        return wire.sender.early.send(transfer_id, lease, [BlockSpan(first, end)] * groups, aux)

    def released() -> tuple[set[int], set[int]]:
        """How often leases of each side were released."""
        return {one.released for one in leases["context"]}, {one.released for one in leases["generation"]}

    def over(wire: Wire, transfer_id: int = 7) -> None:
        """Both sides have let go of everything."""
        wire.pump()
        wire.receiver.poll(0)
        wire.sender.poll(0)
        wire.receiver.poll(0)
        assert wire.sender.cancel(transfer_id), "nothing reads the pages any more"
        assert wire.receiver.cancel(transfer_id), "nothing writes into the pages any more"
        assert all(counts <= {1} for counts in released()), "each lease is released, once"
        assert len(wire.sender.table.open) == len(wire.receiver.table.open) == 0
        assert len(wire.sender.table.quarantine) == len(wire.receiver.table.quarantine) == 0
        assert len(wire.sender.early.early) == 0
        assert wire.generation_plane.open_sessions == 0

    return SimpleNamespace(promise=promise, claim=claim, send=send, address=address, released=released, over=over)


def moves(wire: Wire) -> list[tuple[list[int], list[int]]]:
    """What was moved, slice by slice: pages of the owner and of the receiver."""
    pulls = wire.generation_plane.direction == "pull"
    plane = wire.generation_plane if pulls else wire.context_plane
    found = []
    for job in plane.moved:
        for part in job.parts:
            ends = (part.remote, part.local) if pulls else (part.local, part.remote)
            found.append((ends[0].tolist(), ends[1].tolist()))
    return found


@pytest.mark.parametrize("order", ["context", "generation"])
def test_a_claimed_prompt_moves_when_it_is_computed(wire: Wire, early: SimpleNamespace, order: str) -> None:
    """§5.3: whichever leg comes first."""
    legs = [lambda: early.promise(wire), lambda: early.claim(wire, first=1)]
    for leg in legs if order == "context" else legs[::-1]:
        assert wire.sender.early.take_claimed() == []
        leg()
        wire.pump()
    assert wire.sender.early.take_claimed() == [7]
    assert wire.sender.early.take_claimed() == []
    assert wire.sender.table.open[7].status.state is SessionState.READY
    assert early.send(wire, 0, BLOCKS, AUX)
    wire.pump()
    assert moves(wire) == [(PAGES[1:], TARGETS[1:])]
    assert wire.receiver.poll(0).completed == [7]
    assert wire.receiver.take_aux(7) == AUX
    assert wire.receiver.take_aux(7) is None
    assert wire.sender.poll(0).completed == [7]
    assert early.released() == ({1}, {1})
    assert wire.states("context", 7) == ["registered", "transferring", "completed"]
    assert wire.states("generation", 7) == ["registered", "transferring", "completed"]
    early.over(wire)


def test_slices_go_out_while_others_are_computed(push: Wire, early: SimpleNamespace) -> None:
    early.claim(push)
    early.promise(push)
    push.pump()
    for first, end, aux in ((0, 1, None), (1, 3, None), (3, 4, AUX)):
        assert push.receiver.poll(0).completed == []
        assert early.send(push, first, end, aux)
        push.pump()
        assert moves(push)[-1] == (PAGES[first:end], TARGETS[first:end])
    assert push.receiver.poll(0).completed == [7]
    assert push.receiver.take_aux(7) == AUX
    assert push.sender.poll(0).completed == [7]
    assert (push.receiver.table.counters.pages, push.sender.table.counters.pages) == (2 * BLOCKS, 2 * BLOCKS)
    early.over(push)


def test_slices_sent_before_the_receiver_came_are_replayed_in_order_once(push: Wire, early: SimpleNamespace) -> None:
    """T17: late peer."""
    early.promise(push)
    assert early.send(push, 0, 1)
    assert early.send(push, 1, 3)
    assert early.send(push, 3, 4, AUX)
    push.pump()
    assert moves(push) == []
    early.claim(push)
    push.pump()
    assert moves(push) == [(PAGES[:1], TARGETS[:1]), (PAGES[1:3], TARGETS[1:3]), (PAGES[3:], TARGETS[3:])]
    assert push.receiver.poll(0).completed == [7]
    assert push.sender.poll(0).completed == [7]
    early.over(push)


def test_only_what_is_missing_moves_of_each_slice(push: Wire, early: SimpleNamespace) -> None:
    early.promise(push)
    early.claim(push, first=2)
    push.pump()
    for first, end, aux in ((0, 1, None), (1, 3, None), (3, 4, AUX)):
        early.send(push, first, end, aux)
        push.pump()
    assert [sources for sources, _ in moves(push)] == [[], PAGES[2:3], PAGES[3:]]
    assert push.receiver.poll(0).completed == [7]
    early.over(push)


def test_windowed_groups_come_whole_with_the_last_slice(make_wire: Callable[..., Wire], early: SimpleNamespace) -> None:
    """§6.5."""
    wire = make_wire("push", groups=2)
    wire.pair()
    # The window of the second group (64 tokens) is longer than this prompt: nothing is left behind.
    early.promise(wire)
    early.claim(wire)
    wire.pump()
    early.send(wire, 0, 2)
    wire.pump()
    early.send(wire, 2, 4, AUX)
    wire.pump()
    assert [sources for sources, _ in moves(wire)] == [PAGES[:2], PAGES[:2], PAGES[2:], PAGES[2:]]
    assert wire.receiver.poll(0).completed == [7]
    early.over(wire)


def test_a_prompt_that_ends_with_its_first_token_moves_nothing(wire: Wire, early: SimpleNamespace) -> None:
    early.promise(wire)
    early.claim(wire)
    wire.pump()
    finished = msgspec.structs.replace(AUX, finished=True)
    assert wire.sender.early.send_nothing(7, finished)
    wire.pump()
    assert moves(wire) == []
    assert wire.receiver.poll(0).completed == [7]
    assert wire.receiver.take_aux(7) == finished
    assert wire.sender.poll(0).completed == [7]
    assert (wire.receiver.table.counters.pages, wire.sender.table.counters.pages) == (BLOCKS, BLOCKS), "of the pairing"
    early.over(wire)


# Claims.


def claim_of(wire: Wire, **changes: Any) -> Claim:
    fields = {
        "transfer_id": 7,
        "owner_instance_id": "context",
        "owner_epoch": 1,
        "receiver_instance_id": "generation",
        "receiver_epoch": 1,
        "num_tokens": TOKENS,
        "prompt_digest": DIGEST,
        "expires_unix_ms": wire.context.now_unix_ms() + 60_000,
        "lifetime_ms": 60_000,
        "nonce": b"n" * 16,
    }
    return Claim(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"transfer_id": 8}, "claim_mismatch"),
        ({"receiver_instance_id": "somebody"}, "claim_mismatch"),
        ({"receiver_epoch": 2}, "claim_mismatch"),
        ({"owner_instance_id": "other"}, "claim_foreign"),
        ({"owner_epoch": 0}, "claim_stale_epoch"),
        ({"protocol": 99}, "claim_protocol"),
        ({"expires_unix_ms": 0}, "claim_expired"),
        ({"secret": b"another"}, "claim_forged"),
        ({"purpose": "ticket"}, "claim_forged"),
    ],
    ids=str,
)
def test_claims_that_are_refused(wire: Wire, early: SimpleNamespace, changes: dict[str, Any], code: str) -> None:
    """403, a counter, and both sides unharmed."""
    early.promise(wire)
    early.claim(wire)
    wire.deliver_to_generation()
    [request] = wire.to_context
    fields = dict(changes)
    signer = Signer(fields.pop("secret", b"cluster secret of these tests"), fields.pop("purpose", "claim"))
    wire.to_context[0] = msgspec.structs.replace(request, claim=sign(signer, claim_of(wire, **fields)))
    wire.pump()
    [failure] = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (403, code)
    assert wire.sender.table.counters.refused == 1
    assert wire.sender.early.take_claimed() == []
    # The context request is as it was: the right receiver may still come.
    early.claim(wire)
    wire.pump()
    assert wire.sender.early.take_claimed() == [7]
    wire.sender.cancel(7)
    early.over(wire)


@pytest.mark.parametrize("skew_ms", [-CLOCK_SKEW_MS + 1, -61_000, 61_000, CLOCK_SKEW_MS])
def test_clocks_of_two_hosts_may_differ(wire: Wire, early: SimpleNamespace, skew_ms: int) -> None:
    """The receiver's clock is ``skew_ms`` ahead; its claim is kept as long as it says, and serves once."""
    early.claim(wire)
    wire.deliver_to_generation()
    [request] = wire.to_context
    expires_ms = wire.context.now_unix_ms() + 60_000 + skew_ms
    claim = sign(Signer(b"cluster secret of these tests", "claim"), claim_of(wire, expires_unix_ms=expires_ms))
    wire.to_context[0] = msgspec.structs.replace(request, claim=claim)
    wire.pump()
    assert 7 in wire.sender.early.early
    wire.clock.advance(59)
    wire.sender.poll(0)
    assert 7 in wire.sender.early.early
    # A second copy is known for one as long as a claim could pass.
    copy = Claim(
        **{name: getattr(claim_of(wire, expires_unix_ms=expires_ms), name) for name in Claim.__struct_fields__}
    )
    with pytest.raises(TicketError, match="was already used"):
        wire.sender.early._spent.spend(copy, expires_ms + CLOCK_SKEW_MS - 1)
    wire.clock.advance(1)
    wire.sender.poll(0)
    assert 7 not in wire.sender.early.early


def test_a_claim_serves_once(pull: Wire, early: SimpleNamespace) -> None:
    early.claim(pull)
    [request] = pull.to_context
    pull.pump()
    pull.receiver.cancel(7)
    early.over(pull)
    pull.sender.on_request(pull.ROUTE, request)
    assert pull.to_generation[-1].code == "claim_replayed"


def test_a_claim_to_another_prompt_gets_nothing(wire: Wire, early: SimpleNamespace) -> None:
    early.promise(wire, digest=b"q" * 32)
    early.claim(wire)
    wire.pump()
    [failure] = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (400, "claim_mismatch")
    assert wire.sender.early.take_claimed() == []
    wire.sender.cancel(7)
    early.over(wire)


def test_of_two_receivers_the_first_gets_the_prompt(wire: Wire, early: SimpleNamespace) -> None:
    early.claim(wire)
    wire.pump()
    token = sign(wire.context.claims, claim_of(wire, nonce=b"m" * 16))
    second = RequestData(transfer_id=7, session=99, ticket=b"", claim=token, first_block=[0], dst_pages=[b""])
    for _ in range(2):  # before the context request has come, and after
        wire.sender.on_request(wire.ROUTE, second)
        refused = wire.to_generation.pop()
        assert (refused.session, refused.status, refused.code) == (99, 409, "claim_taken")
        early.promise(wire) if 7 not in wire.sender.table.open else None
        token = sign(wire.context.claims, claim_of(wire, nonce=b"k" * 16))
        second = msgspec.structs.replace(second, claim=token)
    assert wire.sender.early.take_claimed() == [7]
    wire.sender.cancel(7)
    early.over(wire)


def test_a_prompt_is_promised_once(wire: Wire, early: SimpleNamespace) -> None:
    early.promise(wire)
    with pytest.raises(DuplicateTransferError):
        early.promise(wire)
    with pytest.raises(DuplicateTransferError):
        wire.offer(7)
    wire.sender.cancel(7)
    early.over(wire)


def test_an_address_must_be_signed(wire: Wire, early: SimpleNamespace) -> None:
    for token, code in (
        (early.address(wire)[:-1] + b"x", "address_forged"),
        (b"", "address_forged"),
        (early.address(wire, protocol=99), "address_protocol"),
    ):
        with pytest.raises(TicketError) as caught:
            early.claim(wire, at=token)
        assert (caught.value.status, caught.value.code) == (403, code)
    assert wire.dialled == [wire.ENDPOINT], "nobody else was dialled"


def test_receivers_that_come_first_are_remembered_in_bounded_number(
    pull: Wire, early: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull.sender.early.early, "_capacity", 2)
    for transfer_id in (7, 8, 9):
        early.claim(pull, transfer_id)
    pull.pump()
    assert len(pull.sender.early.early) == 2
    [failure] = pull.receiver.poll(0).failed
    assert (failure.id, failure.status, failure.code) == (9, 503, "too_many_claims")
    for transfer_id in (7, 8):
        pull.receiver.cancel(transfer_id)
    early.over(pull)


@pytest.mark.parametrize(("timeout_ms", "after_s"), [(600_000, 120.0), (30_000, 30.0)])
def test_a_receiver_whose_context_request_never_comes_hears_it(
    make_wire: Callable[..., Wire], early: SimpleNamespace, timeout_ms: int, after_s: float
) -> None:
    """§5.3: after 120 s, or when its claim expires."""
    wire = make_wire("pull", timeout_ms=timeout_ms)
    wire.pair()
    early.claim(wire)
    wire.pump()
    wire.clock.advance(after_s - 0.01)
    wire.sender.poll(0)
    assert not wire.to_generation
    wire.clock.advance(0.02)
    wire.sender.poll(0)
    wire.pump()
    [failure] = wire.receiver.poll(0).failed
    assert (failure.status, failure.code) == (503, "kv_context_timeout")
    early.over(wire)


def test_a_context_request_whose_receiver_never_comes_is_overdue(wire: Wire, early: SimpleNamespace) -> None:
    """WAIT_SCHEDULER is bounded by kv_transfer_timeout_ms."""
    early.promise(wire)
    wire.clock.advance(59.9)
    assert wire.sender.sweep() == []
    wire.clock.advance(0.2)
    assert wire.sender.sweep() == [7]
    assert wire.sender.cancel(7)
    early.over(wire)
    # A receiver that comes too late need not wait for its own deadline.
    early.claim(wire)
    wire.pump()
    assert wire.receiver.poll(0).cancelled == [7]
    early.over(wire)


def test_while_a_prompt_is_computed_its_transfer_has_no_deadline(push: Wire, early: SimpleNamespace) -> None:
    early.promise(push)
    early.claim(push)
    push.pump()
    push.clock.advance(1000)
    assert push.sender.sweep() == []
    early.send(push, 0, 2)
    push.pump()
    push.clock.advance(1000)
    assert push.sender.sweep() == []
    early.send(push, 2, 4, AUX)
    push.clock.advance(59)
    assert push.sender.sweep() == []
    push.clock.advance(2)
    assert push.sender.sweep() == [7], "from the last slice on it has kv_transfer_timeout_ms"
    push.pump()
    early.over(push)


def test_a_slice_that_does_not_go_out_is_overdue(push: Wire, early: SimpleNamespace) -> None:
    """§8.24: the clock of a chunk."""
    early.promise(push)
    early.claim(push)
    push.pump()
    early.send(push, 0, 2)  # and no worker runs
    push.clock.advance(61)
    assert push.sender.sweep() == [7]
    push.sender.cancel(7)
    early.over(push)


def test_each_slice_that_arrives_gives_the_receiver_its_time_anew(push: Wire, early: SimpleNamespace) -> None:
    """§8.24, decisions.md 12: what aborts is that no chunk at all has moved for kv_transfer_timeout_ms."""
    early.promise(push)
    early.claim(push)
    push.pump()
    push.clock.advance(50)
    early.send(push, 0, 2)
    push.pump()
    push.clock.advance(50)
    assert push.receiver.sweep() == []
    early.send(push, 2, 3)
    push.pump()
    push.clock.advance(59.9)
    assert push.receiver.sweep() == []
    push.clock.advance(0.2)
    assert push.receiver.sweep() == [7]
    early.send(push, 3, 4, AUX)
    push.pump()
    poll = push.receiver.poll(0)
    assert poll.completed == [7]
    assert poll.notes[7].first_slice_s == 50
    assert len(poll.notes[7].slices_ns) == 2 * 3
    early.over(push)


# What comes with the last slice.


@pytest.mark.parametrize(
    ("aux", "says"),
    [
        (None, "no first token came"),
        (msgspec.structs.replace(AUX, first_tokens=[]), "0 first tokens came"),
        (msgspec.structs.replace(AUX, first_tokens=[1, 2]), "2 first tokens came"),
        (msgspec.structs.replace(AUX, prompt_tokens=TOKENS + 1), "usage of 16 tokens"),
        (msgspec.structs.replace(AUX, cached_tokens=TOKENS + 1), "16 cached"),
        (msgspec.structs.replace(AUX, cached_tokens=-1), "-1 cached"),
    ],
    ids=str,
)
def test_what_comes_with_the_last_slice_is_checked(wire: Wire, early: SimpleNamespace, aux: Any, says: str) -> None:
    """§6.8."""
    early.promise(wire)
    early.claim(wire)
    wire.pump()
    early.send(wire, 0, BLOCKS, AUX)
    wire.context.workers.run()
    [answer] = wire.to_generation
    assert isinstance(answer, TransferResult)
    wire.to_generation[0] = msgspec.structs.replace(answer, aux=aux)
    wire.pump()
    [failure] = wire.receiver.poll(0).failed
    assert failure.code == "bad_aux"
    assert says in failure.message
    assert wire.sender.poll(0).failed[0].code == "receiver_failed"
    early.over(wire)


def test_slices_out_of_order_are_dropped(push: Wire, early: SimpleNamespace) -> None:
    early.promise(push)
    early.claim(push)
    push.pump()
    early.send(push, 0, 1)
    early.send(push, 1, 3)
    push.context.workers.run()
    first, second = push.to_generation
    push.to_generation.clear()
    push.receiver.answers.on_result(push.ENDPOINT, second)
    assert push.receiver.table.counters.dropped == 1
    push.receiver.answers.on_result(push.ENDPOINT, first)
    push.receiver.answers.on_result(push.ENDPOINT, first)
    assert push.receiver.table.counters.dropped == 2
    push.receiver.answers.on_result(push.ENDPOINT, second)
    early.send(push, 3, 4, AUX)
    push.pump()
    assert push.receiver.poll(0).completed == [7]
    early.over(push)


# Ends, in every state: nobody waits, and every lease is released once.

PULL_STATES = ["early", "promised", "met", "last queued"]
CASES = [
    *(("pull", state) for state in PULL_STATES),
    *(("push", state) for state in [*PULL_STATES, "sent", "between", "written"]),
]
"""Slices go out on planes where the owner writes; where the receiver reads, the prompt does at its end."""


@pytest.fixture
def paired(make_wire: Callable[..., Wire]) -> Callable[[str], Wire]:
    def make(direction: str) -> Wire:
        wire = make_wire(direction)
        wire.pair()
        return wire

    return make


def bring_to(wire: Wire, early: SimpleNamespace, state: str) -> None:
    if state in ("early", "met"):
        early.claim(wire)
        wire.pump()
    if state != "early":
        early.promise(wire)
    if state in ("early", "promised", "met"):
        return
    early.claim(wire)
    wire.pump()
    if state == "last queued":
        early.send(wire, 0, BLOCKS, AUX)
        return
    early.send(wire, 0, 2)
    if state == "sent":
        return
    wire.pump()
    if state == "written":
        early.send(wire, 2, 4, AUX)
        wire.context.workers.run()


@pytest.mark.parametrize(("direction", "state"), CASES)
@pytest.mark.parametrize("who", ["owner", "receiver", "both"])
def test_a_cancel_ends_it_in_every_state(
    paired: Callable[[str], Wire], early: SimpleNamespace, direction: str, state: str, who: str
) -> None:
    wire = paired(direction)
    bring_to(wire, early, state)
    sent = len(moves(wire))
    if who != "receiver":
        wire.sender.cancel(7)
    if who != "owner" and state != "promised":
        wire.receiver.cancel(7)
    wire.pump()
    if state == "promised":
        early.claim(wire)  # its context request may have gone meanwhile
        wire.pump()
        wire.receiver.cancel(7)
    if state == "early":
        early.promise(wire)
        wire.sender.cancel(7)
    wire.pump()
    assert len(moves(wire)) == sent, "no further slice"
    assert early.send(wire, 2, 4, AUX) is False
    early.over(wire)


def test_no_chunk_follows_a_pending_cancel(push: Wire, early: SimpleNamespace) -> None:
    """T18: neither an intermediate nor the final one."""
    early.promise(push)
    early.claim(push)
    push.pump()
    early.send(push, 0, 1)
    push.receiver.cancel(7)
    push.deliver_to_context()
    assert push.sender.table.open[7].status.cancelling
    assert early.send(push, 1, 3) is False
    assert early.send(push, 3, 4, AUX) is False
    early.over(push)
    assert moves(push) == []


@pytest.mark.parametrize(("direction", "state"), [case for case in CASES if case[1] != "promised"])
def test_the_death_of_the_receiver_ends_it(
    paired: Callable[[str], Wire], early: SimpleNamespace, direction: str, state: str
) -> None:
    wire = paired(direction)
    bring_to(wire, early, state)
    wire.sender.peer_dead("generation", 1)
    wire.context.workers.run()
    if state == "early":
        assert len(wire.sender.early.early) == 0
        early.promise(wire)
        assert wire.sender.poll(0).cancelled == [7], "the context request does not wait for the dead"
        return
    [failure] = wire.sender.poll(0).failed
    assert failure.code == "peer_dead"
    wire.sender.poll(0)
    assert early.released()[0] <= {1}
    assert len(wire.sender.table.open) == len(wire.sender.table.quarantine) == 0


@pytest.mark.parametrize(("direction", "state"), [case for case in CASES if case[1] != "promised"])
def test_the_death_of_the_owner_ends_it(
    paired: Callable[[str], Wire], early: SimpleNamespace, direction: str, state: str
) -> None:
    wire = paired(direction)
    bring_to(wire, early, state)
    wire.receiver.lives.peer_dead("context", 1)
    [failure] = wire.receiver.poll(0).failed
    assert failure.code == "peer_dead"
    wire.generation.workers.run()
    wire.receiver.poll(0)
    assert early.released()[1] == {1}
    assert wire.generation_plane.open_sessions == 0


def test_a_slice_that_fails_ends_both_sides(push: Wire, early: SimpleNamespace) -> None:
    early.promise(push)
    early.claim(push)
    push.pump()
    push.context_plane.move_error = "the wire is cut"
    early.send(push, 0, 1)
    early.send(push, 1, 3)
    push.pump()
    [failure] = push.receiver.poll(0).failed
    assert (failure.code, failure.message) == ("transfer_failed", "the wire is cut")
    assert push.sender.poll(0).failed[0].code == "transfer_failed"
    assert early.send(push, 3, 4, AUX) is False
    early.over(push)


def test_a_fault_before_the_request_fails_the_receiver_and_frees_the_owner(wire: Wire, early: SimpleNamespace) -> None:
    from kvmesh.net.faults import FaultInjectedError

    def fail() -> None:
        raise FaultInjectedError("injected")

    early.promise(wire)
    with injected("transceiver.before_request", fail):
        early.claim(wire)
    wire.pump()
    assert [failure.code for failure in wire.receiver.poll(0).failed] == ["transfer_failed"]
    assert wire.sender.poll(0).cancelled == [7], "its claim was given up"
    early.over(wire)


def test_a_receiver_may_decline_before_it_asks(wire: Wire, early: SimpleNamespace) -> None:
    for promised_first in (True, False):
        transfer_id = 8 + promised_first
        if promised_first:
            early.promise(wire, transfer_id)
        wire.receiver.decline_claim(transfer_id, early.address(wire))
        wire.pump()
        if not promised_first:
            early.promise(wire, transfer_id)
        assert wire.sender.poll(0).cancelled == [transfer_id]


# Checksums.


class Checksums:
    """Sums that are what the test says, by slice."""

    def __init__(self, *values: int) -> None:
        self._values = itertools.cycle(values)

    def running(self, parts: Sequence[Any]) -> Any:
        value = next(self._values)
        sums = [bytes([value] * 8 * len(part.local)) for part in parts]
        return SimpleNamespace(add_all=lambda: None, encoded=lambda: sums)

    def of(self, parts: Sequence[Any]) -> list[bytes]:
        return self.running(parts).encoded()


@pytest.mark.parametrize("damaged", [None, 0, 1, 2])
def test_every_slice_is_checked(push: Wire, early: SimpleNamespace, damaged: int | None) -> None:
    values = [9 if damaged == number else 5 for number in range(3)]
    object.__setattr__(push.context, "checksums", Checksums(5))
    object.__setattr__(push.generation, "checksums", Checksums(*values))
    early.promise(push)
    early.claim(push)
    push.pump()
    for first, end, aux in ((0, 1, None), (1, 3, None), (3, 4, AUX)):
        early.send(push, first, end, aux)
        push.pump()
    poll = push.receiver.poll(0)
    if damaged is None:
        assert poll.completed == [7]
    else:
        assert [failure.code for failure in poll.failed] == ["checksum_mismatch"]
    early.over(push)


# Ends while slices are on their way.


def no_room(*_: Any) -> None:
    raise WorkerBusyError("1024 jobs wait already")


def test_a_receiver_is_told_of_a_failure_when_nothing_is_written_any_more(
    push: Wire, early: SimpleNamespace, leases: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """§6.1: told that its transfer has failed, a receiver reuses its pages; an earlier slice is being written then."""
    early.promise(push)
    early.claim(push)
    push.pump()

    def during() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(push.context.workers, "submit", no_room)
            early.send(push, 2, BLOCKS, AUX)
        push.deliver_to_generation()
        assert push.receiver.poll(0).failed == []
        assert leases["generation"][0].released == 0

    push.context_plane.during = during
    early.send(push, 0, 2)
    push.pump()
    assert moves(push) == [], "the slice that was being written ended early"
    [failure] = push.receiver.poll(0).failed
    assert "too many transfers to this receiver" in failure.message
    early.over(push)


def test_a_slice_that_cannot_be_sent_ends_the_transfer_after_those_before_it(
    push: Wire, early: SimpleNamespace, leases: dict[str, list[Any]]
) -> None:
    early.promise(push)
    early.claim(push)
    push.pump()

    def during() -> None:
        lease = leases["make"](PAGES[:3])
        leases["context"].append(lease)
        assert push.sender.early.send(7, lease, [BlockSpan(2, BLOCKS)], AUX)
        push.deliver_to_generation()
        assert push.receiver.poll(0).failed == []

    push.context_plane.during = during
    early.send(push, 0, 2)
    push.pump()
    [failure] = push.receiver.poll(0).failed
    assert "block 3 is wanted" in failure.message
    assert [failed.code for failed in push.sender.poll(0).failed] == ["pages_mismatch"]
    early.over(push)


def test_a_claim_that_comes_twice_is_served_once(wire: Wire, early: SimpleNamespace) -> None:
    early.claim(wire)
    [request] = wire.to_context
    for _ in range(2):  # before the context request has come, and after
        wire.sender.on_request(wire.ROUTE, request)
    early.promise(wire)
    wire.pump()
    early.send(wire, 0, BLOCKS, AUX)
    wire.pump()
    assert wire.sender.table.counters.refused == 0
    assert wire.sender.table.counters.dropped == 2
    assert wire.receiver.poll(0).completed == [7]
    early.over(wire)


def test_a_receiver_that_says_done_before_the_prompt_is_there_is_not_believed(
    push: Wire, early: SimpleNamespace
) -> None:
    early.promise(push)
    early.claim(push)
    push.pump()
    early.send(push, 0, 2)
    push.pump()
    number = next(iter(push.receiver.table.open.values())).session
    push.sender.on_ack(push.ROUTE, ResultAck(transfer_id=7, session=number, status="done"))
    assert push.sender.poll(0).completed == []
    assert push.sender.table.counters.dropped == 1
    early.send(push, 2, BLOCKS, AUX)
    push.pump()
    assert push.sender.poll(0).completed == [7]
    early.over(push)


@pytest.mark.parametrize(
    ("blocks", "is_last", "says"),
    [
        ((3, 4), True, "blocks 2 to 3 of layer group 0 have not come"),
        ((2, 3), True, "ends at block 3 of 4"),
        ((3, 4), False, "blocks 2 to 3 of layer group 0 have not come"),
        ((2, 5), False, "said to be blocks 2 to 5 of 4"),
        ((3, 2), False, "said to be blocks 3 to 2 of 4"),
        ((-1, 4), True, "said to be blocks -1 to 4 of 4"),
        ((1 << 63, 1 << 63), False, "of 4"),
    ],
)
def test_slices_that_leave_a_gap_are_not_a_prompt(
    push: Wire, early: SimpleNamespace, blocks: tuple[int, int], is_last: bool, says: str
) -> None:
    early.promise(push)
    early.claim(push)
    push.pump()
    early.send(push, 0, 2)
    push.pump()
    early.send(push, 2, BLOCKS, AUX)
    push.context.workers.run()
    [answer] = push.to_generation
    aux = AUX if is_last else None
    push.to_generation[0] = msgspec.structs.replace(answer, slice_blocks=blocks, is_last=is_last, aux=aux)
    push.pump()
    [failure] = push.receiver.poll(0).failed
    assert says in failure.message
    early.over(push)


def test_no_part_of_a_prompt_is_granted(pull: Wire, early: SimpleNamespace) -> None:
    early.promise(pull)
    early.claim(pull)
    pull.pump()
    early.send(pull, 0, BLOCKS, AUX)
    pull.context.workers.run()
    [answer] = pull.to_generation
    pull.to_generation[0] = msgspec.structs.replace(answer, is_last=False, aux=None)
    pull.pump()
    assert "a part of the prompt is granted" in pull.receiver.poll(0).failed[0].message
    early.over(pull)
