from __future__ import annotations

import pytest

from kvmesh.net.discovery_link import Backoff, CoordinatorLink
from kvmesh.net.discovery_static import StaticMembership
from kvmesh.net.discovery_view import MemberView
from kvmesh.protocol.members import Load, Member, MemberEvent, WatchReply


def member(instance_id: str = "context-0", epoch: int = 1, role: str = "context", **fields: object) -> Member:
    return Member(instance_id=instance_id, role=role, url="http://127.0.0.1:1", epoch=epoch, **fields)


class Heard:
    """What a subscriber heard since it was last asked."""

    def __init__(self, view: MemberView) -> None:
        self._events: list[MemberEvent] = []
        self.unsubscribe = view.subscribe(self._events.append)

    def take(self) -> list[tuple[str, str, int]]:
        events = [(event.kind, event.member.instance_id, event.member.epoch) for event in self._events]
        self._events.clear()
        return events


@pytest.fixture
def view() -> MemberView:
    return MemberView()


@pytest.fixture
def heard(view: MemberView) -> Heard:
    return Heard(view)


def snapshot(*members: Member, incarnation: str = "one", revision: int = 5, grace_s: float = 0.0) -> WatchReply:
    return WatchReply(revision=revision, incarnation=incarnation, reset=True, members=list(members), grace_s=grace_s)


def changes(*events: tuple[str, Member], incarnation: str = "one", revision: int = 9) -> WatchReply:
    return WatchReply(
        revision=revision,
        incarnation=incarnation,
        events=[MemberEvent(revision=revision, kind=kind, member=who) for kind, who in events],
    )


def test_a_first_snapshot_and_its_changes(view, heard):
    view.apply(snapshot(member(), member("generation-0", role="generation")), 0.0)
    assert heard.take() == [("joined", "context-0", 1), ("joined", "generation-0", 1)]
    view.apply(changes(("updated", member(load=Load(running=2))), ("left", member("generation-0"))), 0.0)
    assert heard.take() == [("updated", "context-0", 1), ("left", "generation-0", 1)]
    assert view.members()[0].load.running == 2
    assert (view.revision, view.incarnation) == (9, "one")


def test_a_newer_life_buries_the_older_even_without_being_told(view, heard):
    view.apply(snapshot(member()), 0.0)
    heard.take()
    view.apply(changes(("joined", member(epoch=2))), 0.0)
    assert heard.take() == [("dead", "context-0", 1), ("joined", "context-0", 2)]
    view.apply(changes(("dead", member(epoch=1)), ("updated", member(epoch=1))), 0.0)
    assert heard.take() == [], "old news about an older life"
    assert view.members()[0].epoch == 2


def test_the_death_of_a_stranger_is_passed_on(view, heard):
    view.apply(snapshot(), 0.0)
    view.apply(changes(("dead", member("context-9"))), 0.0)
    assert heard.take() == [("dead", "context-9", 1)]


def test_lost_history_is_made_up_for(view, heard):
    view.apply(snapshot(member(), member("context-1")), 0.0)
    heard.take()
    view.apply(snapshot(member("context-1"), member("context-2")), 0.0)
    assert heard.take() == [("joined", "context-2", 1), ("dead", "context-0", 1)]


def test_a_restarted_coordinator_has_its_grace_period(view, heard):
    view.apply(snapshot(member(), member("context-1"), member("context-2")), 100.0)
    heard.take()
    view.apply(snapshot(member("context-1"), incarnation="two", revision=1, grace_s=10.0), 200.0)
    assert heard.take() == []
    assert len(view.members()) == 3, "nobody is dropped before the grace period has passed"
    assert view.next_expiry_s == 210.0
    view.apply(changes(("joined", member()), incarnation="two", revision=2), 203.0)
    assert heard.take() == [], "it was never away"
    view.expire(209.9)
    assert heard.take() == []
    view.expire(210.0)
    assert heard.take() == [("dead", "context-2", 1)]
    assert view.next_expiry_s is None
    assert {m.instance_id for m in view.members()} == {"context-0", "context-1"}


def test_a_member_that_comes_back_as_another_life_after_a_coordinator_restart(view, heard):
    view.apply(snapshot(member()), 0.0)
    heard.take()
    view.apply(snapshot(incarnation="two", revision=0, grace_s=10.0), 1.0)
    view.apply(changes(("joined", member(epoch=2)), incarnation="two", revision=1), 2.0)
    assert heard.take() == [("dead", "context-0", 1), ("joined", "context-0", 2)]
    view.expire(20.0)
    assert heard.take() == []


