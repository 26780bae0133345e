"""The kernels as Python operations over torch tensors and raw page addresses.

Outputs are allocated by the caller. Each call dispatches on its tensors' device: host memory to the CPU library, CUDA
memory to the CUDA library on the current stream. Calls release the GIL. Shapes are written with T tokens (all
sequences of a step, concatenated), B sequences, H query heads, K KV heads, D head_dim, F feed-forward width. Tensors
may have any stride between tokens (a slice of a fused projection is fine); inside a token they are contiguous.

A wrong dtype or stride raises; page numbers and slots are trusted, as a check of each would cost more than the copy.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvmesh.kernels.library import Kernel, KernelError, check, load_cpu, load_cuda
from kvmesh.kernels.paged import COMPUTE_DTYPES, PagedKv, native_kv
from kvmesh.kernels.program import Program
from kvmesh.kernels.quantized import (
    QuantizedWeight,
    QuantKind,
    dequantize,
    dequantize_rows,
    quantized_linear,
    quantized_linear_max_tokens,
)

__all__ = [
    "KernelError",
    "PagedKv",
    "Program",
    "QuantKind",
    "QuantizedWeight",
    "add_rms_norm",
    "checksum_pages",
    "copy_pages",
    "cpu_level",
    "dequantize",
    "dequantize_rows",
    "gather_pages",
    "get_num_threads",
    "paged_attention",
    "philox_uint32",
    "quantized_linear",
    "quantized_linear_max_tokens",
    "rms_norm",
    "rope_store_kv",
    "scatter_pages",
    "set_cpu_level",
    "set_num_threads",
    "silu_and_mul",
    "store_kv",
]

# Page ids: a numpy array where the pages are in host memory, a CUDA tensor (int32) where they are in GPU memory.
PageIds = npt.NDArray[np.int32] | Tensor


_GROUPED = 3  # dimensions of a tensor whose tokens consist of heads
_MASK64 = (1 << 64) - 1

_cpu = load_cpu()
_rms_norm = _cpu.kernel("rms_norm")
_add_rms_norm = _cpu.kernel("add_rms_norm")
_silu_and_mul = _cpu.kernel("silu_and_mul")
_store_kv = _cpu.kernel("store_kv")
_rope_store_kv = _cpu.kernel("rope_store_kv")
_paged_attention = _cpu.kernel("paged_attention")
_gather_pages = _cpu.kernel("gather_pages")
_scatter_pages = _cpu.kernel("scatter_pages")
_copy_pages = _cpu.kernel("copy_pages")
_checksum_pages = _cpu.kernel("checksum_pages")
_philox = _cpu.kernel("philox")
_set_num_threads = _cpu.function("set_num_threads", None, ctypes.c_int)
_num_threads = _cpu.function("num_threads", ctypes.c_int)
_set_cpu_level = _cpu.function("set_level", ctypes.c_int, ctypes.c_char_p)
_cpu_level = _cpu.function("level", ctypes.c_char_p)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Write `x / rms(x) * weight` to `out`, the mean square taken in float32 over the last dimension.

    Args:
        out: `[T, width]` or `[T, groups, width]`; may be `x` itself.
        x: Of the same shape and dtype (float32, float16, bfloat16).
        weight: `[width]`, same dtype.
        eps: Added to the mean square.

    Raises:
        KernelError: A tensor has another dtype or shape, or is not contiguous inside a token.
    """
    shape = x.shape
    _require(out.shape == shape and weight.shape[0] == shape[-1], "rms_norm", "out, x and weight differ in shape")
    arguments = (
        out.data_ptr(),
        _token_stride(out),
        x.data_ptr(),
        _token_stride(x),
        weight.data_ptr(),
        shape[0],
        shape[1] if len(shape) == _GROUPED else 1,
        shape[-1],
        eps,
        _compute_dtype(x, out, weight),
    )
    if x.is_cuda:
        _call_cuda("rms_norm", x, arguments)
    elif status := _rms_norm(*arguments):
        check(status, "rms_norm")


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Add `x` to `residual` in place, then write the normalised sum times `weight` to `out`.

    Args:
        out: `[T, width]`; may be `x`.
        residual: `[T, width]`, updated.
        x: `[T, width]`.
        weight: `[width]`. All four share one dtype (float32, float16, bfloat16).
        eps: Added to the mean square.

    Raises:
        KernelError: A tensor has another dtype or shape, or is not contiguous inside a token.
    """
    shape = x.shape
    _require(
        out.shape == shape and residual.shape == shape and weight.shape[0] == shape[-1],
        "add_rms_norm",
        "out, residual, x and weight differ in shape",
    )
    arguments = (
        out.data_ptr(),
        _token_stride(out),
        residual.data_ptr(),
        _token_stride(residual),
        x.data_ptr(),
        _token_stride(x),
        weight.data_ptr(),
        shape[0],
        shape[1],
        eps,
        _compute_dtype(x, out, residual, weight),
    )
    if x.is_cuda:
        _call_cuda("add_rms_norm", x, arguments)
    elif status := _add_rms_norm(*arguments):
        check(status, "add_rms_norm")


def silu_and_mul(out: Tensor, gate_up: Tensor) -> None:
    """Write `silu(gate) * up` to `out`, where gate and up are the halves of each row of `gate_up`.

    Args:
        out: `[T, F]`.
        gate_up: `[T, 2F]`, same dtype (float32, float16, bfloat16).

    Raises:
        KernelError: A tensor has another dtype or shape, or is not contiguous inside a token.
    """
    tokens, width = out.shape
    _require(gate_up.shape == (tokens, 2 * width), "silu_and_mul", "gate_up must be [T, 2F] where out is [T, F]")
    arguments = (
        out.data_ptr(),
        _token_stride(out),
        gate_up.data_ptr(),
        _token_stride(gate_up),
        tokens,
        width,
        _compute_dtype(gate_up, out),
    )
    if out.is_cuda:
        _call_cuda("silu_and_mul", out, arguments)
    elif status := _silu_and_mul(*arguments):
        check(status, "silu_and_mul")


def store_kv(k: Tensor, v: Tensor, kv: PagedKv, slot_mapping: Tensor) -> None:
    """Store keys and values into pages, converting to the pages' dtype (fp8 saturates).

    Args:
        k: `[T, K, D]` float32, float16 or bfloat16.
        v: `[T, K, D]`, same dtype.
        kv: The layer's place in the pages.
        slot_mapping: int64 `[T]`: page * tokens_per_block + token within the page; -1 skips the token.

    Raises:
        KernelError: A tensor has another dtype or shape, or is not contiguous inside a token.
    """
    _require(k.shape[1:] == (kv.num_kv_heads, kv.head_dim) and v.shape == k.shape, "store_kv", "k and v do not fit kv")
    _require(
        slot_mapping.dtype is torch.int64 and slot_mapping.is_contiguous() and len(slot_mapping) == len(k),
        "store_kv",
        "slot_mapping must be contiguous int64 [T]",
    )
    arguments = (
        k.data_ptr(),
        _token_stride(k),
        v.data_ptr(),
        _token_stride(v),
        _compute_dtype(k, v),
        native_kv(kv).address,
        slot_mapping.data_ptr(),
        k.shape[0],
    )
    if k.is_cuda:
        _call_cuda("store_kv", k, arguments)
    elif status := _store_kv(*arguments):
        check(status, "store_kv")


def rope_store_kv(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, kv: PagedKv, slot_mapping: Tensor
) -> None:
    """Rotate `q` and `k` in place (half-split rotary), then store `k` and `v` into pages.

    Args:
        q: `[T, H, D]`, rotated in place.
        k: `[T, K, D]`, rotated in place.
        v: `[T, K, D]`. The three share one dtype (float32, float16, bfloat16).
        cos: float32 `[max_position, rotary_dim / 2]`; pair i of a head is (i, i + rotary_dim / 2).
        sin: Likewise.
        positions: int32 `[T]`.
        kv: The layer's place in the pages.
        slot_mapping: int64 `[T]` as for `store_kv`.

    Raises:
        KernelError: A tensor has another dtype or shape, or is not contiguous inside a token.
    """
    tokens, heads, dim = q.shape
    half = cos.shape[1]
    _require(
        k.shape == (tokens, kv.num_kv_heads, dim) and v.shape == k.shape and dim == kv.head_dim,
        "rope_store_kv",
        "q, k and v do not fit kv",
    )
    _require(
        cos.dtype is torch.float32
        and sin.dtype is torch.float32
        and sin.shape[1] == half
        and cos.is_contiguous()
        and sin.is_contiguous()
        and 2 * half <= dim,
        "rope_store_kv",
        "cos and sin must be contiguous float32 [max_position, rotary_dim / 2]",
    )
    _require(
        slot_mapping.dtype is torch.int64
        and positions.dtype is torch.int32
        and len(positions) == tokens
        and len(slot_mapping) == tokens
        and slot_mapping.is_contiguous()
        and positions.is_contiguous(),
        "rope_store_kv",
        "positions must be contiguous int32 [T], slot_mapping int64 [T]",
    )
    arguments = (
        q.data_ptr(),
        _token_stride(q),
        k.data_ptr(),
        _token_stride(k),
        v.data_ptr(),
        _token_stride(v),
        _compute_dtype(q, k, v),
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        native_kv(kv).address,
        slot_mapping.data_ptr(),
        tokens,
        heads,
        half,
    )
    if q.is_cuda:
        _call_cuda("rope_store_kv", q, arguments)
    elif status := _rope_store_kv(*arguments):
        check(status, "rope_store_kv")


def paged_attention(
    out: Tensor,
    q: Tensor,
    kv: PagedKv,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Causal attention of each sequence's queries over its keys in pages, prefill and decode mixed freely.

    Row i of sequence b is at position `context_lens[b] - queries[b] + i` and sees the keys up to there. Everything is
    accumulated in float32. A sequence's result does not depend on the other sequences nor on the number of threads.

    Args:
        out: `[T, H, D]`, same dtype as `q`.
        q: `[T, H, D]` float32, float16 or bfloat16; T = `query_start[B]`.
        kv: The layer's place in the pages; H is a multiple of its KV heads.
        block_tables: int32 `[B, max_blocks]`, the page of each block of `tokens_per_block` tokens.
        query_start: int32 `[B + 1]`, the first row of each sequence; a sequence may have none.
        context_lens: int32 `[B]`, keys of each sequence, those of this step included.
        scale: Multiplies q . k.
        window: Keys that a query sees, itself included; 0 for all.
        soft_cap: When above 0, scores become `soft_cap * tanh(score / soft_cap)`.

    Raises:
        KernelError: A tensor has another dtype or shape, or is not contiguous inside a token.
    """
    shape = q.shape
    _require(shape[2] == kv.head_dim and out.shape == shape, "paged_attention", "q and out do not fit kv")
    _require(
        block_tables.dtype is torch.int32
        and query_start.dtype is torch.int32
        and context_lens.dtype is torch.int32
        and query_start.is_contiguous()
        and context_lens.is_contiguous(),
        "paged_attention",
        "block_tables, query_start and context_lens must be contiguous int32",
    )
    arguments = (
        out.data_ptr(),
        _token_stride(out),
        q.data_ptr(),
        _token_stride(q),
        _compute_dtype(q, out),
        native_kv(kv).address,
        block_tables.data_ptr(),
        _token_stride(block_tables),
        query_start.data_ptr(),
        context_lens.data_ptr(),
        shape[0],
        context_lens.shape[0],
        shape[1],
        scale,
        window,
        soft_cap,
    )
    if q.is_cuda:
        _call_cuda("paged_attention", q, arguments)
    elif status := _paged_attention(*arguments):
        check(status, "paged_attention")


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
        _call_cuda("gather_pages", page_ids, arguments)
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
        _call_cuda("scatter_pages", page_ids, arguments)
    else:
        check(_scatter_pages(*arguments), "scatter_pages")


