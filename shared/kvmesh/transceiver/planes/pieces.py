"""What planes share in handling parts: cutting them into slices, and refusing pages that are not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvmesh.kernels import ops
from kvmesh.transceiver.planes.base import Part, PlaneError

__all__ = ["RemotePages", "check_remote", "piece_slices"]


class RemotePages(Protocol):
    """What a peer says of one of its pools."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""


def piece_slices(parts: Sequence[Part], most_bytes: int) -> Iterator[tuple[int, slice]]:
    """Cut parts into slices of ``most_bytes`` at most, or of one piece: yields (index of the part, slice).

    Raises:
        PlaneError: pieces of a part have no bytes.
    """
    for index, part in enumerate(parts):
        if part.nbytes < 1:
            raise PlaneError(f"pieces of {part.nbytes} bytes are asked for")
        step = max(1, most_bytes // part.nbytes)
        for start in range(0, len(part.local), step):
            yield index, slice(start, min(start + step, len(part.local)))


def check_remote(parts: Sequence[Part], pools: Sequence[RemotePages]) -> None:
    """Check that every piece at the peer lies inside one of the pools that it described.

    Raises:
        PlaneError: one does not: what it would address is not the peer's pages.
    """
    for part in parts:
        if not 0 <= part.remote_pool < len(pools):
            raise PlaneError(f"pool {part.remote_pool} of {len(pools)} pools of the peer is asked for")
        pool = pools[part.remote_pool]
        if not 0 <= part.remote_offset <= pool.page_bytes - part.nbytes:
            raise PlaneError(
                f"bytes {part.remote_offset} to {part.remote_offset + part.nbytes} are outside the peer's pages of "
                f"{pool.page_bytes} bytes"
            )
        lowest, highest = ops.page_bounds(part.remote)
        if lowest < 0 or highest >= pool.num_pages:
            raise PlaneError(
                f"pages outside the peer's pool {part.remote_pool} of {pool.num_pages} pages are asked for"
            )
