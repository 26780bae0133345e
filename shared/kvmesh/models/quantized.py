"""Quantised blocks of linear parameters, in the kernels' own arrangement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from kvmesh.kernels.quantized import BLOCK_COLUMNS, QuantizedWeight, QuantKind
from kvmesh.models.parameters import ParameterSpec
from kvmesh.models.sharding import Cut, spans_of_parts
from kvmesh.models.weights import Checkpoint

__all__ = ["quantized_parameters"]

_KINDS = {kind.name: kind for kind in QuantKind}


def quantized_parameters(
    checkpoint: Checkpoint, specs: Sequence[ParameterSpec], cuts: Mapping[str, Cut] | None = None
) -> dict[str, QuantizedWeight]:
    """Every linear parameter whose parts are all blocks of one format that the kernels know, by parameter name.

    Args:
        checkpoint: where the blocks come from.
        specs: the whole parameters.
        cuts: the parts of them that are wanted; None: all of each. Columns that begin or end inside a block leave a
            parameter out: it exists dequantised only.
    """
    found: dict[str, QuantizedWeight] = {}
    for name, spec, cut in _wanted(specs, cuts):
        parts = [part for part in map(checkpoint.blocks, spec.parts) if part is not None]
        kinds = {part.kind for part in parts}
        if len(parts) < len(spec.parts) or len(kinds) != 1 or (kind := _KINDS.get(kinds.pop())) is None:
            continue
        start, stop = cut.columns or (0, spec.shape[1])
        if start % BLOCK_COLUMNS or stop % BLOCK_COLUMNS:
            continue
        first, last = (column // BLOCK_COLUMNS * kind.block_bytes for column in (start, stop))
        spans = spans_of_parts(cut.rows, [len(part.rows) for part in parts])
        rows = np.concatenate([parts[part].rows[span.start : span.stop, first:last] for part, span in spans])
        found[name] = QuantizedWeight.from_blocks(kind, rows, len(rows), stop - start)
    return found


def _wanted(specs: Sequence[ParameterSpec], cuts: Mapping[str, Cut] | None) -> Iterator[tuple[str, ParameterSpec, Cut]]:
    linear = {spec.name: spec for spec in specs if spec.is_linear}
    if cuts is None:
        yield from ((name, spec, Cut(name)) for name, spec in linear.items())
        return
    for name, cut in cuts.items():
        # Ranks look tokens up in the embedding; where it is the output matrix as well, that is a cut of its own.
        if cut.source in linear and name != "embedding.weight":
            yield name, linear[cut.source], cut
