"""Whose beginning is being computed right now, so that nobody else computes it at the same time."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["UnfinishedPrefixes", "shared_blocks"]


def shared_blocks(mine: list[bytes], theirs: list[bytes], at_least: int = 0) -> int:
    """Leading blocks that two prompts share, from their block keys; ``at_least`` when it is not more than that.

    A key depends on everything before its block, so that keys are equal up to one point and different from there on:
    it is found in logarithmic time.
    """
    low, high = at_least, min(len(mine), len(theirs))
    if low >= high or mine[low] != theirs[low]:
        return low
    while low < high:
        middle = (low + high + 1) // 2
        if mine[middle - 1] == theirs[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class UnfinishedPrefixes:
    """The prompts that are being computed in one step, by their first block.

    Args:
        prompts: block keys of each.
    """

    def __init__(self, prompts: Iterable[list[bytes]] = ()) -> None:
        self._by_first: dict[bytes, list[list[bytes]]] = {}
        for keys in prompts:
            self.add(keys)

    def add(self, keys: list[bytes]) -> None:
        """Another prompt is being computed from now on."""
        if keys:
            self._by_first.setdefault(keys[0], []).append(keys)

    def shared_blocks(self, keys: list[bytes]) -> int:
        """The most leading blocks that ``keys`` has in common with one of the prompts."""
        best = 0
        for other in self._by_first.get(keys[0], ()) if keys else ():
            best = shared_blocks(keys, other, best)
        return best
