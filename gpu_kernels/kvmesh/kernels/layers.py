"""The operations of a transformer layer: norms, gate, rotary embedding, stores into pages, paged attention.

Shapes are written with T tokens (all sequences of a step, concatenated), B sequences, H query heads, K KV heads,
D head_dim, F feed-forward width. Tensors may have any stride between tokens (a slice of a fused projection is fine);
inside a token they are contiguous. A wrong dtype or stride raises; page numbers and slots are trusted, as a check of
each would cost more than the copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvmesh.kernels.checks import GROUPED, call_cuda, compute_dtype, require, token_stride
from kvmesh.kernels.library import Kernel, check, load_cpu
from kvmesh.kernels.paged import PagedKv, native_kv

__all__ = [
    "add_rms_norm",
    "gelu_tanh_and_mul",
    "paged_attention",
    "rms_norm",
    "rope_store_kv",
    "silu_and_mul",
    "store_kv",
]

_cpu = load_cpu()
_rms_norm = _cpu.kernel("rms_norm")
_add_rms_norm = _cpu.kernel("add_rms_norm")
_silu_and_mul = _cpu.kernel("silu_and_mul")
_gelu_tanh_and_mul = _cpu.kernel("gelu_tanh_and_mul")
_store_kv = _cpu.kernel("store_kv")
_rope_store_kv = _cpu.kernel("rope_store_kv")
_paged_attention = _cpu.kernel("paged_attention")


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> None:
    """Write `x / rms(x) * (weight_offset + weight)` to `out`, the mean square taken in float32 over the last dimension.

    Args:
        out: `[T, width]` or `[T, groups, width]`; may be `x` itself.
        x: Of the same shape and dtype (float32, float16, bfloat16).
        weight: `[width]`, same dtype.
        eps: Added to the mean square.
        weight_offset: Added to every weight, in float32: 1 for models that store the difference from 1.

    Raises:
        KernelError: A tensor has another dtype or shape, or is not contiguous inside a token.
    """
    shape = x.shape
    require(out.shape == shape and weight.shape[0] == shape[-1], "rms_norm", "out, x and weight differ in shape")
    arguments = (
        out.data_ptr(),
        token_stride(out),
        x.data_ptr(),
        token_stride(x),
        weight.data_ptr(),
        shape[0],
        shape[1] if len(shape) == GROUPED else 1,
        shape[-1],
        eps,
        weight_offset,
        compute_dtype(x, out, weight),
    )
    if x.is_cuda:
        call_cuda("rms_norm", x, arguments)
    elif status := _rms_norm(*arguments):
        check(status, "rms_norm")


def add_rms_norm(
    out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> None:
    """Add `x` to `residual` in place, then write the normalised sum times `weight_offset + weight` to `out`.

    Args:
        out: `[T, width]`; may be `x`.
        residual: `[T, width]`, updated.
        x: `[T, width]`.
        weight: `[width]`. All four share one dtype (float32, float16, bfloat16).
        eps: Added to the mean square.
        weight_offset: Added to every weight, in float32: 1 for models that store the difference from 1.

    Raises:
        KernelError: A tensor has another dtype or shape, or is not contiguous inside a token.
    """
    shape = x.shape
    require(
        out.shape == shape and residual.shape == shape and weight.shape[0] == shape[-1],
        "add_rms_norm",
        "out, residual, x and weight differ in shape",
    )
    arguments = (
        out.data_ptr(),
        token_stride(out),
        residual.data_ptr(),
        token_stride(residual),
        x.data_ptr(),
        token_stride(x),
        weight.data_ptr(),
        shape[0],
        shape[1],
        eps,
        weight_offset,
        compute_dtype(x, out, residual, weight),
    )
    if x.is_cuda:
        call_cuda("add_rms_norm", x, arguments)
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
    _gate("silu_and_mul", _silu_and_mul, out, gate_up)


def gelu_tanh_and_mul(out: Tensor, gate_up: Tensor) -> None:
    """Write `gelu(gate) * up` to `out` (GELU by its tanh approximation); gate and up are the halves of each row.

    Args:
        out: `[T, F]`.
        gate_up: `[T, 2F]`, same dtype (float32, float16, bfloat16).

    Raises:
        KernelError: A tensor has another dtype or shape, or is not contiguous inside a token.
    """
    _gate("gelu_tanh_and_mul", _gelu_tanh_and_mul, out, gate_up)


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
    require(k.shape[1:] == (kv.num_kv_heads, kv.head_dim) and v.shape == k.shape, "store_kv", "k and v do not fit kv")
    require(
        slot_mapping.dtype is torch.int64 and slot_mapping.is_contiguous() and len(slot_mapping) == len(k),
        "store_kv",
        "slot_mapping must be contiguous int64 [T]",
    )
    arguments = (
        k.data_ptr(),
        token_stride(k),
        v.data_ptr(),
        token_stride(v),
        compute_dtype(k, v),
        native_kv(kv).address,
        slot_mapping.data_ptr(),
        k.shape[0],
    )
    if k.is_cuda:
        call_cuda("store_kv", k, arguments)
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
    require(
        k.shape == (tokens, kv.num_kv_heads, dim) and v.shape == k.shape and dim == kv.head_dim,
        "rope_store_kv",
        "q, k and v do not fit kv",
    )
    require(
        cos.dtype is torch.float32
        and sin.dtype is torch.float32
        and sin.shape[1] == half
        and cos.is_contiguous()
        and sin.is_contiguous()
        and 2 * half <= dim,
        "rope_store_kv",
        "cos and sin must be contiguous float32 [max_position, rotary_dim / 2]",
    )
    require(
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
        token_stride(q),
        k.data_ptr(),
        token_stride(k),
        v.data_ptr(),
        token_stride(v),
        compute_dtype(q, k, v),
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
        call_cuda("rope_store_kv", q, arguments)
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
    require(shape[2] == kv.head_dim and out.shape == shape, "paged_attention", "q and out do not fit kv")
    require(
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
        token_stride(out),
        q.data_ptr(),
        token_stride(q),
        compute_dtype(q, out),
        native_kv(kv).address,
        block_tables.data_ptr(),
        token_stride(block_tables),
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
        call_cuda("paged_attention", q, arguments)
    elif status := _paged_attention(*arguments):
        check(status, "paged_attention")


def _gate(name: str, kernel: Kernel, out: Tensor, gate_up: Tensor) -> None:
    tokens, width = out.shape
    require(gate_up.shape == (tokens, 2 * width), name, "gate_up must be [T, 2F] where out is [T, F]")
    arguments = (
        out.data_ptr(),
        token_stride(out),
        gate_up.data_ptr(),
        token_stride(gate_up),
        tokens,
        width,
        compute_dtype(gate_up, out),
    )
    if out.is_cuda:
        call_cuda(name, out, arguments)
    elif status := kernel(*arguments):
        check(status, name)
