"""A linear layer over dense weights that streams 4-bit or 8-bit blocks instead when few rows make it memory-bound."""

from __future__ import annotations

import torch
from torch import Tensor

from kvmesh.kernels import ops

__all__ = ["Linear"]


class Linear:
    """``out = x @ weight.T + bias``.

    A decode step reads every weight once for a handful of rows, so its time is the bytes of the weights: quantised
    blocks are up to 6 times fewer. A prefill chunk is bound by arithmetic: there the dense matrix is faster. Both
    compute in the same floating-point format over the same dequantised values.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]`` or None.
        quantized: the same matrix in quantised blocks, or None.
    """

    __slots__ = ("_bias", "_max_rows", "_quantized", "_weight_t")

    def __init__(self, weight: Tensor, bias: Tensor | None, quantized: ops.QuantizedWeight | None) -> None:
        self._weight_t = weight.t()
        self._bias = bias
        self._quantized = quantized
        self._max_rows = 0 if quantized is None else ops.quantized_linear_max_tokens()

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self._weight_t.shape[1]

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Compute into ``out [T, out]`` from ``x [T, in]`` and return it."""
        if self._quantized is not None and x.shape[0] <= self._max_rows:
            ops.quantized_linear(out, x, self._quantized)
            if self._bias is not None:
                out.add_(self._bias)
        elif self._bias is None:
            torch.mm(x, self._weight_t, out=out)
        else:
            torch.addmm(self._bias, x, self._weight_t, out=out)
        return out
