"""Stored events whose parent has not been heard of: kept, within a bound, until it comes.

Where such a block belongs is unknown; to take it for the start of a sequence would promise a prefix that is not there.
"""

from __future__ import annotations

import msgspec

from kvmesh.events.records import Removed, Stored, Tier

__all__ = ["MAX_PARKED_RUNS", "Orphans", "ParkedRun"]

MAX_PARKED_RUNS = 256
"""For each worker. Orphans follow a loss or a reordering; a worker with more of them than this is not understood."""


class ParkedRun(msgspec.Struct, eq=False):
    """One stored event, and which of its blocks have been removed meanwhile."""

    record: Stored
    hashes: frozenset[int]
    removed: list[int]


class Orphans:
    """The parked events of one worker, oldest first."""

    def __init__(self) -> None:
        self._by_parent: dict[int, list[ParkedRun]] = {}
        self._num_runs = 0

    def __len__(self) -> int:
        """Parked events."""
        return self._num_runs

    def park(self, parent: int, record: Stored) -> int:
        """Keep an event; returns how many blocks were given up to make room."""
        dropped = 0
        if self._num_runs >= MAX_PARKED_RUNS:
            oldest = next(iter(self._by_parent))
            dropped = sum(len(run.record.hashes) for run in self.adopt(oldest))
        self._by_parent.setdefault(parent, []).append(ParkedRun(record, frozenset(record.hashes), []))
        self._num_runs += 1
        return dropped

    def adopt(self, parent: int) -> list[ParkedRun]:
        """Give out the events that waited for ``parent``, in the order in which they came."""
        runs = self._by_parent.pop(parent, [])
        self._num_runs -= len(runs)
        return runs

    def remove(self, hash_: int, tier: Tier) -> bool:
        """Note that a parked block is gone; False when none has this hash."""
        found = False
        for runs in self._by_parent.values():
            for run in runs:
                if run.record.tier == tier and hash_ in run.hashes:
                    run.removed.append(hash_)
                    found = True
        return found

    @staticmethod
    def removal(run: ParkedRun) -> Removed:
        """What is to be removed once the run has been stored."""
        return Removed(hashes=run.removed, tier=run.record.tier, group=run.record.group)
