"""What is remembered is bounded: cancels before their session, and the ledger."""

from __future__ import annotations

from kvmesh.net.clock import ManualClock
from kvmesh.transceiver.ledger import Ledger
from kvmesh.transceiver.precancel import PreCancels
from kvmesh.transceiver.types import PeerKey


def test_precancels_are_taken_once() -> None:
    cancels = PreCancels(ManualClock())
    cancels.remember(5)
    assert cancels.take(5)
    assert not cancels.take(5)
    assert not cancels.take(6)


def test_precancels_expire() -> None:
    clock = ManualClock()
    cancels = PreCancels(clock, retention_s=10)
    cancels.remember(5)
    clock.advance(9.9)
    cancels.remember(6)
    clock.advance(0.1)
    assert not cancels.take(5)
    assert cancels.take(6)


def test_precancels_forget_the_oldest() -> None:
    cancels = PreCancels(ManualClock(), capacity=3)
    for transfer_id in (1, 2, 3, 1, 4):
        cancels.remember(transfer_id)
    assert len(cancels) == 3
    assert not cancels.take(2)
    assert all(cancels.take(transfer_id) for transfer_id in (3, 1, 4))


def test_the_ledger_drops_the_oldest_and_counts() -> None:
    ledger = Ledger(PeerKey("a", 1), ManualClock(), capacity=2)
    for transfer_id in (1, 2, 3):
        ledger.record("context", transfer_id, "registered")
    assert ledger.dropped_total == 1
    events = ledger.drain()
    assert [event.transfer_id for event in events] == [2, 3]
    assert events[0].unix_ms == 1_700_000_000_000
    assert ledger.drain() == []