def copy_pages(dst_base: int, dst_ids: PageIds, src_base: int, src_ids: PageIds, page_bytes: int) -> None:
    """Copy page `src_ids[i]` of one pool to page `dst_ids[i]` of another (or the same) pool.

    Pages are copied in no particular order: a page must not be both source and destination.

    Args:
        dst_base: Address of page 0 of the destination pool.
        dst_ids: int32 `[n]`, contiguous.
        src_base: Address of page 0 of the source pool.
        src_ids: int32 `[n]`, contiguous.
        page_bytes: Bytes of a page, in both pools.

    Raises:
        KernelError: The id arrays differ in length or are not contiguous int32 arrays.
    """
    _require(len(dst_ids) == len(src_ids), "copy_pages", "dst_ids and src_ids differ in length")
    arguments = (dst_base, _ids(dst_ids), src_base, _ids(src_ids), len(src_ids), page_bytes)
    if isinstance(src_ids, Tensor):
        _call_cuda("copy_pages", src_ids, arguments)
    else:
        check(_copy_pages(*arguments), "copy_pages")


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


def philox_uint32(key: int, counter: int, blocks: int, *, rounds: int = 10) -> npt.NDArray[np.uint32]:
    """Return Philox4x32 blocks `counter`, `counter + 1`, ...: random words that depend on (key, counter) alone.

    Args:
        key: 64-bit key (a seed).
        counter: 128-bit number of the first block.
        blocks: How many blocks of four words.
        rounds: 10 is the standard strength.

    Returns:
        uint32 `[blocks, 4]`.

    Raises:
        KernelError: `rounds` is below 1.
    """
    words = np.empty((blocks, 4), dtype=np.uint32)
    low, high = counter & _MASK64, counter >> 64 & _MASK64
    check(_philox(words.ctypes.data, key & _MASK64, low, high, blocks, rounds), "philox_uint32")
    return words


