"""Reusable buffers of a forward pass, grown to the largest step seen."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Scratch"]

_ROW_GRANULE = 16


class Scratch:
    """Named two-dimensional buffers on one device; a buffer's content lasts until its name is asked for again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """A contiguous uninitialised ``[rows, width]``."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < rows:
            capacity = -(-rows // _ROW_GRANULE) * _ROW_GRANULE
            buffer = self._buffers[name] = torch.empty((capacity, width), dtype=dtype, device=self._device)
        return buffer[:rows]
