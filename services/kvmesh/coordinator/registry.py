"""Members, leases, epochs, and a bounded history of what changed; no I/O, time comes from outside.

Epochs order the lives of one instance id. A process may propose its epoch (a start time, say), and keeps it for as
long as it lives: registering again with the same epoch, after a coordinator restart or a lost answer, is the same
life. A later one, or one that leaves the choice to the coordinator, is a new life: the older one is announced dead. An
earlier one is fenced. What is remembered of an id that is gone is its :class:`Past`.
Epochs that the coordinator chooses are milliseconds since 1970, so that they grow across its own restarts too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvmesh.coordinator.history import DEFAULT_SIZE, MemberHistory
from kvmesh.coordinator.past import Past
from kvmesh.net.clock import Clock
from kvmesh.protocol.members import (
    MAX_EPOCH,
    Heartbeat,
    Member,
    MemberEvent,
    MemberList,
    RegistrationReply,
    WatchReply,
)

__all__ = ["EpochsUsedUpError", "FencedError", "MemberRegistry", "UnknownMemberError"]

SILENT_FRACTION = 0.5
"""Of a lease: members are heard three times a lease, so that of several one must be heard within this."""

MAX_PASTS = 16_384
"""Instance ids whose past is remembered. Forgetting one is harmless unless clocks went back."""


class UnknownMemberError(LookupError):
    """No such member, or its lease has expired: it must register again."""


class FencedError(Exception):
    """A newer life of the same instance id has taken this one's place."""


class EpochsUsedUpError(ValueError):
    """A life of this instance id has taken the highest epoch that there is: no other can follow it."""


_NO_PAST = Past()


@dataclass(slots=True)
class _Entry:
    member: Member
    expires_s: float