def set_num_threads(count: int) -> None:
    """Set how many threads, the caller included, one operation may use. Starts at 1; threads start when first needed.

    Idle threads sleep. An operation called while another thread is inside one runs on its caller alone.
    """
    _set_num_threads(max(1, count))


def get_num_threads() -> int:
    """Return what `set_num_threads` set last."""
    count: int = _num_threads()
    return count


def cpu_level() -> str:
    """Return the instruction-set level in use: `avx512`, `avx2` or `baseline`."""
    name: str = _cpu_level().decode()
    return name


def set_cpu_level(name: str) -> None:
    """Use another instruction-set level than the best one. Not while an operation runs.

    The environment variable KVMESH_CPU_LEVEL does the same when this module is imported.

    Raises:
        KernelError: This CPU lacks the level, or there is none of that name.
    """
    _require(_set_cpu_level(name.encode()) == 0, "set_cpu_level", f"this CPU has no level {name!r}")


def _require(condition: bool, operation: str, problem: str) -> None:
    if not condition:
        msg = f"{operation}: {problem}"
        raise KernelError(msg)


def _token_stride(tensor: Tensor) -> int:
    """Return the elements between tokens, having checked that a token is contiguous."""
    stride = tensor.stride()
    if stride[-1] != 1 or (len(stride) == _GROUPED and stride[1] != tensor.shape[2]):
        msg = f"a tensor of shape {tuple(tensor.shape)} and strides {stride} is not contiguous inside a token"
        raise KernelError(msg)
    return stride[0]


