"""What a watcher believes about the membership; pure, fed with watch replies.

The coordinator's silence or restart changes nothing by itself: members are dropped when it says that they left or
died, or when a restarted one has not heard from them for its whole grace period. What has ended stays ended: a
coordinator that lists an earlier life than one that was met here has an old memory, or none, and is told
(:meth:`MemberView.take_outdated`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvmesh.protocol.members import Member, MemberEvent, Role, WatchReply
from kvmesh.telemetry import get_logger

__all__ = ["MemberCallback", "MemberView", "Membership"]

MemberCallback = Callable[[MemberEvent], None]
"""Hears of every change; runs on the event loop and must not block. What it raises is logged and goes no further."""

MAX_ENDED = 16_384
"""Instance ids whose last life is remembered here."""

_log = get_logger("discovery")


class Membership(Protocol):
    """Who is in the mesh, as far as this process knows; never waits, never fails."""

    def members(self) -> list[Member]:
        """Everyone believed alive."""

    def by_role(self, role: Role) -> list[Member]:
        """Members that can do the work of ``role``; a ``both`` member does context and generation work."""

    def subscribe(self, callback: MemberCallback) -> Callable[[], None]:
        """Tell ``callback`` of everyone known now (as ``joined``) and of every change from now on.

        Returns:
            A function that ends the subscription.
        """


class MemberView:
    """The known members, and who wants to hear of changes."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.revision = 0
        self._members: dict[str, Member] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Instance id -> its latest life that has ended."""
        self._outdated: dict[str, int] = {}
        """What the coordinator does not know: instance id -> the first life that may be alive."""
        self._doubtful_until_s: dict[str, float] = {}
        self._callbacks: list[MemberCallback] = []

    def members(self) -> list[Member]:
        """See :meth:`Membership.members`."""
        return list(self._members.values())

    def by_role(self, role: Role) -> list[Member]:
        """See :meth:`Membership.by_role`."""
        roles = {role, "both"} if role in ("context", "generation") else {role}
        return [member for member in self._members.values() if member.role in roles]

    def subscribe(self, callback: MemberCallback) -> Callable[[], None]:
        """See :meth:`Membership.subscribe`."""
        self._callbacks.append(callback)
        for member in self.members():
            _call(callback, MemberEvent(revision=self.revision, kind="joined", member=member))
        return lambda: self._callbacks.remove(callback)

    def apply(self, reply: WatchReply, now_s: float) -> None:
        """Take in a watch reply that arrived at ``now_s`` (monotonic seconds)."""
        self.incarnation, self.revision = reply.incarnation, reply.revision
        if not reply.leads:
            self._doubtful_until_s.clear()  # they may beat at another one; whoever leads next says anew who is missing
        if reply.reset:
            self._replace(reply, now_s)
        for event in reply.events:
            if event.kind in ("joined", "updated"):
                self._alive(event.member)
            else:
                self._gone(event)

    def take_outdated(self) -> dict[str, int]:
        """Instance ids of which the coordinator listed a life that is over, and the first that may be alive; once."""
        outdated, self._outdated = self._outdated, {}
        return outdated

    def expire(self, now_s: float) -> None:
        """Give up the members that a restarted coordinator did not hear from in its grace period."""
        for instance_id in [key for key, until_s in self._doubtful_until_s.items() if until_s <= now_s]:
            self._dead(self._members[instance_id])

    @property
    def next_expiry_s(self) -> float | None:
        """When :meth:`expire` next has something to do, in monotonic seconds."""
        return min(self._doubtful_until_s.values(), default=None)

    def _replace(self, reply: WatchReply, now_s: float) -> None:
        listed = {member.instance_id: member.epoch for member in reply.members}
        for member in reply.members:
            self._alive(member)
        for instance_id, known in list(self._members.items()):
            if listed.get(instance_id) == known.epoch:
                continue
            if not reply.leads:
                continue
            if reply.grace_s > 0:
                self._doubtful_until_s[instance_id] = now_s + reply.grace_s
            else:
                self._dead(known)

    def _alive(self, member: Member) -> None:
        known = self._members.get(member.instance_id)
        ended = self._ended.get(member.instance_id, -1)
        first = max(ended + 1, known.epoch if known is not None else 0)
        if member.epoch < first:
            self._outdated[member.instance_id] = first
            return
        self._doubtful_until_s.pop(member.instance_id, None)
        if known is not None and known.epoch != member.epoch:
            self._dead(known)
            known = None
        if known == member:
            return
        self._members[member.instance_id] = member
        self._tell(MemberEvent(revision=self.revision, kind="updated" if known else "joined", member=member))

    def _gone(self, event: MemberEvent) -> None:
        known = self._members.get(event.member.instance_id)
        if known is not None and known.epoch > event.member.epoch:
            return
        self._forget(event.member)
        # Someone never heard of is announced too: a peer may know it from a ticket alone.
        self._tell(event)

    def _dead(self, member: Member) -> None:
        self._forget(member)
        self._tell(MemberEvent(revision=self.revision, kind="dead", member=member))

    def _forget(self, member: Member) -> None:
        instance_id = member.instance_id
        self._members.pop(instance_id, None)
        self._doubtful_until_s.pop(instance_id, None)
        self._ended[instance_id] = max(member.epoch, self._ended.get(instance_id, 0))
        self._ended.move_to_end(instance_id)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _tell(self, event: MemberEvent) -> None:
        for callback in tuple(self._callbacks):
            _call(callback, event)


def _call(callback: MemberCallback, event: MemberEvent) -> None:
    try:
        callback(event)
    except Exception:
        # The watch goes on: whatever is wrong with one member must not take this process from the others.
        _log.exception("a membership change could not be used", kind=event.kind, instance_id=event.member.instance_id)
