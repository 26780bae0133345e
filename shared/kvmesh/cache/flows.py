"""Counts of what happened to pages, by level and layer group (semantics §3.10)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FlowName", "GroupFlows", "PageFlows"]

FlowName = Literal["reused_full", "reused_partial", "copied", "offloaded", "onboarded", "dropped", "damaged"]


class GroupFlows(NamedTuple):
    """Pages of one layer group on one level, since the cache was made."""

    level: int
    group: int
    reused_full: int = 0
    """Found here for a prompt, whole."""
    reused_partial: int = 0
    """Found here for a prompt, for its leading tokens."""
    copied: int = 0
    """Copied from here to the device: blocks that were found in part, and states."""
    offloaded: int = 0
    """Came here from a warmer level."""
    onboarded: int = 0
    """Left for a warmer level."""
    dropped: int = 0
    """Left for nowhere: nobody needed them."""
    damaged: int = 0
    """Were not what had been written here."""


_ROWS = {name: row for row, name in enumerate(GroupFlows._fields[2:])}


class PageFlows:
    """The counts of one cache; its own thread is their only writer.

    Args:
        num_levels: levels, the device included.
        num_groups: layer groups.
    """

    def __init__(self, num_levels: int, num_groups: int) -> None:
        self._num_groups = num_groups
        self._places = [(level, group) for level in range(num_levels) for group in range(num_groups)]
        self._counts: NDArray[np.int64] = np.zeros((len(_ROWS), len(self._places)), dtype=np.int64)

    def note(self, flow: FlowName, levels: NDArray[np.uint8] | int, groups: NDArray[np.uint8] | int) -> None:
        """Count pages, one for each element of ``levels`` and ``groups`` (uint8 ``[n]``; a number is that of all)."""
        places = np.asarray(levels, dtype=np.intp) * self._num_groups + groups
        self._counts[_ROWS[flow]] += np.bincount(places, minlength=len(self._places))

    def add(self, flow: FlowName, level: int, group: int, num_pages: int) -> None:
        """Count ``num_pages`` pages of one place at once."""
        self._counts[_ROWS[flow], level * self._num_groups + group] += num_pages

    def snapshot(self) -> tuple[GroupFlows, ...]:
        """The counts by level, then group."""
        return tuple(
            GroupFlows(*place, *counts) for place, counts in zip(self._places, self._counts.T.tolist(), strict=True)
        )
