"""Movement and checksums of whole pages, by raw address."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvmesh.kernels import _native
from kvmesh.kernels.checks import call_cuda, require
from kvmesh.kernels.library import KernelError, check, load_cpu

__all__ = [
    "PageIds",
    "checksum_pages",
    "copy_pages",
    "copy_pages_checksummed",
    "gather_pages",
    "page_bounds",
    "scatter_pages",
]

PageIds = npt.NDArray[np.int32] | Tensor
"""A numpy array where the pages are in host memory, a CUDA tensor (int32) where they are in GPU memory."""

page_bounds = _native.page_ids_bounds
"""(lowest, highest) of a contiguous int32 array, (0, -1) of an empty one: some microseconds less than numpy takes."""

_cpu = load_cpu()
_gather_pages = _cpu.kernel("gather_pages")
_scatter_pages = _cpu.kernel("scatter_pages")
_copy_pages = _cpu.kernel("copy_pages")
_copy_pages_checksummed = _cpu.kernel("copy_pages_checksummed")
_checksum_pages = _cpu.kernel("checksum_pages")


def gather_pages(
    dst_address: int, src_address: int, page_ids: PageIds, page_bytes: int, src_stride_bytes: int | None = None
) -> None:
    """Copy scattered pages into one contiguous run.

    Args:
        dst_address: Where page i of the run goes, at `i * page_bytes`.
        src_address: Address of page 0 of the pool.
        page_ids: int32 `[n]`, contiguous.
        page_bytes: Bytes copied of each page.
        src_stride_bytes: Distance between pages of the pool; `page_bytes` by default.

    Raises:
        KernelError: `page_bytes` is not positive, or `page_ids` is not a contiguous int32 array.
    """
    stride = page_bytes if src_stride_bytes is None else src_stride_bytes
    arguments = (dst_address, src_address, _ids(page_ids), len(page_ids), page_bytes, stride)
    if isinstance(page_ids, Tensor):
        call_cuda("gather_pages", page_ids, arguments)
    else:
        check(_gather_pages(*arguments), "gather_pages")


def scatter_pages(
    dst_address: int, src_address: int, page_ids: PageIds, page_bytes: int, dst_stride_bytes: int | None = None
) -> None:
    """Copy one contiguous run into scattered pages; the inverse of `gather_pages`.

    Args:
        dst_address: Address of page 0 of the pool.
        src_address: The run; its page i is at `i * page_bytes`.
        page_ids: int32 `[n]`, contiguous, no page twice.
        page_bytes: Bytes copied of each page.
        dst_stride_bytes: Distance between pages of the pool; `page_bytes` by default.

    Raises:
        KernelError: `page_bytes` is not positive, or `page_ids` is not a contiguous int32 array.
    """
    stride = page_bytes if dst_stride_bytes is None else dst_stride_bytes
    arguments = (dst_address, src_address, _ids(page_ids), len(page_ids), page_bytes, stride)
    if isinstance(page_ids, Tensor):
        call_cuda("scatter_pages", page_ids, arguments)
    else:
        check(_scatter_pages(*arguments), "scatter_pages")


def copy_pages(
    dst_base: int,
    dst_ids: PageIds,
    src_base: int,
    src_ids: PageIds,
    page_bytes: int,
    dst_stride_bytes: int | None = None,
    src_stride_bytes: int | None = None,
) -> None:
    """Copy page `src_ids[i]` of one pool to page `dst_ids[i]` of another (or the same) pool.

    Pages are copied in no particular order: a page must not be both source and destination. To copy a piece of each
    page, add its offset to the base and give the stride.

    Args:
        dst_base: Address of page 0 of the destination pool.
        dst_ids: int32 `[n]`, contiguous.
        src_base: Address of page 0 of the source pool.
        src_ids: int32 `[n]`, contiguous.
        page_bytes: Bytes copied of each page.
        dst_stride_bytes: Distance between pages of the destination pool; `page_bytes` by default.
        src_stride_bytes: Distance between pages of the source pool; `page_bytes` by default.

    Raises:
        KernelError: The id arrays differ in length or are not contiguous int32 arrays.
    """
    require(len(dst_ids) == len(src_ids), "copy_pages", "dst_ids and src_ids differ in length")
    dst_stride = page_bytes if dst_stride_bytes is None else dst_stride_bytes
    src_stride = page_bytes if src_stride_bytes is None else src_stride_bytes
    arguments = (dst_base, _ids(dst_ids), dst_stride, src_base, _ids(src_ids), src_stride, len(src_ids), page_bytes)
    if isinstance(src_ids, Tensor):
        call_cuda("copy_pages", src_ids, arguments)
    else:
        check(_copy_pages(*arguments), "copy_pages")


def copy_pages_checksummed(
    dst_base: int,
    dst_ids: npt.NDArray[np.int32],
    src_base: int,
    src_ids: npt.NDArray[np.int32],
    page_bytes: int,
    dst_stride_bytes: int | None = None,
    src_stride_bytes: int | None = None,
) -> npt.NDArray[np.uint64]:
    """Copy pages as `copy_pages` does, in host memory, and return XXH3-64 (seed 0) of each copy.

    Every byte is read once: the checksum is that of what was written, even if the source changes meanwhile. Large
    copies of pages of whole 64-byte lines pass the caches by.

    Args:
        dst_base: Address of page 0 of the destination pool.
        dst_ids: int32 `[n]`, contiguous.
        src_base: Address of page 0 of the source pool.
        src_ids: int32 `[n]`, contiguous.
        page_bytes: Bytes copied of each page.
        dst_stride_bytes: Distance between pages of the destination pool; `page_bytes` by default.
        src_stride_bytes: Distance between pages of the source pool; `page_bytes` by default.

    Returns:
        uint64 `[n]`.

    Raises:
        KernelError: The id arrays differ in length or are not contiguous int32 arrays.
    """
    require(len(dst_ids) == len(src_ids), "copy_pages_checksummed", "dst_ids and src_ids differ in length")
    sums = np.empty(len(src_ids), dtype=np.uint64)
    dst_stride = page_bytes if dst_stride_bytes is None else dst_stride_bytes
    src_stride = page_bytes if src_stride_bytes is None else src_stride_bytes
    arguments = (dst_base, _ids(dst_ids), dst_stride, src_base, _ids(src_ids), src_stride, len(src_ids), page_bytes)
    status = _copy_pages_checksummed(sums.ctypes.data, *arguments)
    check(status, "copy_pages_checksummed")
    return sums


def checksum_pages(
    base: int, page_ids: npt.NDArray[np.int32], page_bytes: int, stride_bytes: int | None = None
) -> npt.NDArray[np.uint64]:
    """Return XXH3-64 (seed 0) of the bytes of each page in host memory: fast, not cryptographic.

    Args:
        base: Address of page 0 of the pool.
        page_ids: int32 `[n]`, contiguous.
        page_bytes: Bytes of each page that count.
        stride_bytes: Distance between pages; `page_bytes` by default.

    Returns:
        uint64 `[n]`.

    Raises:
        KernelError: `page_bytes` is not positive, or `page_ids` is not a contiguous int32 array.
    """
    sums = np.empty(page_ids.size, dtype=np.uint64)
    stride = page_bytes if stride_bytes is None else stride_bytes
    check(_checksum_pages(sums.ctypes.data, base, _ids(page_ids), len(page_ids), page_bytes, stride), "checksum_pages")
    return sums


def _ids(page_ids: PageIds) -> int:
    """Return the address of page ids, having checked their type."""
    if isinstance(page_ids, Tensor):
        if page_ids.dtype is torch.int32 and page_ids.is_contiguous() and page_ids.is_cuda:
            return page_ids.data_ptr()
    else:
        try:
            return _native.page_ids_address(page_ids)
        except (TypeError, ValueError):
            # Another type, or not contiguous.
            pass
    msg = f"page ids must be a contiguous int32 array (or CUDA tensor), not {page_ids.dtype}"
    raise KernelError(msg)
