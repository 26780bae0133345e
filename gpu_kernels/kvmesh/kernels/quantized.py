"""Products with 4-bit and 8-bit GGUF weights that stay quantised in memory.

A decode step is bound by reading the weights, so reading 4.5 or 8.5 bits instead of 32 is what makes it fast. The
weights are widened to float32 in registers and multiplied with unrounded float32 activations: the result is that of
the dequantised weights, up to the order of additions.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvmesh.kernels.library import KernelError, check, load_cpu

__all__ = [
    "QuantKind",
    "QuantizedWeight",
    "dequantize",
    "dequantize_rows",
    "quantized_linear",
]

BLOCK_COLUMNS: Final = 32

# Up to this many tokens reading the blocks wins over a float32 matrix product of dequantised weights; beyond,
# arithmetic is the limit. By level, measured by benchmarks/kernels.py on matrices of 576 to 3072 rows.
_MAX_TOKENS: Final = {b"avx512": 64, b"avx2": 16, b"baseline": 8}


class QuantKind(IntEnum):
    """GGUF block formats, each for 32 weights of one row."""

    Q4_1 = 0  # fp16 scale, fp16 minimum, 16 bytes of nibbles: 20 bytes
    Q8_0 = 1  # fp16 scale, 32 int8: 34 bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one GGUF block."""
        return 20 if self is QuantKind.Q4_1 else 34


_cpu = load_cpu()
_packed_bytes = _cpu.function("packed_bytes", ctypes.c_int64, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)
_cpu_level = _cpu.function("level", ctypes.c_char_p)
_pack_weight = _cpu.kernel("pack_weight")
_quantized_linear = _cpu.kernel("quantized_linear")
_dequantize_rows = _cpu.kernel("dequantize_rows")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A `[rows, columns]` weight in panels of 16 rows (csrc/core/quant_panels.h); values are GGUF's, bit for bit."""

    kind: QuantKind
    rows: int
    columns: int
    panels: Tensor  # uint8

    @classmethod
    def from_blocks(cls, kind: QuantKind, blocks: npt.NDArray[np.uint8], rows: int, columns: int) -> QuantizedWeight:
        """Pack GGUF blocks, row after row as a GGUF file has them.

        Matrices that share their input can be concatenated by rows first, to be multiplied in one call.

        Args:
            kind: The block format.
            blocks: uint8, `rows * columns / 32` blocks.
            rows: Outputs of the layer.
            columns: Inputs; a multiple of 32.

        Raises:
            KernelError: The number of bytes does not fit the shape.
        """
        expected = rows * (columns // BLOCK_COLUMNS) * kind.block_bytes
        if columns % BLOCK_COLUMNS != 0 or blocks.dtype != np.uint8 or blocks.size != expected:
            msg = f"{kind.name} [{rows}, {columns}] needs {expected} uint8, got {blocks.size} {blocks.dtype}"
            raise KernelError(msg)
        panels = torch.empty(_packed_bytes(kind, rows, columns), dtype=torch.uint8)
        blocks = np.ascontiguousarray(blocks)
        check(_pack_weight(panels.data_ptr(), blocks.ctypes.data, kind, rows, columns), "pack_weight")
        return cls(kind, rows, columns, panels)

    @property
    def nbytes(self) -> int:
        """Bytes that one product reads."""
        return self.panels.numel()


def quantized_linear(out: Tensor, x: Tensor, w: QuantizedWeight) -> None:
    """Write `x @ dequantize(w).T` to `out`, in float32.

    A row of the result depends on that row of `x` alone, whatever else is in the batch.

    Args:
        out: float32 `[T, w.rows]`.
        x: float32 `[T, w.columns]`.
        w: The weight.

    Raises:
        KernelError: Another shape, dtype or device, or a row that is not contiguous.
    """
    tokens, columns = x.shape
    x_stride, out_stride = x.stride(), out.stride()
    if (
        columns != w.columns
        or out.shape != (tokens, w.rows)
        or x.dtype is not torch.float32
        or out.dtype is not torch.float32
        or x_stride[1] != 1
        or out_stride[1] != 1
        or x.is_cuda
    ):
        msg = (
            f"quantized_linear: out {tuple(out.shape)} and x {tuple(x.shape)} must be float32 [T, {w.rows}] and "
            f"[T, {w.columns}] with contiguous rows, on the CPU"
        )
        raise KernelError(msg)
    status = _quantized_linear(
        out.data_ptr(), out_stride[0], x.data_ptr(), x_stride[0], w.panels.data_ptr(), w.kind, tokens, w.rows, columns
    )
    if status:
        check(status, "quantized_linear")


def quantized_linear_max_tokens() -> int:
    """Return the tokens up to which `quantized_linear` beats a float32 product of dequantised weights."""
    return _MAX_TOKENS[_cpu_level()]


def dequantize(w: QuantizedWeight) -> Tensor:
    """Return the weight as float32 `[rows, columns]`: exactly the values of the GGUF blocks."""
    out = torch.empty(w.rows, w.columns)
    status = _dequantize_rows(out.data_ptr(), w.columns, w.panels.data_ptr(), w.kind, None, w.rows, w.rows, w.columns)
    check(status, "dequantize")
    return out


def dequantize_rows(out: Tensor, w: QuantizedWeight, row_ids: Tensor) -> None:
    """Write some rows of the weight to `out`: an embedding lookup that needs no float32 table.

    Args:
        out: float32 `[n, w.columns]`, rows contiguous.
        w: The weight.
        row_ids: int64 `[n]`, contiguous.

    Raises:
        KernelError: Another shape or dtype, or a row id outside the weight.
    """
    stride = out.stride()
    if (
        out.shape != (len(row_ids), w.columns)
        or out.dtype is not torch.float32
        or stride[1] != 1
        or row_ids.dtype is not torch.int64
        or not row_ids.is_contiguous()
    ):
        msg = f"dequantize_rows: out must be float32 [n, {w.columns}] with contiguous rows, row_ids int64 [n]"
        raise KernelError(msg)
    status = _dequantize_rows(
        out.data_ptr(), stride[0], w.panels.data_ptr(), w.kind, row_ids.data_ptr(), len(row_ids), w.rows, w.columns
    )
    check(status, "dequantize_rows")
