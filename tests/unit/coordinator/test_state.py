"""What of a coordinator survives it, as keys and values."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.coordinator.ledger import TransferLedger
from kvmesh.coordinator.registry import MemberRegistry
from kvmesh.coordinator.state import CoordinatorState
from kvmesh.coordinator.storage import MemoryStore
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.members import Load, Member
from kvmesh.protocol.transfer import LedgerEvent


class Life:
    """One coordinator's memory, and the keys that it touched."""

    def __init__(self, clock: ManualClock) -> None:
        self.registry = MemberRegistry(clock, lease_s=10.0, incarnation="one")
        self.ledger = TransferLedger(clock, max_transfers=3)
        self.store = MemoryStore(clock)
        self.state = CoordinatorState(self.registry, self.ledger, self.store)
        self.touched: set[str] = set()
        self.state.on_touched(self.touched.add)

    def stored(self) -> dict[str, bytes]:
        keys = set(self.state.keys())
        values = {key: value for key in keys if (value := self.state.read(key)) is not None}
        assert values.keys() == keys
        return values

    def take(self) -> set[str]:
        touched = set(self.touched)
        self.touched.clear()
        return touched


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def life(clock: ManualClock) -> Life:
    return Life(clock)


def event(transfer_id: int, state: str = "registered", **fields: Any) -> LedgerEvent:
    return LedgerEvent(
        transfer_id=transfer_id, side="context", instance_id="context-0", epoch=5, state=state, unix_ms=1, **fields
    )


def member(epoch: int = 5, **fields: Any) -> Member:
    return Member(instance_id="context-0", role="context", url="http://u", epoch=epoch, **fields)


async def test_everything_that_changes_is_touched_and_comes_back(clock, life):
    life.registry.register(member(load=Load(running=4)))
    assert life.take() == {"members/context-0", "epochs/context-0"}
    life.ledger.record([event(1, num_pages=7), event(2)])
    assert life.take() == {"transfers/1", "transfers/2"}
    await life.store.set("/a/b", "v", ttl_s=4.0)
    assert life.take() == {"storage//a/b"}
    stored = life.stored()
    assert stored.keys() == {"members/context-0", "transfers/1", "transfers/2", "storage//a/b"}

    second = Life(clock)
    assert second.state.restore(stored) == (1, 2, 1)
    assert second.stored() == stored
    assert second.registry.member("context-0") == member(), "loads are told anew"
    assert second.ledger.get(1).sides[0].num_pages == 7
    clock.advance(3.0)
    assert await second.store.get("/a/b") == "v"
    clock.advance(1.0)
    assert await second.store.get("/a/b") is None
    assert second.state.restore(stored)[:2] == (0, 0), "the second time it is no news"


async def test_what_ends_has_no_value_any_more(life):
    life.registry.register(member())
    life.ledger.record([event(1)])
    await life.store.set("k", "v")
    life.take()
    life.registry.deregister("context-0", 5)
    life.ledger.record([event(1, "completed")])
    await life.store.delete("k")
    assert life.take() == {"members/context-0", "epochs/context-0", "transfers/1", "storage/k"}
    assert life.stored().keys() == {"epochs/context-0"}
    assert life.state.read("members/context-0") is None


def test_a_life_that_is_over_is_not_restored(clock, life):
    life.registry.register(member(5))
    old = life.stored()
    life.registry.register(member(6))
    life.registry.deregister("context-0", 6)
    new = life.stored()
    second = Life(clock)
    second.state.restore({**old, **new})
    assert second.registry.members().members == []
    assert second.registry.register(member(5)).epoch > 6


def test_a_transfer_that_is_forgotten_for_want_of_room_is_no_longer_stored(life):
    life.ledger.record([event(number) for number in range(3)])
    life.take()
    life.ledger.record([event(3)])
    assert life.take() == {"transfers/0", "transfers/3"}
    assert life.stored().keys() == {"transfers/1", "transfers/2", "transfers/3"}


def test_what_this_ledger_has_heard_itself_counts_more(clock, life):
    life.ledger.record([event(1)])
    stored = life.stored()
    second = Life(clock)
    second.ledger.record([event(1, "completed")])
    second.state.restore(stored)
    assert second.ledger.get(1).state == "completed"
    assert second.ledger.statistics().open == 0


def test_who_follows_forgets(life):
    life.registry.register(member())
    life.ledger.record([event(1)])
    life.state.forget_all("two")
    assert life.stored() == {}
    assert life.registry.changes("one", 1).reset
    assert life.registry.incarnation == "two"
    assert life.ledger.query().counts == {}
