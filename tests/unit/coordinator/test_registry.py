from __future__ import annotations

import pytest

from kvmesh.coordinator.past import Past
from kvmesh.coordinator.registry import FencedError, MemberRegistry, UnknownMemberError
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.members import Heartbeat, Load, Member, MemberEvent

LEASE_S = 10.0


def member(instance_id: str = "context-0", epoch: int = 0, **fields: object) -> Member:
    return Member(instance_id=instance_id, role="context", url="http://127.0.0.1:1", epoch=epoch, **fields)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_s=1000.0)


@pytest.fixture
def registry(clock: ManualClock) -> MemberRegistry:
    return MemberRegistry(clock, lease_s=LEASE_S, incarnation="one", history=8)


def kinds(events: list[MemberEvent]) -> list[tuple[str, str]]:
    return [(event.kind, event.member.instance_id) for event in events]


def live(registry: MemberRegistry) -> list[str]:
    return [m.instance_id for m in registry.members().members]


def pass_time(clock: ManualClock, registry: MemberRegistry, seconds: float) -> list[str]:
    """Sweep every second, as the service does."""
    dead = []
    for _ in range(round(seconds)):
        clock.advance(1.0)
        dead += [m.instance_id for m in registry.sweep()]
    return dead


def test_a_lease_without_heartbeat_ends_in_death_within_one_sweep(clock, registry):
    reply = registry.register(member())
    assert (reply.lease_s, reply.incarnation, reply.revision) == (LEASE_S, "one", 1)
    assert pass_time(clock, registry, 9) == []
    assert pass_time(clock, registry, 1) == ["context-0"]
    assert live(registry) == []
    assert kinds(registry.changes("one", 1).events) == [("dead", "context-0")]
    with pytest.raises(UnknownMemberError):
        registry.heartbeat("context-0", Heartbeat(epoch=reply.epoch, load=Load()))


def test_heartbeats_keep_a_member_alive_and_only_changes_are_announced(clock, registry):
    epoch = registry.register(member()).epoch
    for _ in range(5):
        pass_time(clock, registry, 5)
        registry.heartbeat("context-0", Heartbeat(epoch=epoch, load=Load()))
    assert live(registry) == ["context-0"]
    assert registry.revision == 1
    registry.heartbeat("context-0", Heartbeat(epoch=epoch, load=Load(running=3)))
    registry.heartbeat("context-0", Heartbeat(epoch=epoch, load=Load(running=3), draining=True))
    events = registry.changes("one", 1).events
    assert kinds(events) == [("updated", "context-0")], "the older update is superseded"
    assert events[0].member.load.running == 3
    assert events[0].member.draining


def test_a_new_life_of_an_instance_gets_a_higher_epoch_and_buries_the_older(registry):
    first = registry.register(member()).epoch
    second = registry.register(member()).epoch
    assert second > first
    events = registry.changes("one", 1).events
    assert kinds(events) == [("dead", "context-0"), ("joined", "context-0")]
    assert [event.member.epoch for event in events] == [first, second]
    with pytest.raises(FencedError):
        registry.heartbeat("context-0", Heartbeat(epoch=first, load=Load()))
    assert not registry.deregister("context-0", first)
    assert live(registry) == ["context-0"]


def test_the_same_epoch_is_the_same_life(registry):
    epoch = registry.register(member(epoch=77)).epoch
    assert epoch == 77, "a proposed epoch is kept"
    assert registry.register(member(epoch=77)).epoch == 77
    assert registry.revision == 1, "a repeated registration is no news"
    assert registry.register(member(epoch=77, model="m")).epoch == 77
    assert kinds(registry.changes("one", 1).events) == [("updated", "context-0")]


def test_a_life_that_was_announced_dead_cannot_come_back_under_its_epoch(clock, registry):
    registry.register(member(epoch=77))
    pass_time(clock, registry, 10)
    assert registry.register(member(epoch=77)).epoch > 77


def test_epochs_grow_across_coordinator_restarts(clock):
    before = MemberRegistry(clock, lease_s=LEASE_S, incarnation="one").register(member()).epoch
    clock.advance(0.002)
    after = MemberRegistry(clock, lease_s=LEASE_S, incarnation="two").register(member()).epoch
    assert after > before


def test_a_member_of_the_previous_coordinator_keeps_its_epoch(clock):
    before = MemberRegistry(clock, lease_s=LEASE_S, incarnation="one").register(member()).epoch
    restarted = MemberRegistry(clock, lease_s=LEASE_S, incarnation="two")
    with pytest.raises(UnknownMemberError):
        restarted.heartbeat("context-0", Heartbeat(epoch=before, load=Load()))
    assert restarted.register(member(epoch=before)).epoch == before
    assert kinds(restarted.changes("two", 0).events) == [("joined", "context-0")]


def test_goodbye(registry):
    epoch = registry.register(member()).epoch
    assert registry.deregister("context-0", epoch)
    assert not registry.deregister("context-0", epoch)
    assert kinds(registry.changes("one", 1).events) == [("left", "context-0")]


