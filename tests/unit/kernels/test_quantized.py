"""Quantised products against the dequantised weight."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kvmesh.kernels import ops

pytestmark = pytest.mark.usefixtures("cpu_level")

FORMATS = {
    ops.QuantKind.Q4_1: gguf.GGMLQuantizationType.Q4_1,
    ops.QuantKind.Q8_0: gguf.GGMLQuantizationType.Q8_0,
}


def make(kind, rows, columns):
    values = np.random.default_rng(rows).standard_normal((rows, columns), dtype=np.float32)
    blocks = gguf.quants.quantize(values, FORMATS[kind])
    dense = gguf.quants.dequantize(blocks, FORMATS[kind])
    return ops.QuantizedWeight.from_blocks(kind, blocks, rows, columns), torch.from_numpy(dense)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (5, 64), (100, 576), (1536, 96)])
def test_dequantize_gives_the_values_of_gguf(kind, rows, columns):
    weight, dense = make(kind, rows, columns)
    assert torch.equal(ops.dequantize(weight), dense)
    ids = torch.tensor([rows - 1, 0, rows // 2, 0])
    out = torch.empty(4, columns)
    ops.dequantize_rows(out, weight, ids)
    assert torch.equal(out, dense[ids])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 8, 9, 33])
@pytest.mark.parametrize(("rows", "columns"), [(5, 64), (576, 576), (1000, 1536)])
def test_product_is_exact_in_float32(kind, tokens, rows, columns):
    weight, dense = make(kind, rows, columns)
    x = torch.randn(tokens, columns + 8)[:, :columns]
    out = torch.full((tokens, rows + 4), 7.0)
    ops.quantized_linear(out[:, :rows], x, weight)
    expected = x.double() @ dense.double().T
    # Relative to the size of the terms: a sum that cancels to near zero has no meaningful relative error of its own.
    bound = 1e-6 * (x.double().abs() @ dense.double().abs().T)
    assert ((out[:, :rows] - expected).abs() <= bound).all()
    relative = (out[:, :rows] - expected).norm() / expected.norm()
    assert relative < 1e-6
    assert (out[:, rows:] == 7.0).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_token_does_not_feel_its_batch_or_the_threads(kind):
    weight, _ = make(kind, 576, 576)
    x = torch.randn(19, 576)
    together = torch.empty(19, 576)
    ops.quantized_linear(together, x, weight)
    ops.set_num_threads(1)
    for row in range(19):
        alone = torch.empty(1, 576)
        ops.quantized_linear(alone, x[row : row + 1], weight)
        assert torch.equal(alone[0], together[row])


def test_wrong_arguments_are_refused():
    weight, _ = make(ops.QuantKind.Q4_1, 16, 64)
    with pytest.raises(ops.KernelError, match="uint8"):
        ops.QuantizedWeight.from_blocks(ops.QuantKind.Q4_1, np.zeros(7, np.uint8), 16, 64)
    with pytest.raises(ops.KernelError, match="float32"):
        ops.quantized_linear(torch.empty(1, 16), torch.zeros(1, 32), weight)
    with pytest.raises(ops.KernelError, match="float32"):
        ops.quantized_linear(torch.empty(1, 16).half(), torch.zeros(1, 64).half(), weight)
    with pytest.raises(ops.KernelError, match="shapes"):
        ops.dequantize_rows(torch.empty(1, 64), weight, torch.tensor([16]))
