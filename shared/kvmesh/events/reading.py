"""What can be asked of a stream that is being read, however its messages come in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from kvmesh.events.items import SubscriberStatistics
from kvmesh.events.ordered import OrderedStream
from kvmesh.events.watermark import Watermark

__all__ = ["Reading"]


class Reading(ABC):
    """The state of an :class:`OrderedStream`, for whoever reads one."""

    @property
    @abstractmethod
    def order(self) -> OrderedStream:
        """Its messages in their order."""

    @abstractmethod
    def resync(self, reason: str) -> None:
        """Soon read everything anew."""

    @property
    def connected(self) -> bool:
        """Whether the connection stands and nothing is missing."""
        return self.order.connected

    @property
    def applied(self) -> int:
        """Sequence number of the last batch delivered, -1 before the first."""
        return self.order.applied

    @property
    def watermark(self) -> Watermark | None:
        """Where a later subscription can resume; None before the first batch."""
        return self.order.watermark

    @property
    def statistics(self) -> SubscriberStatistics:
        """What the subscription has been through."""
        return self.order.statistics

    @property
    def rejected(self) -> Mapping[str, int]:
        """Rejected events by reason."""
        return self.order.rejected

    @property
    def dialects(self) -> Mapping[str, int]:
        """Events by the dialect they were written in."""
        return self.order.dialects
