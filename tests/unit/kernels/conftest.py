"""Paged memory and torch references for the kernel tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvmesh.kernels import ops


@dataclass
class PagedCase:
    """One layer's pages in a pool, as dense tensors and as the kernels see them."""

    pool: Tensor  # uint8
    kv: ops.PagedKv
    block_tables: Tensor

    def rows(self, role: str) -> Tensor:
        """View K or V of every page: `[pages, heads, tokens, head_dim]`."""
        kv = self.kv
        offset = kv.k_offset_bytes if role == "k" else kv.v_offset_bytes
        pages = self.pool.view(-1, kv.page_stride_bytes)
        nbytes = kv.num_kv_heads * kv.tokens_per_block * kv.head_dim * kv.dtype.itemsize
        dense = pages[:, offset : offset + nbytes].view(kv.dtype)
        return dense.view(len(pages), kv.num_kv_heads, kv.tokens_per_block, kv.head_dim)

    def dense(self, role: str, sequence: int, length: int) -> Tensor:
        """Return K or V of one sequence as float32 `[heads, length, head_dim]`."""
        pages = self.rows(role).float()[self.block_tables[sequence].long()]
        heads = pages.transpose(0, 1)
        return heads.reshape(heads.shape[0], -1, heads.shape[-1])[:, :length]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Use two threads, one of them the pool's, and torch one."""
    torch.set_num_threads(1)
    before = ops.get_num_threads()
    ops.set_num_threads(2)
    yield
    ops.set_num_threads(before)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def cpu_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test at each instruction-set level that this CPU has."""
    before = ops.cpu_level()
    try:
        ops.set_cpu_level(request.param)
    except ops.KernelError as error:
        pytest.skip(str(error))
    yield request.param
    ops.set_cpu_level(before)


@pytest.fixture
def make_pages() -> Callable[..., PagedCase]:
    def make(
        context_lens: list[int],
        *,
        kv_heads: int,
        head_dim: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> PagedCase:
        generator = torch.Generator().manual_seed(seed)
        blocks = [math.ceil(n / tokens_per_block) for n in context_lens]
        order = torch.randperm(sum(blocks) + 2, generator=generator).to(torch.int32)
        tables = torch.zeros(len(context_lens), max(blocks, default=0) + 1, dtype=torch.int32)
        taken = 0
        for row, count in enumerate(blocks):
            tables[row, :count] = order[taken : taken + count]
            taken += count
        head_bytes = kv_heads * tokens_per_block * head_dim * dtype.itemsize
        k_offset, v_offset = 64, 64 + (head_bytes + 63) // 64 * 64
        stride = v_offset + (head_bytes + 63) // 64 * 64
        # 0xff is NaN in every format: reading beyond a sequence's tokens shows up as NaN.
        pool = torch.full((len(order) * stride,), 0xFF, dtype=torch.uint8)
        kv = ops.PagedKv(pool.data_ptr(), stride, k_offset, v_offset, kv_heads, tokens_per_block, head_dim, dtype)
        case = PagedCase(pool, kv, tables)
        for row, length in enumerate(context_lens):
            for role in ("k", "v"):
                values = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
                for token in range(length):
                    page = int(tables[row, token // tokens_per_block])
                    case.rows(role)[page, :, token % tokens_per_block] = values[token]
        return case

    return make


def without_what_windows_left(
    case: PagedCase, query_lens: list[int], context_lens: list[int], window: int
) -> PagedCase:
    """The same sequences with NaN in, or no page (-1) for, every block that no query's window reaches.

    The page in front of page 0 holds NaN, too: what -1 would lead to.
    """
    stride, size = case.kv.page_stride_bytes, case.kv.tokens_per_block
    pool = torch.full((case.pool.numel() + stride,), 0xFF, dtype=torch.uint8)
    pool[stride:] = case.pool
    holes = PagedCase(pool[stride:], case.kv._replace(base=pool.data_ptr() + stride), case.block_tables.clone())
    for row, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        for block in range(max(0, context - queries - window + 1) // size):
            holes.pool.view(-1, stride)[int(case.block_tables[row, block])] = 0xFF
            if block % 2:
                holes.block_tables[row, block] = -1
    return holes


@pytest.fixture
def leave_windows() -> Callable[..., PagedCase]:
    return without_what_windows_left


def reference_attention(
    case: PagedCase,
    q: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    """Attention written out in float64, one sequence at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // case.kv.num_kv_heads
    start = 0
    for row, (queries, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        k = case.dense("k", row, context).double().repeat_interleave(group, 0)
        v = case.dense("v", row, context).double().repeat_interleave(group, 0)
        scores = q[start : start + queries].double().transpose(0, 1) @ k.transpose(1, 2) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(context - queries, context)[:, None]
        keys = torch.arange(context)[None]
        visible = keys <= positions
        if window:
            visible &= keys > positions - window
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out[start : start + queries] = (weights @ v).transpose(0, 1)
        start += queries
    return out


@pytest.fixture
def attention_reference() -> Callable[..., Tensor]:
    return reference_attention
