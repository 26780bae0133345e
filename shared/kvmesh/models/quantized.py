"""Quantised blocks of linear parameters, in the kernels' own arrangement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmesh.kernels.quantized import QuantizedWeight, QuantKind
from kvmesh.models.parameters import ParameterSpec
from kvmesh.models.weights import Checkpoint

__all__ = ["quantized_parameters"]

_KINDS = {kind.name: kind for kind in QuantKind}


def quantized_parameters(checkpoint: Checkpoint, specs: Sequence[ParameterSpec]) -> dict[str, QuantizedWeight]:
    """Every linear parameter whose parts are all blocks of one format that the kernels know, by parameter name."""
    found: dict[str, QuantizedWeight] = {}
    for spec in specs:
        parts = [checkpoint.blocks(part) for part in spec.parts] if spec.is_linear else []
        blocks = [part for part in parts if part is not None]
        kinds = {part.kind for part in blocks}
        if len(blocks) == len(spec.parts) and len(kinds) == 1 and (kind := _KINDS.get(kinds.pop())) is not None:
            rows = np.concatenate([part.rows for part in blocks])
            found[spec.name] = QuantizedWeight.from_blocks(kind, rows, *spec.shape)
    return found
