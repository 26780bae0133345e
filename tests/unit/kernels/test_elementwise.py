"""Norms, gate, rotary and page stores against torch."""

from __future__ import annotations

import pytest
import torch

from kvmesh.kernels import ops

pytestmark = pytest.mark.usefixtures("cpu_level")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(actual, expected, dtype):
    torch.testing.assert_close(actual.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def norm(x, weight, eps, weight_offset=0.0):
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight.double() + weight_offset)


@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (3, 64), (5, 37), (200, 576), (0, 16)])
def test_rms_norm(dtype, tokens, width, weight_offset):
    x, weight = torch.randn(tokens, width).to(dtype), torch.randn(width).to(dtype)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-5, weight_offset)
    close(out, norm(x, weight, 1e-5, weight_offset), dtype)
    ops.rms_norm(x, x, weight, 1e-5, weight_offset)
    assert torch.equal(x, out)


def test_a_weight_offset_is_added_in_float32():
    """A 16-bit difference from 1 keeps its bits: 1 + 2^-10 does not exist in bfloat16."""
    x, weight = torch.ones(1, 64), torch.full((64,), 2.0**-10)
    ops.rms_norm(x, x.clone(), weight, 0.0, 1.0)
    assert torch.equal(x, torch.full((1, 64), 1 + 2.0**-10))
    narrow = torch.full((1, 64), 1024.0, dtype=torch.bfloat16)
    residual = torch.zeros_like(narrow)
    out = torch.empty_like(narrow)
    # 0.9961 * (1 + 2^-8) rounds to 1, 0.9961 * bfloat16(1 + 2^-8) to 0.9961.
    ops.add_rms_norm(out, residual, narrow, torch.full((64,), 2.0**-8, dtype=torch.bfloat16), 8192.0, 1.0)
    assert float(out[0, 0]) == 1.0


def test_rms_norm_of_heads_inside_a_fused_projection():
    fused, weight = torch.randn(6, 5 * 64), torch.randn(64)
    heads = fused[:, 64 : 4 * 64].view(6, 3, 64)
    out = torch.empty(6, 3, 64)
    ops.rms_norm(out, heads, weight, 1e-6)
    close(out, norm(heads, weight, 1e-6), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (4, 37), (150, 576)])
def test_add_rms_norm(dtype, tokens, width):
    x, residual = torch.randn(tokens, width).to(dtype), torch.randn(tokens, width).to(dtype)
    weight, out = torch.randn(width).to(dtype), torch.empty(tokens, width, dtype=dtype)
    total = (x.float() + residual.float()).to(dtype)
    ops.add_rms_norm(out, residual, x, weight, 1e-5)
    assert torch.equal(residual, total)
    close(out, norm(total, weight, 1e-5), dtype)
    ops.add_rms_norm(out, residual, torch.zeros_like(x), weight, 1e-5, 1.0)
    close(out, norm(total, weight, 1e-5, 1.0), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1536), (7, 21), (100, 1536)])
def test_gelu_tanh_and_mul(dtype, tokens, width):
    gate_up = (torch.randn(tokens, 2 * width) * 3).to(dtype)
    gate_up[0, 0] = -300.0
    gate_up[0, 1] = 300.0
    out = torch.empty(tokens, width, dtype=dtype)
    ops.gelu_tanh_and_mul(out, gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    close(out, torch.nn.functional.gelu(gate, approximate="tanh") * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1536), (7, 21), (100, 1536)])
def test_silu_and_mul(dtype, tokens, width):
    gate_up = (torch.randn(tokens, 2 * width) * 8).to(dtype)
    gate_up[0, 0] = -300.0
    gate_up[0, 1] = 300.0
    out = torch.empty(tokens, width, dtype=dtype)
    ops.silu_and_mul(out, gate_up)
    gate, up = gate_up.double().chunk(2, -1)
    close(out, torch.nn.functional.silu(gate) * up, dtype)


