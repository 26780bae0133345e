"""Ports for the processes of a mesh on one machine."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

__all__ = ["PortPicker", "is_free"]

LOWEST = 20_000
HIGHEST = 32_000
"""Below the range that the kernel takes outgoing ports from: a port picked here is still free after a restart."""

ATTEMPTS = 200


def is_free(host: str, port: int) -> bool:
    """Whether ``port`` can be bound now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class PortPicker:
    """Hands out each port once.

    Args:
        free: whether (host, port) can be bound.
        seed: of the random choice; None for a different one each time.
    """

    def __init__(self, free: Callable[[str, int], bool] = is_free, seed: int | None = None) -> None:
        self._free = free
        self._random = random.Random(seed)
        self._taken: set[int] = set()
        self._picked: set[tuple[str, int]] = set()

    def pick(self, host: str, preferred: int = 0) -> int:
        """``preferred`` if it is free, else a random one that is.

        Raises:
            RuntimeError: none was found.
        """
        for port in (preferred, *(self._random.randrange(LOWEST, HIGHEST) for _ in range(ATTEMPTS))):
            if port and self._take(host, port):
                self._picked.add((host, port))
                return port
        raise RuntimeError(f"no free port between {LOWEST} and {HIGHEST} on {host}")

    def pick_run(self, host: str, count: int, preferred: int) -> int:
        """The first of ``count`` consecutive free ports, from ``preferred`` on if those are free.

        Raises:
            RuntimeError: none was found.
        """
        for first in (preferred, *(self._random.randrange(LOWEST, HIGHEST - count) for _ in range(ATTEMPTS))):
            run = range(first, first + count)
            if first and all(port not in self._taken and self._free(host, port) for port in run):
                self._taken.update(run)
                self._picked.update((host, port) for port in run)
                return first
        raise RuntimeError(f"no {count} consecutive free ports between {LOWEST} and {HIGHEST} on {host}")

    def claim(self, host: str, port: int) -> bool:
        """Take exactly this port; False when it is not free."""
        return self._take(host, port)

    def repick(self, host: str, first: int, count: int = 1) -> int:
        """For ports given out before, whose holder does not run: the same if all are still free, else others.

        Args:
            host: to bind.
            first: of ``count`` consecutive ports.
            count: ports.

        Raises:
            RuntimeError: none was found.
        """
        run = range(first, first + count)
        if self.are_free(host, first, count):
            return first
        self._picked.difference_update((host, port) for port in run)
        return self.pick_run(host, count, 0)

    def are_free(self, host: str, first: int, count: int = 1) -> bool:
        """Whether ``count`` consecutive ports can be bound now, given out or not."""
        return all(self._free(host, port) for port in range(first, first + count))

    def lost(self) -> list[int]:
        """The ports picked here (not those claimed) that somebody holds; asked when none of ours runs."""
        return sorted(port for host, port in self._picked if not self._free(host, port))

    def _take(self, host: str, port: int) -> bool:
        if port in self._taken or not self._free(host, port):
            return False
        self._taken.add(port)
        return True
