"""The context legs that this front has taken: for whom, what became of their pages, and how to give them up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvmesh.protocol.transfer import LedgerEvent
from kvmesh.worker.readers import OpenTransfers

__all__ = ["ContextLegs"]

MAX_LEGS = 8192
"""Context legs that can still be given up by id; an older one ends by its own deadline."""


class _Leg(NamedTuple):
    request_id: str
    """The engine's."""
    router: str | None
    """The router's instance id, where it said so."""


class ContextLegs:
    """Context legs by transfer id, and the transfers that they left open."""

    def __init__(self) -> None:
        self._legs: OrderedDict[int, _Leg] = OrderedDict()
        self.transfers = OpenTransfers()
        self._orphaned = 0

    def remember(self, transfer_id: int, request_id: str, router: str | None) -> None:
        """A leg begins."""
        self._legs[transfer_id] = _Leg(request_id, router)
        if len(self._legs) > MAX_LEGS:
            self._legs.popitem(last=False)

    def note(self, events: Iterable[LedgerEvent]) -> None:
        """Take in what the engines said of transfers; what has ended need not be given up any more."""
        for transfer_id in self.transfers.note(events):
            self._legs.pop(transfer_id, None)

    def take(self, transfer_id: int) -> str | None:
        """Give a leg up; gives the engine's request id, None when there is no such leg or it has ended."""
        leg = self._legs.pop(transfer_id, None)
        return None if leg is None else leg.request_id

    def take_orphans(self, router: str) -> list[str]:
        """Give up the legs of a router that is gone, but for those whose pages somebody has come for.

        Returns:
            The engine's request ids.
        """
        orphans = [
            transfer_id
            for transfer_id, leg in self._legs.items()
            if leg.router == router and not self.transfers.has_reader(transfer_id)
        ]
        self._orphaned += len(orphans)
        return [self._legs.pop(transfer_id).request_id for transfer_id in orphans]

    def statistics(self) -> dict[str, float]:
        """Prompts that nobody has read yet, and how many were given up because their router was gone."""
        return {"unread": len(self.transfers), "orphaned_total": self._orphaned}
