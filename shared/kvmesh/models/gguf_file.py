"""The GGUF container: metadata and tensor table of a file, tensor bytes mapped and never copied.

Only the container is read here, because every service does so at start and ``gguf.GGUFReader`` builds one numpy
array per list element (seconds for a vocabulary of 49 k tokens, against 30 ms here). What the tensor bytes mean is
left to ``gguf.quants``.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvmesh.models.errors import ModelError

__all__ = ["GgufFile", "GgufTensor"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GgufTensor(NamedTuple):
    """Where a tensor lies: ``shape`` is row-major, ``offset`` absolute, ``type`` GGML's number."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


class GgufFile:
    """A mapped GGUF file (versions 2 and 3, little-endian).

    Attributes:
        path: the file.
        metadata: key to ``int``, ``float``, ``bool``, ``str``, ``list[str]`` or a one-dimensional numpy array.
        tensors: name to :class:`GgufTensor`, in file order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"Cannot read the model file {path}: {error}.") from error
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, ValueError, KeyError, ArithmeticError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again.") from error

    def bytes_of(self, tensor: GgufTensor, nbytes: int) -> np.ndarray:
        """The tensor's ``nbytes`` bytes as a read-only uint8 view of the mapping; valid while this object lives."""
        if tensor.offset + nbytes > len(self._map):
            raise ModelError(f"{self.path} ends inside tensor {tensor.name}; fetch it again.")
        return np.frombuffer(self._map, np.uint8, nbytes, tensor.offset)

    def _parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._map[:4] != _MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file.")
        version = _U32.unpack_from(self._map, 4)[0]
        if version not in _VERSIONS:
            raise ModelError(
                f"{self.path} is GGUF version {version}; versions {_VERSIONS} (little-endian) are supported."
            )
        num_tensors, num_keys = _U64.unpack_from(self._map, 8)[0], _U64.unpack_from(self._map, 16)[0]
        position = 24
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key, position = self._string(position)
            metadata[key], position = self._value(_U32.unpack_from(self._map, position)[0], position + 4)
        return metadata, self._tensor_table(num_tensors, position, metadata)

    def _tensor_table(self, count: int, position: int, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name, position = self._string(position)
            num_dims = _U32.unpack_from(self._map, position)[0]
            if num_dims > _MAX_DIMENSIONS:
                raise ModelError(f"{self.path} is damaged: tensor {name!r} claims {num_dims} dimensions.")
            dims = struct.unpack_from(f"<{num_dims}Q", self._map, position + 4)
            position += 4 + 8 * num_dims
            kind, offset = struct.unpack_from("<IQ", self._map, position)
            position += 12
            found.append((name, dims[::-1], kind, offset))  # GGML counts dimensions from the innermost
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-position // alignment) * alignment
        return {name: GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in found}

    def _string(self, position: int) -> tuple[str, int]:
        end = position + 8 + _U64.unpack_from(self._map, position)[0]
        if end > len(self._map):
            raise ModelError(f"{self.path} is cut short; fetch it again.")
        return self._map[position + 8 : end].decode(errors="replace"), end

    def _value(self, kind: int, position: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(position)
        if kind == _ARRAY:
            return self._array(position)
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._map, dtype, 1, position)[0].item(), position + dtype.itemsize

    def _array(self, position: int) -> tuple[Any, int]:
        kind, count = struct.unpack_from("<IQ", self._map, position)
        position += 12
        if kind == _STRING:
            return self._strings(count, position)
        if kind == _ARRAY:
            raise ModelError(f"{self.path} has nested arrays in its metadata, which no known model uses.")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._map, dtype, count, position).copy(), position + count * dtype.itemsize

    def _strings(self, count: int, position: int) -> tuple[list[str], int]:
        # Vocabularies have 10^5 entries: this loop is the start-up time of the tokenizer, so it is flat.
        data, length_at = self._map, _U64.unpack_from
        values: list[str] = []
        for _ in range(count):
            end = position + 8 + length_at(data, position)[0]
            values.append(data[position + 8 : end].decode(errors="replace"))
            position = end
        if position > len(data):
            raise ModelError(f"{self.path} is cut short; fetch it again.")
        return values, position
