"""What following a publisher delivers, and what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvmesh.events.records import RecordBatch

__all__ = ["Batch", "Connected", "Deliver", "Disconnected", "Item", "Reset", "SubscriberStatistics"]


class Batch(NamedTuple):
    """Records to apply, in order."""

    sequence: int
    topic: str
    records: RecordBatch
    replayed: bool


class Reset(NamedTuple):
    """Everything known of this publisher is void; what it still keeps follows."""

    reason: str


class Disconnected(NamedTuple):
    """The connection broke: the publisher may be gone."""


class Connected(NamedTuple):
    """The connection stands, and what was missed meanwhile has been delivered."""


Item = Batch | Reset | Disconnected | Connected

Deliver = Callable[[Item], None]
"""Takes one item; runs on the event loop and must not block."""


class SubscriberStatistics(msgspec.Struct):
    """What one publisher's stream has been through."""

    batches_total: int = 0
    events_total: int = 0
    rejected_events_total: int = 0
    """Events left out because they could not be used; their batches went on."""
    unreadable_batches_total: int = 0
    duplicates_total: int = 0
    gaps_total: int = 0
    replays_total: int = 0
    replay_failures_total: int = 0
    restarts_total: int = 0
    disconnections_total: int = 0
    resets_total: int = 0