def rotate(x, cos, sin):
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :].float()
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 32), (40, 20), (16, 16)])
def test_rope_store_kv(make_pages, dtype, dim, rotary):
    lengths = [5, 11]
    case = make_pages(lengths, kv_heads=2, head_dim=dim, tokens_per_block=4, dtype=dtype)
    fused = torch.randn(17, 8 * dim).to(dtype)
    q, k, v = (part.view(17, -1, dim) for part in fused.split([4 * dim, 2 * dim, 2 * dim], -1))
    angles = torch.rand(100, rotary // 2) * 6
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    positions = torch.tensor([*range(5), *range(30, 41), 7], dtype=torch.int32)
    slots = [int(case.block_tables[s, t // 4]) * 4 + t % 4 for s, n in enumerate(lengths) for t in range(n)]
    expected_q, expected_k = (rotate(x, cos[positions.long()], sin[positions.long()]) for x in (q, k))
    ops.rope_store_kv(q, k, v, cos, sin, positions, case.kv, torch.tensor([*slots, -1]))
    close(q, expected_q, dtype)
    close(k, expected_k, dtype)
    for row, (start, count) in enumerate([(0, 5), (5, 11)]):
        assert torch.equal(case.dense("k", row, count).transpose(0, 1), k[start : start + count].float())
        assert torch.equal(case.dense("v", row, count).transpose(0, 1), v[start : start + count].float())


@pytest.mark.parametrize("kv_dtype", [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_converts_and_skips(make_pages, dtype, kv_dtype):
    case = make_pages([9], kv_heads=3, head_dim=40, tokens_per_block=8, dtype=kv_dtype)
    before = case.pool.clone()
    k, v = (torch.randn(9, 3, 40) * 50).to(dtype), torch.randn(9, 3, 40).to(dtype)
    ops.store_kv(k, v, case.kv, torch.full((9,), -1))
    assert torch.equal(case.pool, before)
    slots = [int(case.block_tables[0, t // 8]) * 8 + t % 8 for t in range(9)]
    ops.store_kv(k, v, case.kv, torch.tensor(slots))
    assert torch.equal(case.dense("k", 0, 9).transpose(0, 1), k.to(kv_dtype).float())
    assert torch.equal(case.dense("v", 0, 9).transpose(0, 1), v.to(kv_dtype).float())
    untouched = case.rows("k")[int(case.block_tables[0, 1]), :, 1:].contiguous().view(torch.uint8)
    assert (untouched == 0xFF).all()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pages_saturate(make_pages, kv_dtype):
    case = make_pages([1], kv_heads=1, head_dim=16, tokens_per_block=1, dtype=kv_dtype)
    k = torch.tensor([1e9, -1e9, 0.0, 1e-9] * 4).view(1, 1, 16)
    ops.store_kv(k, k, case.kv, torch.tensor([int(case.block_tables[0, 0])]))
    largest = torch.finfo(kv_dtype).max
    assert case.dense("k", 0, 1).flatten().tolist() == [largest, -largest, 0.0, 0.0] * 4


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_value_of_a_format_survives_a_store(make_pages, kv_dtype):
    codes = torch.arange(2 ** (8 * kv_dtype.itemsize))
    values = codes.to(torch.int16 if kv_dtype.itemsize == 2 else torch.uint8).view(kv_dtype).float()
    values = values[values.isfinite()]
    values = torch.cat([values, torch.zeros(-len(values) % 16)]).view(-1, 1, 16)
    case = make_pages([len(values)], kv_heads=1, head_dim=16, tokens_per_block=64, dtype=kv_dtype)
    slots = [int(case.block_tables[0, t // 64]) * 64 + t % 64 for t in range(len(values))]
    ops.store_kv(values, values, case.kv, torch.tensor(slots))
    assert torch.equal(case.dense("k", 0, len(values)).transpose(0, 1), values)


def test_wrong_arguments_are_refused(make_pages):
    case = make_pages([4], kv_heads=2, head_dim=32, tokens_per_block=4, dtype=torch.float32)
    k = torch.zeros(4, 2, 32)
    with pytest.raises(ops.KernelError, match="int64"):
        ops.store_kv(k, k, case.kv, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ops.KernelError, match="do not fit"):
        ops.store_kv(k[:, :1], k[:, :1], case.kv, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ops.KernelError, match="differ in dtype"):
        ops.store_kv(k, k.half(), case.kv, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ops.KernelError, match="shape"):
        ops.rms_norm(torch.empty(2, 4), torch.zeros(2, 5), torch.zeros(5), 1e-5)
    with pytest.raises(ops.KernelError, match="contiguous"):
        ops.rms_norm(torch.empty(2, 4), torch.zeros(2, 8)[:, ::2], torch.zeros(4), 1e-5)
