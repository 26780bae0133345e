"""The transfer desk over a transceiver that does what the test says."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvmesh.config import CacheTransceiverConfig
from kvmesh.engine.offers import EarlyOffers
from kvmesh.engine.sampler import Sampler
from kvmesh.engine.sequence import Sequence
from kvmesh.engine.tokens import TokenHistory
from kvmesh.engine.transfers import TransferDesk
from kvmesh.engine.waiting import LoopWaiter
from kvmesh.hashing import ReuseScope
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.disagg import HandOff
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.sampling import SamplingParams
from kvmesh.protocol.transfer import Aux
from kvmesh.transceiver import TicketError, TransferFailure, TransferPoll, TransferSize

HANDOFF = HandOff(ticket=b"t", control_endpoint="tcp://h:1", instance_id="c", epoch=1, layout_digest="d", seed=0)
NOTHING = TransferPoll([], [], [], [], {})
UNSCOPED = ReuseScope()


class ScriptedTransceiver:
    """Records calls; polls answer what was put into ``context`` and ``generation``."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.digests: list[bytes] = []
        self.context = NOTHING
        self.generation = NOTHING
        self.undrained: set[int] = set()
        self.auxes: dict[int, Aux] = {}
        self.overdue: list[int] = []
        self.has_tracked_transfers = False
        self.awaits_quiet = False

    def respond_and_send(
        self, transfer_id: int, request_id: str, lease: object, num_tokens: int, seed: int, prompt_digest: bytes
    ) -> bytes:
        self.digests.append(prompt_digest)
        self.calls.append(("send", transfer_id, num_tokens, seed))
        self.has_tracked_transfers = True
        return b"handoff"

    def request_and_receive(
        self,
        transfer_id: int,
        request_id: str,
        handoff: HandOff,
        lease: object,
        first_missing: list[int],
        prompt_digest: bytes,
    ) -> TransferSize:
        self.digests.append(prompt_digest)
        self.calls.append(("receive", transfer_id, first_missing))
        self.has_tracked_transfers = True
        return TransferSize(3, 3 * 512)

    def check_context_transfer_status(self, at_least: int) -> TransferPoll:
        self.calls.append(("context", at_least))
        poll, self.context = self.context, NOTHING
        return poll

    def check_gen_transfer_status(self, at_least: int) -> TransferPoll:
        self.calls.append(("generation", at_least))
        poll, self.generation = self.generation, NOTHING
        return poll

    def take_aux(self, transfer_id: int) -> Aux | None:
        return self.auxes.pop(transfer_id, None)

    def sweep_timeouts(self) -> list[int]:
        self.calls.append("sweep")
        overdue, self.overdue = self.overdue, []
        return overdue

    def decline(self, transfer_id: int, handoff: HandOff) -> None:
        self.calls.append(("decline", transfer_id))
        if handoff.ticket == b"forged":
            raise TicketError("ticket_forged", "no")

    def cancel_request(self, transfer_id: int) -> bool:
        self.calls.append(("cancel", transfer_id))
        return transfer_id not in self.undrained


class HoldingCache:
    def hold(self, num_tokens: int) -> str:
        return f"lease of {num_tokens}"


@pytest.fixture
def transceiver() -> ScriptedTransceiver:
    return ScriptedTransceiver()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def desk(transceiver: ScriptedTransceiver, clock: ManualClock) -> TransferDesk:
    config = CacheTransceiverConfig(kv_transfer_timeout_ms=2000)
    offers = EarlyOffers(transceiver, [None], 8, settle=lambda: None)  # type: ignore[arg-type]
    return TransferDesk(transceiver, config, LoopWaiter(None, clock), clock, offers)  # type: ignore[arg-type]


def sequence(transfer_id: int, kind: Any = "generation", first: int = 0, scope: ReuseScope = UNSCOPED) -> Sequence:
    history = TokenHistory(np.arange(first, first + 40, dtype=np.int32))
    params = SamplingParams(max_tokens=4, seed=77)
    return Sequence(
        request_id=f"r{transfer_id}",
        kind=kind,
        params=params,
        history=history,
        state=Sampler(frozenset()).state(params, history),
        scope=scope,
        arrival=transfer_id,
        transfer_id=transfer_id,
        handoff=HANDOFF if kind == "generation" else None,
        cache=HoldingCache(),  # type: ignore[arg-type]
    )