def test_watchers_of_another_incarnation_or_of_lost_history_get_everything(clock, registry):
    for number in range(6):
        registry.register(member(f"context-{number}"))
    for number in range(5):
        registry.deregister(f"context-{number}", registry.members().members[0].epoch)
    assert registry.revision == 11
    assert not registry.changes("one", 11).reset
    assert registry.changes("one", 11).events == []
    assert len(registry.changes("one", 3).events) == 8
    for incarnation, revision in (("one", 2), ("one", 12), ("zero", 11), ("", 0)):
        reply = registry.changes(incarnation, revision)
        assert reply.reset
        assert reply.events == []
        assert [m.instance_id for m in reply.members] == ["context-5"]


def test_the_grace_period_is_one_lease_after_the_start(clock, registry):
    assert registry.changes("", 0).grace_s == LEASE_S
    clock.advance(4)
    assert registry.changes("", 0).grace_s == 6
    clock.advance(7)
    assert registry.changes("", 0).grace_s == 0


def test_a_coordinator_that_stood_still_blames_nobody(clock, registry):
    registry.register(member())
    pass_time(clock, registry, 3)
    clock.advance(60)
    assert registry.sweep() == []
    assert pass_time(clock, registry, 6) == []
    assert pass_time(clock, registry, 1) == ["context-0"]


def test_a_coordinator_that_is_cut_off_blames_nobody(clock, registry):
    """Nobody of several is heard any more: it is not they who are gone."""
    epochs = {name: registry.register(member(name)).epoch for name in ("context-0", "context-1")}
    beat = {name: Heartbeat(epoch=epoch, load=Load()) for name, epoch in epochs.items()}
    assert pass_time(clock, registry, 60) == []
    registry.heartbeat("context-1", beat["context-1"])
    assert pass_time(clock, registry, 3) == []
    registry.heartbeat("context-1", beat["context-1"])
    # Who is silent on is gone a lease after the first of them was heard.
    assert pass_time(clock, registry, 3) == []
    registry.heartbeat("context-1", beat["context-1"])
    assert pass_time(clock, registry, 3) == []
    registry.heartbeat("context-1", beat["context-1"])
    assert pass_time(clock, registry, 1) == ["context-0"]


def test_one_of_several_dies_in_its_own_time(clock, registry):
    registry.register(member("context-0"))
    epoch = registry.register(member("context-1")).epoch
    for _ in range(3):
        assert pass_time(clock, registry, 3) == []
        registry.heartbeat("context-1", Heartbeat(epoch=epoch, load=Load()))
    assert pass_time(clock, registry, 1) == ["context-0"]


def test_updates_around_a_rejoin_are_kept_in_order(registry):
    epoch = registry.register(member()).epoch
    registry.heartbeat("context-0", Heartbeat(epoch=epoch, load=Load(running=1)))
    registry.heartbeat("context-0", Heartbeat(epoch=epoch, load=Load(running=2)))
    epoch = registry.register(member()).epoch
    registry.heartbeat("context-0", Heartbeat(epoch=epoch, load=Load(running=3)))
    events = registry.changes("one", 1).events
    assert [event.kind for event in events] == ["updated", "dead", "joined", "updated"]
    assert [event.member.load.running for event in events] == [2, 2, 0, 3]


def test_statistics(registry):
    epoch = registry.register(member()).epoch
    registry.register(member("context-1"))
    registry.deregister("context-0", epoch)
    statistics = registry.statistics()
    assert statistics["members"] == 1
    assert statistics["members_joined_total"] == 2
    assert statistics["members_left_total"] == 1
    assert statistics["members_dead_total"] == 0


def test_an_earlier_life_cannot_take_the_place_of_a_later_one(registry):
    registry.register(member(epoch=9))
    with pytest.raises(FencedError):
        registry.register(member(epoch=5))
    assert [one.epoch for one in registry.members().members] == [9]
    assert registry.statistics()["members_fenced_total"] == 1


def test_a_life_that_somebody_met_ends_every_earlier_one(clock, registry):
    """A coordinator with an old memory: its member is a life that is over, and it does not come back."""
    registry.register(member(epoch=5))
    assert registry.met("context-0", 9)
    assert not registry.met("context-0", 9)
    assert live(registry) == []
    assert kinds(registry.changes("one", 1).events) == [("dead", "context-0")]
    assert not registry.restore(member(epoch=8))
    assert registry.register(member(epoch=9)).epoch == 9, "that life itself may be a member"
    assert not registry.met("context-0", 9)
    assert registry.past("context-0") == Past(dead=5, floor=9)


def test_a_new_life_below_one_that_somebody_met_gets_an_epoch_of_its_own():
    clock = ManualClock(start_unix_ns=0)
    registry = MemberRegistry(clock, lease_s=LEASE_S, incarnation="one")
    registry.met("context-0", 9)
    assert registry.register(member(epoch=8)).epoch == 10
    assert registry.register(member("context-1", epoch=8)).epoch == 8


def test_what_is_restored_has_a_whole_lease_and_is_never_older_than_what_is_known(clock, registry):
    registry.register(member(epoch=5))
    assert not registry.restore(member(epoch=4))
    assert registry.restore(member(epoch=6))
    assert kinds(registry.changes("one", 1).events) == [("dead", "context-0"), ("joined", "context-0")]
    clock.advance(LEASE_S - 1)
    assert registry.restore(member("context-1", epoch=1))
    registry.sweep()
    clock.advance(1)
    assert [one.instance_id for one in registry.sweep()] == ["context-0"]
    assert live(registry) == ["context-1"]
