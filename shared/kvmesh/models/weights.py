"""Tensors of a checkpoint by their Hugging Face name, whatever its format; files are mapped, not read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gguf
import numpy as np
import safetensors
import torch
from torch import Tensor

from kvmesh.models.checkpoint import open_gguf, read_json
from kvmesh.models.errors import ModelError
from kvmesh.models.gguf_file import GgufFile, GgufTensor
from kvmesh.models.sharding import Span

__all__ = ["Blocks", "Checkpoint", "GgufCheckpoint", "GgufName", "SafetensorsCheckpoint"]

_INDEX_NAME = "model.safetensors.index.json"


class Blocks(NamedTuple):
    """A matrix in GGML's quantised blocks."""

    kind: str
    """GGML's name of the block format, e.g. ``Q4_1``."""
    rows: np.ndarray
    """uint8 ``[rows, bytes per row]``."""


class Checkpoint(Protocol):
    """Named tensors on disk."""

    path: Path

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU in the checkpoint's dtype (float32 if it is quantised). Never write to it."""
        ...

    def piece(self, name: str, rows: Span, columns: Span | None) -> Tensor:
        """Some rows of the tensor, and of a matrix some columns, as :meth:`tensor` gives them; the rest is not read."""
        ...

    def blocks(self, name: str) -> Blocks | None:
        """The quantised blocks of a matrix, None where the checkpoint holds plain numbers."""
        ...


class SafetensorsCheckpoint:
    """A Hugging Face directory: ``model.safetensors``, or shards with ``model.safetensors.index.json``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[Path, Any] = {}
        self._shard_of: dict[str, Path] = {}
        if (path / _INDEX_NAME).is_file():
            weight_map = read_json(path / _INDEX_NAME).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelError(f"{path / _INDEX_NAME} has no weight_map.")
            listed = {name: path / str(file) for name, file in weight_map.items()}
            held = {shard: frozenset(self._open(shard).keys()) for shard in set(listed.values())}
            if absent := sorted(name for name, shard in listed.items() if name not in held[shard]):
                raise ModelError(f"The shards in {path} lack {absent[0]}, which their index lists.")
            self._shard_of = listed
        else:
            shards = sorted(path.glob("*.safetensors"))
            if not shards:
                raise ModelError(f"{path} has no *.safetensors file; other weight formats are not read.")
            self._shard_of = {name: shard for shard in shards for name in self._open(shard).keys()}  # noqa: SIM118

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        return self._shard_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return tuple(self._open(self._shard_of[name]).get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """The tensor, a view of the mapped file."""
        tensor: Tensor = self._open(self._shard_of[name]).get_tensor(name)
        return tensor

    def piece(self, name: str, rows: Span, columns: Span | None) -> Tensor:
        """See :class:`Checkpoint`."""
        view = self._open(self._shard_of[name]).get_slice(name)
        piece: Tensor = (
            view[rows.start : rows.stop]
            if columns is None
            else view[rows.start : rows.stop, columns.start : columns.stop]
        )
        return piece

    def blocks(self, name: str) -> Blocks | None:  # noqa: ARG002 (the protocol's signature)
        """None: quantised safetensors are refused when the configuration is read."""
        return None

    def _open(self, shard: Path) -> Any:
        file = self._files.get(shard)
        if file is None:
            try:
                file = safetensors.safe_open(str(shard), framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise ModelError(f"Cannot read the weights in {shard}: {error}.") from error
            self._files[shard] = file
        return file


class GgufName(NamedTuple):
    """A tensor's name in GGUF, and how its rows are ordered there."""

    name: str
    rope_heads: int | None = None
    """Rows are permuted for interleaved rotary embedding, in this many heads; None: rows are in order."""
    offset: float = 0.0
    """What GGUF's conversion has added to every value, in float32."""


