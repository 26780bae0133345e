"""Paged attention against attention written out in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvmesh.kernels import ops

pytestmark = pytest.mark.usefixtures("cpu_level")

TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def run(case, q, query_lens, context_lens, *, window=0, soft_cap=0.0, out=None):
    out = torch.empty_like(q) if out is None else out
    query_start = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    lens = torch.tensor(context_lens, dtype=torch.int32)
    scale = q.shape[2] ** -0.5
    ops.paged_attention(out, q, case.kv, case.block_tables, query_start, lens, scale, window, soft_cap)
    return out


def queries(count, heads, dim, dtype=torch.float32):
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(7)).to(dtype)


MIXED = ([1, 5, 0, 70, 1, 17, 33], [1, 9, 3, 130, 700, 17, 1100])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (37, 0.0), (0, 5.0), (100, 20.0)])
def test_mixed_batch_equals_reference(make_pages, attention_reference, dtype, window, soft_cap):
    query_lens, context_lens = MIXED
    case = make_pages(context_lens, kv_heads=3, head_dim=64, tokens_per_block=32, dtype=dtype)
    q = queries(sum(query_lens), 9, 64, dtype)
    out = run(case, q, query_lens, context_lens, window=window, soft_cap=soft_cap)
    expected = attention_reference(case, q, query_lens, context_lens, 0.125, window, soft_cap)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("window", [1, 37, 300])
def test_nothing_left_of_the_windows_is_read(make_pages, leave_windows, window, head_dim):
    """One query and a few (decode), many (prefill), a chunk longer than the window, keys split over tasks."""
    query_lens, context_lens = [1, 3, 70, 17, 33, 1], [700, 130, 130, 400, 1100, 1100]
    case = make_pages(context_lens, kv_heads=3, head_dim=head_dim, tokens_per_block=8, dtype=torch.float32)
    q = queries(sum(query_lens), 9, head_dim)
    expected = run(case, q, query_lens, context_lens, window=window)
    holes = leave_windows(case, query_lens, context_lens, window)
    assert (holes.block_tables == -1).any()
    assert torch.equal(run(holes, q, query_lens, context_lens, window=window), expected)


@pytest.mark.parametrize("head_dim", [16, 20, 32, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (5, 1), (16, 2)])
def test_head_shapes(make_pages, attention_reference, head_dim, heads, kv_heads):
    query_lens, context_lens = [1, 29, 3], [75, 29, 80]
    case = make_pages(context_lens, kv_heads=kv_heads, head_dim=head_dim, tokens_per_block=16, dtype=torch.float32)
    q = queries(33, heads, head_dim)
    out = run(case, q, query_lens, context_lens)
    expected = attention_reference(case, q, query_lens, context_lens, head_dim**-0.5, 0, 0.0)
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("tokens_per_block", [1, 5, 8, 64, 128])
def test_block_sizes(make_pages, attention_reference, tokens_per_block):
    query_lens, context_lens = [1, 40], [131, 90]
    case = make_pages(context_lens, kv_heads=2, head_dim=32, tokens_per_block=tokens_per_block, dtype=torch.float32)
    q = queries(41, 4, 32)
    out = run(case, q, query_lens, context_lens)
    expected = attention_reference(case, q, query_lens, context_lens, 32**-0.5, 0, 0.0)
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_float32_queries_over_narrower_pages(make_pages, attention_reference, kv_dtype):
    query_lens, context_lens = [1, 40], [131, 90]
    case = make_pages(context_lens, kv_heads=2, head_dim=64, tokens_per_block=32, dtype=kv_dtype)
    q = queries(41, 6, 64)
    out = run(case, q, query_lens, context_lens)
    expected = attention_reference(case, q, query_lens, context_lens, 0.125, 0, 0.0)
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=3e-6)


def test_large_scores_do_not_overflow(make_pages, attention_reference):
    case = make_pages([200, 60], kv_heads=1, head_dim=32, tokens_per_block=16, dtype=torch.float32)
    q = queries(61, 3, 32) * 300
    out = run(case, q, [1, 60], [200, 60])
    expected = attention_reference(case, q, [1, 60], [200, 60], 32**-0.5, 0, 0.0)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)


def test_result_does_not_depend_on_the_batch_or_threads(make_pages):
    query_lens, context_lens = MIXED
    case = make_pages(context_lens, kv_heads=3, head_dim=64, tokens_per_block=32, dtype=torch.float32)
    q = queries(sum(query_lens), 9, 64)
    together = run(case, q, query_lens, context_lens)
    ops.set_num_threads(1)
    assert torch.equal(together, run(case, q, query_lens, context_lens))
    start = 0
    for row, count in enumerate(query_lens):
        alone = torch.empty(count, 9, 64)
        ops.paged_attention(
            alone,
            q[start : start + count],
            case.kv,
            case.block_tables[row : row + 1],
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor(context_lens[row : row + 1], dtype=torch.int32),
            0.125,
        )
        assert torch.equal(alone, together[start : start + count])
        start += count


def test_chunked_prefill_equals_whole_prefill(make_pages):
    case = make_pages([300], kv_heads=3, head_dim=64, tokens_per_block=32, dtype=torch.float32)
    q = queries(300, 9, 64)
    whole = run(case, q, [300], [300])
    chunks = [run(case, q[a:b], [b - a], [b]) for a, b in ((0, 101), (101, 200), (200, 300))]
    assert torch.equal(whole, torch.cat(chunks))


def test_queries_may_be_slices_of_a_fused_projection(make_pages):
    case = make_pages([50], kv_heads=3, head_dim=64, tokens_per_block=32, dtype=torch.float32)
    fused = torch.randn(50, (9 + 3 + 3) * 64)
    q = fused[:, : 9 * 64].view(50, 9, 64)
    assert torch.equal(run(case, q, [50], [50], out=torch.empty(50, 9, 64)), run(case, q.contiguous(), [50], [50]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 2, 16)}, "do not fit"),
        ({"q": torch.zeros(4, 2, 32, dtype=torch.float64)}, "dtype"),
        ({"q": torch.zeros(4, 32, 2).transpose(1, 2)}, "contiguous"),
        ({"lens": torch.tensor([4])}, "int32"),
        ({"lens": torch.tensor([3], dtype=torch.int32)}, "shapes"),
        ({"q": torch.zeros(4, 3, 32)}, "shapes"),
    ],
)
def test_wrong_arguments_are_refused(make_pages, change, message):
    case = make_pages([4], kv_heads=2, head_dim=32, tokens_per_block=4, dtype=torch.float32)
    q = change.get("q", torch.zeros(4, 2, 32))
    lens = change.get("lens", torch.tensor([4], dtype=torch.int32))
    starts = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ops.KernelError, match=message):
        ops.paged_attention(torch.empty(q.shape, dtype=q.dtype), q, case.kv, case.block_tables, starts, lens, 1.0)
