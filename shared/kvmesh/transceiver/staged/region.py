"""The two staging regions of an engine: how large they are, and their memory."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.layout import PageLayout
from kvmesh.cache.probe import available_host_bytes
from kvmesh.cache.shared_memory import map_shared
from kvmesh.transceiver.channels.base import Region
from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.staged.rooms import ALIGNMENT_BYTES

__all__ = ["RegionSize", "StagingMemory", "region_size"]

MADV_POPULATE_WRITE: Final = 23
_OPTION: Final = "cache_transceiver_config.max_tokens_in_buffer"


class RegionSize(NamedTuple):
    """How large each of the two regions is.

    Attributes:
        nbytes: bytes of each.
        reserved: whether the memory is taken at once, because somebody asked for so much of it.
    """

    nbytes: int
    reserved: bool


def region_size(layout: PageLayout, max_tokens_in_buffer: int | None, max_seq_len: int) -> RegionSize:
    """The bytes of so many tokens over all layer groups, in whole pages.

    Args:
        layout: of the cache's pages.
        max_tokens_in_buffer: the setting; None means the longest sequence.
        max_seq_len: of the model, in tokens.

    Raises:
        PlaneError: not even one page of each layer group fits.
    """
    tokens = max_seq_len if max_tokens_in_buffer is None else max_tokens_in_buffer
    page_bytes = sum(layout.pools[group.pool].page_bytes for group in layout.groups)
    if tokens < layout.tokens_per_block:
        raise PlaneError(
            f"{_OPTION} is {tokens}, less than the {layout.tokens_per_block} tokens of one page of each layer group "
            f"({page_bytes} bytes); set at least {layout.tokens_per_block}, better the longest prompt, or leave it out"
        )
    nbytes = -(-tokens // layout.tokens_per_block) * page_bytes
    return RegionSize(-(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, max_tokens_in_buffer is not None)


def _touch(mapping: mmap.mmap) -> None:
    """Have every page of the machine mapped: copies into pages that are not take six times as long."""
    # A kernel before 5.14 does not know how; then the first transfers do.
    with contextlib.suppress(OSError):
        mapping.madvise(MADV_POPULATE_WRITE)


class StagingMemory:
    """One region: shared memory that peers of the same user on this host can map, and that vanishes with its users.

    Args:
        size: of the region.
        option: the setting that asks for it, for the error.

    Raises:
        PlaneError: the system has not so much memory.
    """

    def __init__(self, size: RegionSize, option: str = _OPTION) -> None:
        # The system would give page by page until it has to kill somebody.
        if size.reserved and 0 < (available_bytes := available_host_bytes()) < size.nbytes:
            raise PlaneError(
                f"cannot take {size.nbytes} bytes for a staging buffer ({option}): {available_bytes} bytes of host "
                "memory are available"
            )
        self._fd: int | None
        try:
            self._fd, mapping = map_shared("kvmesh-staging", size.nbytes, reserved=size.reserved)
        except OSError as error:
            raise PlaneError(
                f"cannot take {size.nbytes} bytes for a staging buffer ({option}): {error.strerror}"
            ) from error
        if size.reserved:
            _touch(mapping)
        self.array: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        self.region = Region(self.array.ctypes.data, size.nbytes, self._fd)

    def close(self) -> None:
        """Close the file; the mapping goes with the last view of it. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
