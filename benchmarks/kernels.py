"""The CPU kernels against named peers and limits, interleaved.

Each round times the peer, then the kernel, on the same data and threads; a ratio is peer time / kernel time (above 1
the kernel is faster), the median of the rounds' own ratios, given with the lowest and the highest. Shapes are those of
the built-in model (9 query heads, 3 KV heads of 64, width 576, feed-forward 1536). The last line is JSON.

    python benchmarks/kernels.py [--threads 1] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvmesh.kernels import ops

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK = 9, 3, 64, 30, 32
SLICE_S = 0.08
"""Time that one side of one round runs, at least."""


class Comparison(NamedTuple):
    """What is compared; `amount` is what one call of either side moves or computes, in `unit` per second / 1e9."""

    name: str
    peer: str
    run_peer: Callable[[], object]
    run_kernel: Callable[[], object]
    amount: float
    unit: str


class Pages(NamedTuple):
    """All layers of some sequences in one shuffled pool."""

    pool: Tensor
    layers: list[ops.PagedKv]
    tables: Tensor


def make_pages(sequences: int, context: int, dtype: torch.dtype) -> Pages:
    blocks = -(-context // BLOCK)
    head_bytes = KV_HEADS * BLOCK * HEAD_DIM * dtype.itemsize
    stride = 2 * head_bytes * LAYERS
    pool = torch.empty(sequences * blocks * stride, dtype=torch.uint8)
    values = pool.view(dtype)
    values.copy_(torch.randn(4096).to(dtype).repeat(values.numel() // 4096 + 1)[: values.numel()])
    layers = [
        ops.PagedKv(
            pool.data_ptr(),
            stride,
            2 * head_bytes * i,
            2 * head_bytes * i + head_bytes,
            KV_HEADS,
            BLOCK,
            HEAD_DIM,
            dtype,
        )
        for i in range(LAYERS)
    ]
    return Pages(pool, layers, torch.randperm(sequences * blocks).to(torch.int32).view(sequences, blocks))


def decode(sequences: int, context: int, dtype: torch.dtype) -> Comparison:
    """One step of decode attention, all layers, against SDPA over contiguous KV of the same dtype."""
    pages = make_pages(sequences, context, dtype)
    q = torch.randn(sequences, HEADS, HEAD_DIM).to(dtype)
    out = torch.empty_like(q)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    lens = torch.full((sequences,), context, dtype=torch.int32)
    contiguous = torch.randn(LAYERS, 2, sequences, KV_HEADS, context, HEAD_DIM).to(dtype)

    def kernel() -> None:
        for kv in pages.layers:
            ops.paged_attention(out, q, kv, pages.tables, starts, lens, HEAD_DIM**-0.5)

    def peer() -> None:
        for layer in contiguous:
            scaled_dot_product_attention(q[:, :, None], layer[0], layer[1], enable_gqa=True)

    name = f"decode attention, {sequences} x {context}, {str(dtype).removeprefix('torch.')}"
    return Comparison(name, "torch SDPA, contiguous KV", peer, kernel, pages.pool.numel(), "GB/s")


def decode_against_memory(sequences: int, context: int) -> Comparison:
    """The same step against reading as many contiguous bytes: the limit of memory."""
    kernel = decode(sequences, context, torch.float32)
    flat = torch.randn(int(kernel.amount) // 4)
    name = f"decode attention, {sequences} x {context}, float32, of memory"
    return Comparison(name, "torch sum of as many bytes", flat.sum, kernel.run_kernel, kernel.amount, "GB/s")


def prefill(queries: int, context: int) -> Comparison:
    """Prefill attention of one layer; SDPA is given the last `queries` rows of the causal mask."""
    pages = make_pages(1, context, torch.float32)
    q, out = torch.randn(queries, HEADS, HEAD_DIM), torch.empty(queries, HEADS, HEAD_DIM)
    starts, lens = torch.tensor([0, queries], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    k, v = torch.randn(2, 1, HEADS, context, HEAD_DIM)  # heads repeated beforehand: the fastest form for SDPA
    peer_q = q.transpose(0, 1)[None].contiguous()
    whole = queries == context
    mask = None if whole else torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
    pairs = sum(range(context - queries + 1, context + 1))
    return Comparison(
        f"prefill attention, {queries} of {context}",
        "torch SDPA, contiguous KV",
        lambda: scaled_dot_product_attention(peer_q, k, v, attn_mask=mask, is_causal=whole),
        lambda: ops.paged_attention(out, q, pages.layers[0], pages.tables, starts, lens, HEAD_DIM**-0.5),
        4 * HEAD_DIM * HEADS * pairs,
        "GFLOP/s",
    )


def prefill_against_gemm() -> Comparison:
    """Prefill attention of 2048 tokens against a matrix product of as many operations."""
    kernel = prefill(2048, 2048)
    rows = round(kernel.amount / (2 * 576 * 1536))
    x, weight = torch.randn(rows, 576), torch.randn(576, 1536)
    return kernel._replace(
        name="prefill attention, of GEMM speed", peer="torch float32 mm", run_peer=lambda: x @ weight
    )


def linear(kind: ops.QuantKind, rows: int, columns: int, tokens: int, copies: int) -> Comparison:
    """Products with quantised weights against float32 products; enough weights that none stays in the L2 cache."""
    form = gguf.GGMLQuantizationType[kind.name]
    blocks = gguf.quants.quantize(np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32), form)
    weights = [ops.QuantizedWeight.from_blocks(kind, blocks, rows, columns) for _ in range(copies)]
    dense = [ops.dequantize(weight) for weight in weights]
    x, out = torch.randn(tokens, columns), torch.empty(tokens, rows)

    def kernel() -> None:
        for weight in weights:
            ops.quantized_linear(out, x, weight)

    def peer() -> None:
        for weight in dense:
            torch.mm(x, weight.T, out=out)

    name = f"{kind.name} [{rows}, {columns}] x {tokens} tokens"
    return Comparison(name, "torch float32 mm", peer, kernel, copies * weights[0].nbytes, "GB/s")


def page_moves() -> Iterator[Comparison]:
    page_bytes, count = 2 * KV_HEADS * BLOCK * HEAD_DIM * 4 * LAYERS, 96
    pool = torch.randint(0, 255, (2 * count, page_bytes), dtype=torch.uint8)
    run, order = torch.empty(count, page_bytes, dtype=torch.uint8), torch.randperm(2 * count)[:count]
    ids = order.numpy().astype(np.int32)
    source = pool[:count]

    def gather() -> None:
        ops.gather_pages(run.data_ptr(), pool.data_ptr(), ids, page_bytes)

    def scatter() -> None:
        ops.scatter_pages(pool.data_ptr(), run.data_ptr(), ids, page_bytes)

    def against(name: str, peer: str, run_peer: Callable[[], object], run_kernel: Callable[[], object]) -> Comparison:
        return Comparison(name, peer, run_peer, run_kernel, count * page_bytes, "GB/s")

    yield against("gather pages", "torch index_select", lambda: torch.index_select(pool, 0, order, out=run), gather)
    yield against("gather pages, of memcpy", "torch copy_", lambda: run.copy_(source), gather)
    yield against("scatter pages", "torch index_copy_", lambda: pool.index_copy_(0, order, run), scatter)
    yield against(
        "checksum pages, of memory",
        "torch sum of as many bytes",
        source.view(torch.float32).sum,
        lambda: ops.checksum_pages(pool.data_ptr(), ids, page_bytes),
    )


def comparisons() -> Iterator[Comparison]:
    for sequences, context in ((1, 512), (1, 2048), (8, 512), (8, 2048)):
        yield decode(sequences, context, torch.float32)
    yield decode(8, 512, torch.bfloat16)
    yield decode_against_memory(8, 512)
    yield prefill(512, 512)
    yield prefill(512, 2048)
    yield prefill(2048, 2048)
    yield prefill_against_gemm()
    q4, q8 = ops.QuantKind.Q4_1, ops.QuantKind.Q8_0
    for tokens in (1, 2, 4, 8, 32, 64, 96, 128):
        yield linear(q4, 3072, 576, tokens, 24)
    yield linear(q4, 576, 1536, 1, 48)
    yield linear(q8, 49152, 576, 1, 1)
    yield linear(q8, 49152, 576, 8, 1)
    yield from page_moves()


def repeats(run: Callable[[], object]) -> int:
    run()
    started_s = time.perf_counter()
    run()
    return max(1, round(SLICE_S / (time.perf_counter() - started_s)))


def timed(run: Callable[[], object], count: int) -> float:
    started_s = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started_s) / count


def measure(comparison: Comparison, rounds: int) -> dict[str, object]:
    peer_count, kernel_count = repeats(comparison.run_peer), repeats(comparison.run_kernel)
    pairs = [
        (timed(comparison.run_peer, peer_count), timed(comparison.run_kernel, kernel_count)) for _ in range(rounds)
    ]
    ratios = sorted(peer_s / kernel_s for peer_s, kernel_s in pairs)
    kernel_s = statistics.median(seconds for _, seconds in pairs)
    return {
        "name": comparison.name,
        "peer": comparison.peer,
        "ratio": round(statistics.median(ratios), 2),
        "range": [round(ratios[0], 2), round(ratios[-1], 2)],
        "kernel_us": round(kernel_s * 1e6, 1),
        "rate": round(comparison.amount / kernel_s / 1e9, 1),
        "unit": comparison.unit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    for comparison in comparisons():
        result = measure(comparison, options.rounds)
        results.append(result)
        low, high = result["range"]  # type: ignore[misc]
        print(
            f"{result['name']:46} x{result['ratio']:<5} ({low}-{high}) of {result['peer']:27}"
            f" {result['rate']:>7} {result['unit']}",
            flush=True,
        )
    print(
        json.dumps({"level": ops.cpu_level(), "threads": options.threads, "rounds": options.rounds, "results": results})
    )


if __name__ == "__main__":
    main()