class GgufCheckpoint:
    """A GGUF file seen through Hugging Face names.

    Args:
        path: the file.
        renaming: Hugging Face name to GGUF name; GGUF tensors outside it keep their own names.
    """

    def __init__(self, path: Path, renaming: Mapping[str, GgufName]) -> None:
        self.path = path
        self._file: GgufFile = open_gguf(path)
        known = {name: entry for name, entry in renaming.items() if entry.name in self._file.tensors}
        used = {entry.name for entry in known.values()}
        self._entries = known | {name: GgufName(name) for name in self._file.tensors if name not in used}

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return self._file.tensors[self._entries[name].name].shape

    def tensor(self, name: str) -> Tensor:
        """The tensor, dequantised to float32, with its rows in Hugging Face's order and its values as there."""
        tensor = self._file.tensors[self._entries[name].name]
        values = self._values(name, self._rows(tensor))
        return torch.from_numpy(self._reorder(name, values).reshape(tensor.shape))

    def piece(self, name: str, rows: Span, columns: Span | None) -> Tensor:
        """See :class:`Checkpoint`. Columns are cut at blocks, so that only those are dequantised that have some."""
        tensor = self._file.tensors[self._entries[name].name]
        if len(tensor.shape) == 1:
            return self.tensor(name)[rows.start : rows.stop]
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[_quant_type(tensor, self.path)]
        raw = self._reorder(name, self._rows(tensor))[rows.start : rows.stop]
        start, stop = columns or Span(0, tensor.shape[-1])
        first, last = start // block_size, -(-stop // block_size)
        values = self._values(name, np.ascontiguousarray(raw[:, first * block_bytes : last * block_bytes]))
        values = values.reshape(rows.length, -1)
        return torch.from_numpy(values[:, start - first * block_size : stop - first * block_size])

    def blocks(self, name: str) -> Blocks | None:
        """The raw rows in Hugging Face's order: a permutation of rows leaves the blocks inside them alone."""
        tensor = self._file.tensors[self._entries[name].name]
        kind = _quant_type(tensor, self.path)
        if len(tensor.shape) != 2 or kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            return None
        return Blocks(kind.name, self._reorder(name, self._rows(tensor)))

    def _values(self, name: str, raw: np.ndarray) -> np.ndarray:
        entry = self._entries[name]
        values = _dequantize(raw, _quant_type(self._file.tensors[entry.name], self.path))
        if entry.offset:
            values -= entry.offset  # its own memory: dequantising copies
        return values

    def _rows(self, tensor: GgufTensor) -> np.ndarray:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[_quant_type(tensor, self.path)]
        rows, columns = tensor.num_elements // tensor.shape[-1], tensor.shape[-1]
        if columns % block_size:
            raise ModelError(f"{self.path} is damaged: a row of {tensor.name} is no whole number of blocks.")
        row_bytes = columns // block_size * block_bytes
        return self._file.bytes_of(tensor, rows * row_bytes).reshape(rows, row_bytes)

    def _reorder(self, name: str, rows: np.ndarray) -> np.ndarray:
        heads = self._entries[name].rope_heads
        if heads is None:
            return rows
        # GGUF pairs neighbouring rows for rotation; Hugging Face pairs row i with row i + head_dim / 2. A bias comes
        # here as one row.
        flat = rows.reshape(-1) if rows.shape[0] == 1 else rows
        order = np.arange(flat.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return np.ascontiguousarray(flat[order]).reshape(rows.shape)


def _quant_type(tensor: GgufTensor, path: Path) -> gguf.GGMLQuantizationType:
    try:
        return gguf.GGMLQuantizationType(tensor.type)
    except ValueError:
        raise ModelError(f"{path} stores {tensor.name} in the unknown GGML type {tensor.type}.") from None


def _dequantize(rows: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    plain: dict[gguf.GGMLQuantizationType, str] = {
        gguf.GGMLQuantizationType.F32: "<f4",
        gguf.GGMLQuantizationType.F16: "<f2",
    }
    if kind in plain:
        return rows.view(plain[kind]).astype(np.float32)
    try:
        values: np.ndarray = gguf.quants.dequantize(rows, kind)
    except NotImplementedError as error:
        raise ModelError(f"Weights in GGML's {kind.name} format are not supported.") from error
    return values
