"""Where one layer's keys and values are in paged memory, and the form the native libraries want it in."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Final, NamedTuple

import torch

__all__ = ["COMPUTE_DTYPES", "KV_DTYPES", "PagedKv", "native_kv"]

KV_DTYPES: Final[dict[torch.dtype, int]] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}
COMPUTE_DTYPES: Final[dict[torch.dtype, int]] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class PagedKv(NamedTuple):
    """One layer of a paged KV pool.

    Page `p` starts at `base + p * page_stride_bytes`. In it the layer's keys are a contiguous
    `[num_kv_heads, tokens_per_block, head_dim]` array at `k_offset_bytes`, its values another at `v_offset_bytes`.
    The memory must outlive every call that is given this; nothing here keeps it alive.
    """

    base: int
    page_stride_bytes: int
    k_offset_bytes: int
    v_offset_bytes: int
    num_kv_heads: int
    tokens_per_block: int
    head_dim: int
    dtype: torch.dtype


class _NativeKv(ctypes.Structure):
    """`kvmesh_paged_kv` of csrc/include/kvmesh_kernels.h."""

    _fields_ = [
        ("base", ctypes.c_int64),
        ("page_stride_bytes", ctypes.c_int64),
        ("k_offset_bytes", ctypes.c_int64),
        ("v_offset_bytes", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int32),
        ("tokens_per_block", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    ]


class NativeKv(NamedTuple):
    """A native structure and its address; the address is valid while this object lives."""

    address: int
    structure: ctypes.Structure


@lru_cache(maxsize=4096)
def native_kv(kv: PagedKv) -> NativeKv:
    """Return the C structure for `kv`; cached, because every layer asks for its own at every step.

    Raises:
        KeyError: `kv.dtype` is not a KV dtype.
    """
    structure = _NativeKv(*kv[:-1], KV_DTYPES[kv.dtype])
    return NativeKv(ctypes.addressof(structure), structure)
