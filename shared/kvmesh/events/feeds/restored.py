"""What a snapshot had of workers that have not been heard of since: kept for a while, and not matched meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

from kvmesh.events.feeds.feed import Feed
from kvmesh.events.feeds.saved import SavedFeed
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.watermark import Watermark
from kvmesh.net.clock import Clock
from kvmesh.protocol.members import Member

__all__ = ["RESTORED_S", "RestoredFeeds"]

RESTORED_S = 60.0
"""How long blocks are kept for a worker that nobody has told of."""


class RestoredFeeds:
    """Empty until :meth:`restored`.

    Args:
        index: that has their blocks.
        clock: of :data:`RESTORED_S`.
    """

    def __init__(self, index: PrefixIndex, clock: Clock) -> None:
        self._index = index
        self._clock = clock
        self._entries: dict[Source, SavedFeed] = {}
        self._until_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def restored(self, saved: Mapping[Source, bytes]) -> list[Feed]:
        """The index has been restored; gives the feeds that were registered by hand, of which nobody will tell."""
        for source in self._index.sources():
            self._index.hide(source)
            try:
                self._entries[source] = SavedFeed.decode(saved.get(source, b""))
            except ValueError:
                self._index.remove(source)
        self._until_s = self._clock.monotonic_s() + RESTORED_S
        return [entry.feed() for entry in self._entries.values() if entry.by_hand]

    def take_over(self, feed: Feed, *, observed: bool) -> Watermark | None:
        """Where to go on with the blocks of a feed that is followed now; those of another life are dropped.

        Args:
            feed: that is followed.
            observed: somebody wants to hear of the blocks.
        """
        entry = self._entries.pop(feed.source, None)
        if entry is None:
            return None
        resume_from = entry.resume_from()
        # A listened publisher's old blocks cannot be told again before its new ones: it is read anew for an observer.
        unheard = observed and feed.topic is not None
        if resume_from is None or entry.feed() != feed or unheard:
            self._index.remove(feed.source)
            return None
        return resume_from

    def gone(self, member: Member) -> None:
        """A worker has left, or died."""
        for source, entry in list(self._entries.items()):
            if source.instance_id == member.instance_id and entry.epoch <= member.epoch:
                self._give_up(source)

    def expire(self) -> None:
        """Give up those of whom nobody has told in time."""
        if self._entries and self._clock.monotonic_s() >= self._until_s:
            for source in list(self._entries):
                self._give_up(source)

    def _give_up(self, source: Source) -> None:
        del self._entries[source]
        self._index.remove(source)
