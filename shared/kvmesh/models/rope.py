"""Cosine and sine tables of the rotary position embedding, for every supported frequency scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvmesh.models.config import RopeConfig

__all__ = ["cos_sin_tables", "inverse_frequencies"]


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Angle per position of each rotated pair: float32 ``[rotary_dim / 2]``."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "divisors":
        return frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return _llama3(frequencies, rope) if rope.kind == "llama3" else frequencies


def cos_sin_tables(rope: RopeConfig, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tables indexed by position: two float32 ``[num_positions, rotary_dim / 2]`` on ``device``."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope))
    return angles.cos().to(device), angles.sin().to(device)


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: slow the long waves down by ``factor``, keep the short ones, blend between."""
    rotations = rope.original_max_seq_len * frequencies / (2 * math.pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
