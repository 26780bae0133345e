"""Which lives of an instance id are over: what a registry remembers of members that are gone."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Past"]


class Past(NamedTuple):
    """Which lives of one instance id are over."""

    dead: int = 0
    """The latest life that is known to have ended, and with it every earlier one."""
    floor: int = 0
    """A life that somebody has met: every earlier one is over. It may itself still live."""

    def merged(self, other: Past) -> Past:
        """What both know."""
        return Past(max(self.dead, other.dead), max(self.floor, other.floor))

    def permits(self, epoch: int) -> bool:
        """Whether the life with this epoch may be alive."""
        return epoch > self.dead and epoch >= self.floor

    @property
    def latest(self) -> int:
        """The latest life that anybody knows of."""
        return max(self.dead, self.floor)