def test_a_received_prompt_is_reported_once(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    seq = sequence(1)
    desk.receive(seq, [2])
    assert desk.num_receiving == 1
    assert desk.look() == []
    transceiver.generation = TransferPoll([1], [], [], [], {})
    assert desk.look() == [(seq, None, None)]
    assert (seq.timings.transfer_pages, seq.timings.transfer_bytes) == (3, 1536)
    assert desk.num_receiving == 0
    assert desk.look() == []


def test_failure_carries_the_transceiver_s_words(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    seq = sequence(1)
    desk.receive(seq, [0])
    transceiver.generation = TransferPoll([], [TransferFailure(1, 403, "ticket_expired", "too late")], [], [], {})
    [end] = desk.look()
    assert end.error is not None
    assert (end.error.status, end.error.code, end.error.message) == (403, "ticket_expired", "too late")
    assert (seq.timings.transfer_pages, seq.timings.transfer_bytes) == (0, 0), "nothing has arrived"


@pytest.mark.parametrize("seen_by", ["sweep", "poll"])
def test_a_timeout_fails_the_request_and_cancels_until_drained(
    desk: TransferDesk, transceiver: ScriptedTransceiver, seen_by: str
) -> None:
    transceiver.undrained = {1}
    desk.receive(sequence(1), [0])
    if seen_by == "sweep":
        transceiver.overdue = [1]
    else:
        transceiver.generation = TransferPoll([], [], [], [1], {})
    transceiver.calls.clear()
    [end] = desk.look()
    # T19: the sweep comes before the polls, and the polls do not wait.
    assert transceiver.calls[:3] == ["sweep", ("context", 0), ("generation", 0)]
    assert end.error is not None
    assert (end.error.status, end.error.code) == (503, "kv_transfer_timeout")
    assert desk.knows(1)
    transceiver.calls.clear()
    assert desk.look() == []
    assert transceiver.calls[:2] == [("cancel", 1), "sweep"]
    transceiver.undrained.clear()
    desk.look()
    assert not desk.knows(1)
    transceiver.calls.clear()
    desk.look()
    assert ("cancel", 1) not in transceiver.calls


def test_an_overdue_outgoing_transfer_is_cancelled(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    desk.send(sequence(5, "context"))
    transceiver.overdue = [5]
    assert desk.look() == []
    assert transceiver.calls[-1] == ("cancel", 5)


def test_declining_a_bad_ticket_is_no_error(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    desk.decline(3, HANDOFF)
    desk.decline(4, msgspec.structs.replace(HANDOFF, ticket=b"forged"))
    assert transceiver.calls == [("decline", 3), ("decline", 4)]


class CountedLease:
    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


@pytest.mark.parametrize("error", [TicketError("ticket_expired", "late"), ValueError("does not fit")])
def test_a_transfer_that_cannot_begin_gives_its_lease_back(
    desk: TransferDesk, transceiver: ScriptedTransceiver, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = CountedLease()
    monkeypatch.setattr(HoldingCache, "hold", lambda _self, _tokens: lease)

    def refuse(*_arguments: object, **_named: object) -> None:
        raise error

    monkeypatch.setattr(transceiver, "request_and_receive", refuse)
    monkeypatch.setattr(transceiver, "respond_and_send", refuse)
    with pytest.raises(ApiError) as caught:
        desk.receive(sequence(1), [0])
    assert caught.value.status == (403 if isinstance(error, TicketError) else 400)
    if not isinstance(error, TicketError):
        with pytest.raises(ApiError):
            desk.send(sequence(2, "context"))
    assert lease.releases == (1 if isinstance(error, TicketError) else 2)
    assert desk.num_receiving == 0
    assert not desk.knows(2)


def test_cancelled_by_the_sender_is_an_error_of_the_receiver(
    desk: TransferDesk, transceiver: ScriptedTransceiver
) -> None:
    desk.receive(sequence(1), [0])
    transceiver.generation = TransferPoll([], [], [1], [], {})
    [end] = desk.look()
    assert end.error is not None
    assert end.error.code == "kv_transfer_cancelled"


def test_cancelled_here_is_nobody_s_news(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    desk.receive(sequence(1), [0])
    desk.cancel(1)
    transceiver.generation = TransferPoll([], [], [1], [], {})
    assert desk.look() == []


def test_sending_names_the_request_until_its_readers_are_done(
    desk: TransferDesk, transceiver: ScriptedTransceiver
) -> None:
    assert desk.send(sequence(5, "context")) == b"handoff"
    assert transceiver.calls == [("send", 5, 40, 77)]
    assert desk.outgoing_of("r5") == 5
    transceiver.context = TransferPoll([5], [], [], [], {})
    assert desk.look() == []
    assert desk.outgoing_of("r5") is None


def test_idle_wait(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    assert desk.idle_wait_s() is None
    desk.receive(sequence(1), [0])
    assert desk.idle_wait_s() == 2.0, "the smaller of poll interval and transfer timeout"
    transceiver.undrained = {1}
    desk.cancel(1)
    assert desk.idle_wait_s() == 1.0, "a cancel is repeated once a second"
    transceiver.undrained = set()
    desk.look()
    assert desk.idle_wait_s() == 2.0
    transceiver.awaits_quiet = True
    assert desk.idle_wait_s() == 1.0


def test_what_an_owner_has_still_to_hear_is_looked_at_without_open_transfers(
    desk: TransferDesk, transceiver: ScriptedTransceiver
) -> None:
    desk.look()
    assert transceiver.calls == []
    transceiver.awaits_quiet = True
    assert not desk.is_tracking
    assert desk.idle_wait_s() == 1.0
    desk.look()
    assert transceiver.calls == ["sweep", ("context", 0), ("generation", 0)]


def test_a_prompt_on_its_way_is_waited_for(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    assert not desk.wait(1.0, blocked=True), "there is nothing to wait for"
    seq = sequence(1)
    desk.receive(seq, [0])
    transceiver.calls.clear()
    transceiver.generation = TransferPoll([1], [], [], [], {})
    assert desk.wait(1.0, blocked=False)
    assert transceiver.calls == [("generation", 1)]
    transceiver.has_tracked_transfers = False
    assert desk.look() == [(seq, None, None)]
    assert desk.look() == []


def test_what_is_cancelled_after_a_wait_is_nobody_s_news(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    desk.receive(sequence(1), [0])
    transceiver.generation = TransferPoll([1], [], [], [], {})
    assert desk.wait(1.0, blocked=False)
    desk.cancel(1)
    transceiver.has_tracked_transfers = False
    assert desk.look() == []


def test_pages_that_are_being_sent_are_waited_for_when_somebody_needs_them(
    desk: TransferDesk, transceiver: ScriptedTransceiver
) -> None:
    desk.send(sequence(5, "context"))
    transceiver.calls.clear()
    assert not desk.wait(1.0, blocked=False)
    desk.receive(sequence(1), [0])
    transceiver.context = TransferPoll([], [], [], [5], {})
    assert desk.wait(1.0, blocked=True)
    assert transceiver.calls == [("receive", 1, [0]), ("context", 1), ("cancel", 5)]
    assert desk.outgoing_of("r5") is None


def test_nothing_is_polled_while_nothing_is_tracked(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    desk.look()
    assert transceiver.calls == []


def test_both_sides_name_the_prompt_and_its_scope(desk: TransferDesk, transceiver: ScriptedTransceiver) -> None:
    received = sequence(2)
    received.history.append(5)
    desk.send(sequence(1, "context"))
    desk.receive(received, [0])
    assert transceiver.digests[0] == transceiver.digests[1], "the first tokens are no part of it"
    desk.receive(sequence(3, first=1), [0])
    desk.receive(sequence(4, scope=ReuseScope(salt=1)), [0])
    desk.receive(sequence(5, scope=ReuseScope(lora_id=1)), [0])
    assert len(set(transceiver.digests[1:])) == 4
    assert all(len(digest) == 32 for digest in transceiver.digests)