def test_a_coordinator_that_restarts_twice(view, heard):
    view.apply(snapshot(member()), 0.0)
    heard.take()
    view.apply(snapshot(incarnation="two", revision=0, grace_s=10.0), 1.0)
    view.apply(snapshot(incarnation="three", revision=0, grace_s=10.0), 8.0)
    view.expire(11.0)
    assert heard.take() == []
    view.expire(18.0)
    assert heard.take() == [("dead", "context-0", 1)]


def test_roles(view):
    view.apply(
        snapshot(member(), member("g", role="generation"), member("b", role="both"), member("r", role="router")), 0
    )
    assert {m.instance_id for m in view.by_role("context")} == {"context-0", "b"}
    assert {m.instance_id for m in view.by_role("generation")} == {"g", "b"}
    assert {m.instance_id for m in view.by_role("both")} == {"b"}
    assert {m.instance_id for m in view.by_role("router")} == {"r"}


def test_late_subscribers_hear_of_those_present_and_may_leave(view):
    view.apply(snapshot(member()), 0.0)
    heard = Heard(view)
    assert heard.take() == [("joined", "context-0", 1)]
    heard.unsubscribe()
    view.apply(changes(("left", member())), 0.0)
    assert heard.take() == []


def test_backoff_grows_to_a_bound_and_starts_again():
    backoff = Backoff(first_s=1.0, most_s=4.0)
    waits = [backoff.next_s() for _ in range(5)]
    for wait, nominal in zip(waits, (1, 2, 4, 4, 4), strict=True):
        assert 0.75 * nominal <= wait <= 1.25 * nominal
    backoff.reset()
    assert backoff.next_s() <= 1.25


def test_static_lists_give_roles():
    membership = StaticMembership(["a:1", "http://b:1/"], ["b:1", "c:1"])
    assert membership.members() == []
    assert membership._roles == {"http://a:1": "context", "http://b:1": "both", "http://c:1": "generation"}


def test_a_coordinator_with_an_old_memory_brings_no_earlier_life_back(view, heard):
    view.apply(snapshot(member(epoch=7)), 0.0)
    heard.take()
    view.apply(snapshot(member(epoch=5), incarnation="two", grace_s=4.0), 0.0)
    assert heard.take() == []
    assert [one.epoch for one in view.members()] == [7]
    assert view.take_outdated() == {"context-0": 7}, "the coordinator is told"
    assert view.take_outdated() == {}
    view.expire(4.0)
    assert heard.take() == [("dead", "context-0", 7)]
    view.apply(snapshot(member(epoch=7), incarnation="three"), 5.0)
    assert heard.take() == []
    assert view.take_outdated() == {"context-0": 8}, "its end is remembered"
    view.apply(snapshot(member(epoch=8), incarnation="three"), 6.0)
    assert heard.take() == [("joined", "context-0", 8)]


def test_a_subscriber_that_fails_harms_neither_the_view_nor_the_others(view):
    def fail(event: MemberEvent) -> None:
        raise OverflowError(event.member.instance_id)

    view.apply(snapshot(member()), 0.0)
    view.subscribe(fail)
    other = Heard(view)
    view.apply(changes(("joined", member("generation-0")), ("left", member())), 0.0)
    assert other.take() == [("joined", "context-0", 1), ("joined", "generation-0", 1), ("left", "context-0", 1)]
    assert [known.instance_id for known in view.members()] == ["generation-0"]


def test_nobody_is_given_up_on_the_word_of_a_coordinator_that_may_not_lead(view, heard):
    """Who is not listed may beat at another one; the next one that leads says anew who is missing."""
    view.apply(snapshot(member("context-0"), member("context-1")), 0.0)
    heard.take()
    view.apply(snapshot(incarnation="two", grace_s=10.0), 1.0)
    unled = snapshot(member("context-1"), incarnation="three", revision=1)
    unled.leads = False
    view.apply(unled, 2.0)
    view.expire(100.0)
    assert view.next_expiry_s is None
    assert len(view.members()) == 2
    view.apply(snapshot(member("context-1"), incarnation="four", grace_s=10.0), 200.0)
    view.expire(210.0)
    assert heard.take() == [("dead", "context-0", 1)]


def test_two_failures_at_one_address_turn_to_the_next_address_once():
    link = CoordinatorLink("http://a:1,http://b:1/,http://a:1,http://c:1")
    for _ in range(2):
        link.failed(OSError("gone"), "http://a:1")
    assert link.url == "http://b:1"
    link.failed(OSError("gone"), "http://b:1")
    assert link.url == "http://c:1"
    assert link.try_next("http://c:1")
    assert link.url == "http://a:1"
    assert not CoordinatorLink("http://a:1").try_next("http://a:1")
