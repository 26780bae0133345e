"""The latest changes of a membership, for watchers that know an earlier revision of it."""

from __future__ import annotations

from collections import deque

from kvmesh.protocol.members import MemberEvent

__all__ = ["DEFAULT_SIZE", "MemberHistory"]

DEFAULT_SIZE = 4096
"""Changes kept; a watcher that falls further behind gets the whole membership instead."""


class MemberHistory:
    """A bounded list of changes, each with the revision that it made.

    Args:
        size: how many are kept.
    """

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        self._events: deque[MemberEvent] = deque(maxlen=size)

    def append(self, event: MemberEvent) -> None:
        """Add the next change; the oldest is forgotten when there are too many."""
        self._events.append(event)

    def clear(self) -> None:
        """Forget all."""
        self._events.clear()

    def between(self, known: int, revision: int) -> list[MemberEvent] | None:
        """What happened after revision ``known`` until ``revision``, in order; None when that cannot be told.

        Superseded ``updated`` events are left out: only the last one of each member in a row of them counts.
        """
        oldest = self._events[0].revision if self._events else revision + 1
        if not oldest - 1 <= known <= revision:
            return None
        newer: list[MemberEvent] = []
        for event in reversed(self._events):
            if event.revision <= known:
                break
            newer.append(event)
        return _without_superseded(newer)


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
