"""Members, leases, epochs, and a bounded history of what changed; no I/O, time comes from outside.

Epochs order the lives of one instance id. A process may propose its epoch (a start time, say), and keeps it for as
long as it lives: registering again with the same epoch, after a coordinator restart or a lost answer, is the same
life. Anything else under a known id is a new life: it gets a higher epoch and the older one is announced dead.
Epochs that the coordinator chooses are milliseconds since 1970, so that they grow across its own restarts too.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Literal

import msgspec

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

DEFAULT_HISTORY = 4096
"""Changes kept for watchers; one that falls further behind gets the whole membership instead."""

MAX_BURIED = 16_384
"""Last epochs remembered of members that are gone. Forgetting one is harmless unless clocks went back."""


class UnknownMemberError(LookupError):
    """No such member, or its lease has expired: it must register again."""


class FencedError(Exception):
    """A newer life of the same instance id has taken this one's place."""


class EpochsUsedUpError(ValueError):
    """A life of this instance id has taken the highest epoch that there is: no other can follow it."""


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

    def __init__(self, clock: Clock, *, lease_s: float, incarnation: str, history: int = DEFAULT_HISTORY) -> None:
        self.incarnation = incarnation
        self.lease_s = lease_s
        self.revision = 0
        self._clock = clock
        self._started_s = self._swept_s = clock.monotonic_s()
        self._entries: dict[str, _Entry] = {}
        self._buried: OrderedDict[str, int] = OrderedDict()
        self._history: deque[MemberEvent] = deque(maxlen=history)
        self._counts = {"joined": 0, "left": 0, "dead": 0, "fenced": 0}

    def register(self, member: Member) -> RegistrationReply:
        """Admit a member, or renew the lease of one that is known under the same epoch.

        Raises:
            EpochsUsedUpError: no epoch is left for another life of this id.
        """
        entry = self._entries.get(member.instance_id)
        if entry is not None and member.epoch == entry.member.epoch:
            self._renew(entry, member)
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

    def sweep(self) -> list[Member]:
        """Bury the members whose lease has run out; called a few times per lease.

        A coordinator that itself stood still (stopped, starved, suspended with its machine) could hear nobody: the
        time between two sweeps that exceeds a lease is not held against the members.

        Returns:
            The members that died.
        """
        now = self._clock.monotonic_s()
        gap_s = now - self._swept_s
        self._swept_s = now
        if gap_s > self.lease_s:
            for entry in self._entries.values():
                entry.expires_s += gap_s
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
        """What changed after ``revision``: all of it, or the whole membership when that cannot be told.

        Superseded ``updated`` events are left out: only the last one of each member in a row of them counts.
        """
        reply = WatchReply(revision=self.revision, incarnation=self.incarnation, grace_s=self.grace_s)
        oldest = self._history[0].revision if self._history else self.revision + 1
        if incarnation != self.incarnation or not oldest - 1 <= revision <= self.revision:
            reply.reset = True
            reply.members = self.members().members
            return reply
        for event in reversed(self._history):
            if event.revision <= revision:
                break
            reply.events.append(event)
        reply.events = _without_superseded(reply.events)
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
        last = self._buried.get(member.instance_id, 0) if older is None else older.member.epoch
        if last >= MAX_EPOCH:
            raise EpochsUsedUpError(member.instance_id)
        if older is not None:
            self._remove(older, "dead")
        epoch = member.epoch if member.epoch > last else max(last + 1, self._clock.unix_ns() // 1_000_000)
        entry = _Entry(msgspec.structs.replace(member, epoch=epoch), self._clock.monotonic_s() + self.lease_s)
        self._entries[member.instance_id] = entry
        self._record("joined", entry.member)

    def _renew(self, entry: _Entry, member: Member) -> None:
        entry.expires_s = self._clock.monotonic_s() + self.lease_s
        if member != entry.member:
            entry.member = member
            self._record("updated", member)

    def _remove(self, entry: _Entry, kind: Literal["left", "dead"]) -> None:
        member = entry.member
        del self._entries[member.instance_id]
        self._buried[member.instance_id] = member.epoch
        self._buried.move_to_end(member.instance_id)
        if len(self._buried) > MAX_BURIED:
            self._buried.popitem(last=False)
        self._record(kind, member)

    def _record(self, kind: Literal["joined", "updated", "left", "dead"], member: Member) -> None:
        self.revision += 1
        if kind != "updated":
            self._counts[kind] += 1
        self._history.append(MemberEvent(revision=self.revision, kind=kind, member=member))


def _without_superseded(newest_first: list[MemberEvent]) -> list[MemberEvent]:
    """In order of revision, without updates that a later update of the same member overrides."""
    kept: list[MemberEvent] = []
    updated_later: set[str] = set()
    for event in newest_first:
        instance_id = event.member.instance_id
        if event.kind == "updated":
            if instance_id in updated_later:
                continue
            updated_later.add(instance_id)
        else:
            updated_later.discard(instance_id)
        kept.append(event)
    kept.reverse()
    return kept
