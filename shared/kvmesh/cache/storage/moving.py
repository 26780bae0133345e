"""Moves pages between two places, through memory where neither is memory, and sums what was moved."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.storage.memory import PageMemory, Slots

__all__ = ["Moved", "Place", "move_pages"]


class Place(Protocol):
    """Pages that can only be reached by copies to and from memory: a file, a pool of a remote device."""

    def load(self, slots: Slots, memory: PageMemory, rows: Slots) -> NDArray[np.bool_]:
        """Copy pages to ``rows`` of ``memory``; returns which of them could be read, bool ``[n]``."""
        ...

    def store(self, slots: Slots, memory: PageMemory, rows: Slots) -> None:
        """Copy ``rows`` of ``memory`` to pages; ``memory`` knows it when they are still being read afterwards.

        Raises:
            OSError: not all of them could be written.
        """
        ...


class Moved(NamedTuple):
    """What a move did."""

    checksums: NDArray[np.uint64]
    """XXH3-64 of what is in each destination now, ``[n]``."""
    read: NDArray[np.bool_]
    """Which pages could be read at all, ``[n]``; in the others' destinations is something else."""


def move_pages(
    source: PageMemory | Place, src: Slots, target: PageMemory | Place, dst: Slots, staging: PageMemory | None
) -> Moved:
    """Copy page ``src[i]`` of ``source`` to page ``dst[i]`` of ``target``.

    The checksums are those of the destination where that is memory: nothing can change between them and the page.

    Args:
        source: where the pages are.
        src: int32 ``[n]``.
        target: where they go.
        dst: int32 ``[n]``; apart from ``src`` where both are the same place.
        staging: memory for a move between two places that are not memory.

    Raises:
        OSError: the target cannot take the pages.
    """
    if isinstance(target, PageMemory):
        if isinstance(source, PageMemory):
            return Moved(target.copy_from(dst, source, src), np.ones(len(src), dtype=np.bool_))
        read = source.load(src, target, dst)
        return Moved(target.checksums(dst), read)
    if isinstance(source, PageMemory):
        target.store(dst, source, src)
        # A remote device copies meanwhile.
        return Moved(source.checksums(src), np.ones(len(src), dtype=np.bool_))
    if staging is None:
        raise ValueError("a move between two places that are not memory needs memory in between")
    return _staged(source, src, target, dst, staging)


def _staged(source: Place, src: Slots, target: Place, dst: Slots, staging: PageMemory) -> Moved:
    """Move as many pages at a time as ``staging`` holds."""
    most = staging.array.nbytes // staging.page_bytes
    moved = Moved(np.zeros(len(src), dtype=np.uint64), np.zeros(len(src), dtype=np.bool_))
    for begin in range(0, len(src), most):
        part = slice(begin, begin + most)
        rows = np.arange(len(src[part]), dtype=np.int32)
        moved.read[part] = source.load(src[part], staging, rows)
        target.store(dst[part], staging, rows)
        moved.checksums[part] = staging.checksums(rows)
    staging.await_readers()
    return moved