class MemberRegistry:
    """The membership of one mesh, held in memory.

    Args:
        clock: leases are measured on its monotonic time.
        lease_s: seconds without a heartbeat after which a member is dead.
        incarnation: names this life of the coordinator.
        history: how many changes are kept for watchers.
    """

    def __init__(self, clock: Clock, *, lease_s: float, incarnation: str, history: int = DEFAULT_SIZE) -> None:
        self.incarnation = incarnation
        self.lease_s = lease_s
        self.revision = 0
        self.on_event: Callable[[MemberEvent], None] = _ignored
        """Hears of every change at once."""
        self.on_touched: Callable[[str], None] = _ignored
        """Hears of every instance id whose member or past has changed."""
        self._clock = clock
        self._started_s = self._swept_s = self._heard_s = clock.monotonic_s()
        self._is_cut_off = False
        self._entries: dict[str, _Entry] = {}
        self._pasts: OrderedDict[str, Past] = OrderedDict()
        self._history = MemberHistory(history)
        self._counts = {"joined": 0, "left": 0, "dead": 0, "fenced": 0}

    def register(self, member: Member) -> RegistrationReply:
        """Admit a member, or renew the lease of one that is known under the same epoch.

        Raises:
            EpochsUsedUpError: no epoch is left for another life of this id.
            FencedError: a later life of this id is a member.
        """
        entry = self._entries.get(member.instance_id)
        if entry is not None and member.epoch == entry.member.epoch:
            self._renew(entry, member)
        elif entry is not None and 0 < member.epoch < entry.member.epoch:
            self._counts["fenced"] += 1
            raise FencedError(member.instance_id)
        else:
            self._admit(member, entry)
        return RegistrationReply(
            epoch=self._entries[member.instance_id].member.epoch,
            lease_s=self.lease_s,
            revision=self.revision,
            incarnation=self.incarnation,
        )

    def heartbeat(self, instance_id: str, heartbeat: Heartbeat) -> None:
        """Renew a lease; watchers hear of it only if the load or the drain state changed.

        Raises:
            UnknownMemberError: not registered with this incarnation, or expired.
            FencedError: the epoch is older than the registered one.
        """
        entry = self._entries.get(instance_id)
        if entry is None or heartbeat.epoch > entry.member.epoch:
            raise UnknownMemberError(instance_id)
        if heartbeat.epoch < entry.member.epoch:
            self._counts["fenced"] += 1
            raise FencedError(instance_id)
        self._renew(entry, msgspec.structs.replace(entry.member, load=heartbeat.load, draining=heartbeat.draining))

    def deregister(self, instance_id: str, epoch: int) -> bool:
        """A member says goodbye. An epoch other than the registered one changes nothing.

        Returns:
            Whether it was a member.
        """
        entry = self._entries.get(instance_id)
        if entry is None or entry.member.epoch != epoch:
            return False
        self._remove(entry, "left")
        return True

    def met(self, instance_id: str, epoch: int) -> bool:
        """Somebody knows this life of an instance: every earlier one is over, whatever this registry believed.

        Returns:
            Whether that was news.
        """
        if self.past(instance_id).latest >= epoch or self.epoch_of(instance_id) >= epoch:
            return False
        self.recall(instance_id, Past(floor=epoch))
        return True

    def recall(self, instance_id: str, past: Past) -> None:
        """Learn which lives of an instance are over; a member that is one of them is announced dead."""
        merged = self.past(instance_id).merged(past)
        entry = self._entries.get(instance_id)
        if entry is not None and not merged.permits(entry.member.epoch):
            self._remove(entry, "dead")
            merged = merged.merged(self.past(instance_id))
        if merged != self.past(instance_id):
            self._remember(instance_id, merged)

    def restore(self, member: Member) -> bool:
        """Take in a member that was stored by an earlier coordinator, with a whole lease.

        Returns:
            Whether it is news: not when its life is over, or known, or superseded.
        """
        if self.epoch_of(member.instance_id) >= member.epoch or not self.past(member.instance_id).permits(member.epoch):
            return False
        self._admit(member, self._entries.get(member.instance_id))
        return True

    def begin_again(self, incarnation: str) -> None:
        """Decide again after a time in which members may have been heard elsewhere: all have a whole lease to beat.

        Watchers get a reset, for they were told to give nobody up meanwhile.
        """
        self.incarnation = incarnation
        self._started_s = self._swept_s = self._heard_s = now = self._clock.monotonic_s()
        self._is_cut_off = False
        for entry in self._entries.values():
            entry.expires_s = now + self.lease_s

    def forget_all(self, incarnation: str) -> None:
        """Begin a new life without members or past: another coordinator has taken over."""
        self.incarnation = incarnation
        self.revision = 0
        self._started_s = self._swept_s = self._heard_s = self._clock.monotonic_s()
        self._is_cut_off = False
        self._entries.clear()
        self._pasts.clear()
        self._history.clear()

    def member(self, instance_id: str) -> Member | None:
        """The living member of this id."""
        entry = self._entries.get(instance_id)
        return None if entry is None else entry.member

    def epoch_of(self, instance_id: str) -> int:
        """The epoch of the living member of this id, -1 where there is none."""
        entry = self._entries.get(instance_id)
        return -1 if entry is None else entry.member.epoch

    def past(self, instance_id: str) -> Past:
        """What is over of this id."""
        return self._pasts.get(instance_id, _NO_PAST)

    def pasts(self) -> list[str]:
        """The ids of which something is over."""
        return list(self._pasts)

    def sweep(self) -> list[Member]:
        """Bury the members whose lease has run out; called a few times per lease.

        A coordinator that itself stood still (stopped, starved, suspended with its machine) could hear nobody: the
        time between two sweeps that exceeds a lease is not held against the members. Nor is a silence of all of
        several members at once: then it is the coordinator that is cut off, and who is silent on is buried a lease
        after the first of them is heard again.

        Returns:
            The members that died.
        """
        now = self._clock.monotonic_s()
        gap_s = now - self._swept_s
        self._swept_s = now
        if gap_s > self.lease_s:
            for entry in self._entries.values():
                entry.expires_s += gap_s
        if len(self._entries) > 1 and now - self._heard_s > self.lease_s * SILENT_FRACTION:
            self._is_cut_off = True
            return []
        if self._is_cut_off:
            self._is_cut_off = False
            for entry in self._entries.values():
                entry.expires_s = max(entry.expires_s, self._heard_s + self.lease_s)
        expired = [entry for entry in self._entries.values() if entry.expires_s <= now]
        for entry in expired:
            self._remove(entry, "dead")
        return [entry.member for entry in expired]

    def members(self) -> MemberList:
        """Everyone who is alive."""
        return MemberList(
            revision=self.revision,
            members=[entry.member for entry in self._entries.values()],
            incarnation=self.incarnation,
            lease_s=self.lease_s,
        )

    def changes(self, incarnation: str, revision: int) -> WatchReply:
        """What changed after ``revision``: all that still counts, or the whole membership when that cannot be told."""
        reply = WatchReply(revision=self.revision, incarnation=self.incarnation, grace_s=self.grace_s)
        events = self._history.between(revision, self.revision) if incarnation == self.incarnation else None
        if events is None:
            reply.reset = True
            reply.members = self.members().members
        else:
            reply.events = events
        return reply

    @property
    def grace_s(self) -> float:
        """Seconds until every live member must have heartbeat, and therefore registered, since the start."""
        return max(0.0, self._started_s + self.lease_s - self._clock.monotonic_s())

    def statistics(self) -> dict[str, float]:
        """Members now, and joins, leaves, deaths and fenced heartbeats since the start."""
        return {
            "members": len(self._entries),
            "revision": self.revision,
            **{f"members_{name}_total": count for name, count in self._counts.items()},
        }

    def _admit(self, member: Member, older: _Entry | None) -> None:
        past = self.past(member.instance_id)
        if older is not None:
            past = past.merged(Past(dead=older.member.epoch))
        epoch = member.epoch
        if not (epoch and past.permits(epoch)):
            if past.latest >= MAX_EPOCH:
                raise EpochsUsedUpError(member.instance_id)
            epoch = max(past.latest + 1, self._clock.unix_ns() // 1_000_000)
        if older is not None:
            self._remove(older, "dead")
        self._heard_s = self._clock.monotonic_s()
        entry = _Entry(msgspec.structs.replace(member, epoch=epoch), self._heard_s + self.lease_s)
        self._entries[member.instance_id] = entry
        self._record("joined", entry.member)

    def _renew(self, entry: _Entry, member: Member) -> None:
        self._heard_s = self._clock.monotonic_s()
        entry.expires_s = self._heard_s + self.lease_s
        if member != entry.member:
            entry.member = member
            self._record("updated", member)

    def _remove(self, entry: _Entry, kind: Literal["left", "dead"]) -> None:
        member = entry.member
        del self._entries[member.instance_id]
        self._remember(member.instance_id, self.past(member.instance_id).merged(Past(dead=member.epoch)))
        self._record(kind, member)

    def _remember(self, instance_id: str, past: Past) -> None:
        self._pasts[instance_id] = past
        self._pasts.move_to_end(instance_id)
        self.on_touched(instance_id)
        if len(self._pasts) > MAX_PASTS:
            self.on_touched(self._pasts.popitem(last=False)[0])

    def _record(self, kind: Literal["joined", "updated", "left", "dead"], member: Member) -> None:
        self.revision += 1
        if kind != "updated":
            self._counts[kind] += 1
        event = MemberEvent(revision=self.revision, kind=kind, member=member)
        self._history.append(event)
        self.on_touched(member.instance_id)
        self.on_event(event)


def _ignored(_what: object) -> None:
    """Nobody wants to know."""
