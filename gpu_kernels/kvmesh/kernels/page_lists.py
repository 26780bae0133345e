"""Several lists of pages in one call: gathered into one run of bytes, and scattered from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvmesh.kernels.library import KernelError, check, load_cpu

__all__ = ["PageList", "gather_lists", "scatter_lists", "scatter_lists_checksummed"]

_cpu = load_cpu()
_gather_lists = _cpu.kernel("gather_lists")
_scatter_lists = _cpu.kernel("scatter_lists")


class PageList(NamedTuple):
    """Items of one size in host memory: item i lies at `base_address + ids[i] * stride_bytes`.

    Attributes:
        base_address: Of the item that id 0 would name.
        ids: int32 `[n]`, contiguous.
        stride_bytes: Distance between the items of neighbouring ids.
        item_bytes: Bytes of each item.
    """

    base_address: int
    ids: npt.NDArray[np.int32]
    stride_bytes: int
    item_bytes: int


def gather_lists(dst_address: int, lists: Sequence[PageList]) -> None:
    """Copy the items of all lists, in order, into one contiguous run.

    Args:
        dst_address: Where the run begins.
        lists: What to copy.

    Raises:
        KernelError: The ids of a list are no contiguous int32 array, or its items have no bytes.
    """
    table = _table(lists)
    check(_gather_lists(dst_address, table.ctypes.data, len(lists)), "gather_lists")


def scatter_lists(src_address: int, lists: Sequence[PageList]) -> None:
    """Copy one contiguous run into the items of all lists, in order; the inverse of `gather_lists`.

    Args:
        src_address: Where the run begins.
        lists: Where to copy it; no item twice.

    Raises:
        KernelError: As in `gather_lists`.
    """
    table = _table(lists)
    check(_scatter_lists(0, src_address, table.ctypes.data, len(lists)), "scatter_lists")


def scatter_lists_checksummed(src_address: int, lists: Sequence[PageList]) -> npt.NDArray[np.uint64]:
    """Do as `scatter_lists`, and return XXH3-64 (seed 0) of each item: of the bytes that were written, read once.

    Returns:
        uint64 `[items of all lists]`.

    Raises:
        KernelError: As in `gather_lists`.
    """
    table = _table(lists)
    sums = np.empty(sum(len(one.ids) for one in lists), dtype=np.uint64)
    status = _scatter_lists(sums.ctypes.data, src_address, table.ctypes.data, len(lists))
    check(status, "scatter_lists_checksummed")
    return sums


def _table(lists: Sequence[PageList]) -> npt.NDArray[np.int64]:
    """Return `kvmesh_page_list[len(lists)]`; valid while the ids live."""
    table = np.empty((len(lists), 5), dtype=np.int64)
    for row, (base_address, ids, stride_bytes, item_bytes) in zip(table, lists, strict=True):
        if ids.dtype != np.int32 or not ids.flags.c_contiguous:
            msg = f"page ids must be a contiguous int32 array, not {ids.dtype}"
            raise KernelError(msg)
        row[:] = (base_address, ids.ctypes.data, len(ids), stride_bytes, item_bytes)
    return table
