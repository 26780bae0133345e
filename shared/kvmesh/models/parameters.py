"""A model's parameters: assembled from checkpoint tensors, placed on the device, and shared between processes.

On the CPU in float32 the assembled parameters of a quantised or 16-bit checkpoint are written once to a file in the
model cache and mapped from there, so several engine processes share one copy in the page cache and only the first
start pays for dequantising.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from kvmesh.kernels.ops import QuantizedWeight
from kvmesh.models.errors import ModelError
from kvmesh.models.files import exclusive
from kvmesh.models.linear import Linear
from kvmesh.models.sharding import Cut, spans_of_parts
from kvmesh.models.weights import Checkpoint, SafetensorsCheckpoint

__all__ = [
    "ModelWeights",
    "ParameterSpec",
    "check_parameters",
    "cut_parameters",
    "load_cuts",
    "load_parameters",
    "shared_parameters",
]

_log = structlog.get_logger(__name__)
_SHARED_VERSION = b"1"  # raised when the meaning of the shared file changes
_SHARE_TIMEOUT_S = 600.0  # dequantising and writing a model of a few billion parameters
_SHARED_NAME = "model.safetensors"
_DISK_MARGIN_BYTES = 1 << 30  # never fill a disk to the brim for a copy that is only a convenience
_NAMES_IN_ERROR = 3


class ParameterSpec(NamedTuple):
    """One parameter as the model uses it: checkpoint tensors, concatenated along their rows."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """Hugging Face names."""
    is_linear: bool = False
    """A matrix that multiplies activations, so its quantised blocks are of use."""


class ModelWeights(NamedTuple):
    """What an architecture is created from."""

    dense: Mapping[str, Tensor]
    """Every parameter by name, on the device in the model's dtype. Never written to."""
    quantized: Mapping[str, QuantizedWeight]
    """Linear parameters that also exist in quantised blocks."""

    def linear(self, name: str) -> Linear:
        """The linear layer ``<name>.weight`` with ``<name>.bias`` where there is one."""
        weight = f"{name}.weight"
        return Linear(self.dense[weight], self.dense.get(f"{name}.bias"), self.quantized.get(weight))


def check_parameters(checkpoint: Checkpoint, specs: Sequence[ParameterSpec], ignored: re.Pattern[str]) -> None:
    """Refuse a checkpoint that does not hold exactly the expected tensors.

    Raises:
        ModelError: tensors are missing, unexpected or of another shape; the message names the first few.
    """
    have, want = set(checkpoint.names()), {part for spec in specs for part in spec.parts}
    if missing := sorted(want - have):
        raise ModelError(f"{checkpoint.path} lacks {_listing(missing)}.")
    if unexpected := sorted(name for name in have - want if not ignored.fullmatch(name)):
        raise ModelError(f"{checkpoint.path} has tensors that its architecture does not: {_listing(unexpected)}.")
    for spec in specs:
        shapes = [checkpoint.shape(part) for part in spec.parts]
        if (sum(shape[0] for shape in shapes), *shapes[0][1:]) != spec.shape or any(
            shape[1:] != spec.shape[1:] for shape in shapes
        ):
            raise ModelError(
                f"{checkpoint.path}: {' + '.join(spec.parts)} has shape {' + '.join(map(str, shapes))}, but the "
                f"configuration implies {spec.shape}."
            )


def load_parameters(
    checkpoint: Checkpoint, specs: Sequence[ParameterSpec], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every parameter in ``dtype`` on ``device``, in this process's own memory where a copy is needed."""
    return {spec.name: _assemble(checkpoint, spec).to(device, dtype) for spec in specs}


def load_cuts(
    checkpoint: Checkpoint,
    specs: Sequence[ParameterSpec],
    cuts: Mapping[str, Cut],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """A rank's part of every parameter that it has; what belongs to others is not read."""
    whole = {spec.name: spec for spec in specs}
    return {name: _assemble_cut(checkpoint, whole[cut.source], cut).to(device, dtype) for name, cut in cuts.items()}


def cut_parameters(parameters: Mapping[str, Tensor], cuts: Mapping[str, Cut]) -> dict[str, Tensor]:
    """A rank's part of every parameter that it has, out of whole ones: views where they are one run of rows."""
    found: dict[str, Tensor] = {}
    for name, cut in cuts.items():
        tensor = parameters[cut.source]
        if cut.columns is not None:
            tensor = tensor[:, cut.columns.start : cut.columns.stop]
        pieces = [tensor[span.start : span.stop] for span in cut.rows] or [tensor]
        found[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if cut.columns is not None:
            found[name] = found[name].contiguous()
    return found


def shared_parameters(
    checkpoint: Checkpoint, specs: Sequence[ParameterSpec], directory: Path, name: str, fingerprint: str
) -> dict[str, Tensor]:
    """Every parameter in float32 on the CPU, mapped from a file that all processes share.

    The file is made at first use, by one process. Where it cannot be made (a full disk, a read-only cache), the
    parameters are this process's own, and a warning says so.

    Args:
        checkpoint: where the parameters come from.
        specs: the parameters.
        directory: where shared files live.
        name: the model's name, the readable part of the file's name.
        fingerprint: identifies the checkpoint's content.
    """
    key = hashlib.sha256(_SHARED_VERSION + fingerprint.encode() + repr(tuple(specs)).encode()).hexdigest()[:16]
    home = directory / f"{name}-{key}"
    try:
        if not (home / _SHARED_NAME).is_file():  # a finished file needs no lock: it appears whole
            with exclusive(home / ".lock", _SHARE_TIMEOUT_S, f"preparing {name}"):
                if not (home / _SHARED_NAME).is_file():
                    _write_float32(home / _SHARED_NAME, specs, (_assemble(checkpoint, spec) for spec in specs))
    except ModelError as error:
        _log.warning("weights_not_shared", model=name, reason=str(error))
        return load_parameters(checkpoint, specs, torch.device("cpu"), torch.float32)
    shared = SafetensorsCheckpoint(home)
    return {spec.name: shared.tensor(spec.name) for spec in specs}


def _assemble(checkpoint: Checkpoint, spec: ParameterSpec) -> Tensor:
    parts = [checkpoint.tensor(part) for part in spec.parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _assemble_cut(checkpoint: Checkpoint, spec: ParameterSpec, cut: Cut) -> Tensor:
    if not cut.rows and cut.columns is None:
        return _assemble(checkpoint, spec)
    spans = spans_of_parts(cut.rows, [checkpoint.shape(part)[0] for part in spec.parts])
    pieces = [checkpoint.piece(spec.parts[part], span, cut.columns) for part, span in spans]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _write_float32(target: Path, specs: Sequence[ParameterSpec], tensors: Iterator[Tensor]) -> None:
    """Write a safetensors file one tensor at a time, so that memory never holds the whole model."""
    header: dict[str, object] = {}
    position = 0
    for spec in specs:
        end = position + 4 * int(np.prod(spec.shape))
        header[spec.name] = {"dtype": "F32", "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    if (free_bytes := shutil.disk_usage(target.parent).free) < position + _DISK_MARGIN_BYTES:
        raise ModelError(
            f"{target.parent} has {free_bytes} bytes left on its disk; {position} and a margin are needed."
        )
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)  # the data starts on a cache line
    scratch = target.with_suffix(".partial")
    try:
        with scratch.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors:
                file.write(tensor.to(torch.float32).contiguous().numpy().data)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the data does
        scratch.replace(target)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ModelError(f"Cannot write {target}: {error}.") from error


def _listing(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_IN_ERROR
    return ", ".join(names[:_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")