def _compute_dtype(first: Tensor, *others: Tensor) -> int:
    """Return the C code of the dtype that all the tensors share."""
    dtype = first.dtype
    for tensor in others:
        if tensor.dtype is not dtype:
            msg = f"tensors differ in dtype: {dtype} and {tensor.dtype}"
            raise KernelError(msg)
    code = COMPUTE_DTYPES.get(dtype)
    if code is None:
        msg = f"unsupported dtype {dtype}; use float32, float16 or bfloat16"
        raise KernelError(msg)
    return code


def _ids(page_ids: PageIds) -> int:
    """Return the address of page ids, having checked their type."""
    if isinstance(page_ids, Tensor):
        if page_ids.dtype is torch.int32 and page_ids.is_contiguous() and page_ids.is_cuda:
            return page_ids.data_ptr()
    elif page_ids.dtype == np.int32 and page_ids.flags.c_contiguous:
        return page_ids.ctypes.data
    msg = f"page ids must be a contiguous int32 array (or CUDA tensor), not {page_ids.dtype}"
    raise KernelError(msg)


@lru_cache(maxsize=64)
def _cuda_kernel(name: str) -> Kernel:
    return load_cuda().kernel(name)


def _call_cuda(name: str, tensor: Tensor, arguments: tuple[Any, ...]) -> None:
    """Enqueue an operation on the current stream of the tensor's device."""
    with torch.cuda.device(tensor.device):
        stream = torch.cuda.current_stream().cuda_stream
        check(_cuda_kernel(name)(*arguments, stream), name)


if _wanted_level := os.environ.get("KVMESH_CPU_LEVEL"):
    set_cpu_level(_wanted_level)
