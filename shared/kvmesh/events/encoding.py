"""Event batches as msgpack, in either of the encodings that readers expect.

``map`` (vLLM since mid-2026, TensorRT-LLM): events are maps tagged ``type``. ``array`` (older vLLM, SGLang and llm-d):
events are positional arrays whose first element is the tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import msgspec
import numpy as np

from kvmesh.hashing import TokenIds
from kvmesh.kernels import _native
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KeyedBlocksStored, KvEvent

__all__ = ["END_SEQUENCE", "STATE_REQUEST", "EventEncoding", "PackedTokens", "encode_batch"]

END_SEQUENCE = 2**64 - 1
"""Closes a replay; never the number of a batch."""

STATE_REQUEST = b"state"
"""In place of the first number of a replay: everything that is held, as one batch."""

EventEncoding = Literal["map", "array"]


class PackedTokens(Sequence[int]):
    """Token ids that become msgpack without a Python object for each.

    Args:
        parts: int32 arrays of any shape, one after the other.
    """

    __slots__ = ("_array",)

    def __init__(self, parts: Sequence[TokenIds]) -> None:
        self._array: TokenIds = (
            parts[0].ravel() if len(parts) == 1 else np.concatenate([part.ravel() for part in parts])
        )

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [int(token) for token in self._array[index]]
        return int(self._array[index])

    def part(self, begin: int, end: int) -> PackedTokens:
        """Some of them, without a copy."""
        return PackedTokens([self._array[begin:end]])

    def owned(self) -> PackedTokens:
        """The same tokens; a copy where more than as many again would be kept alive with them."""
        kept: object = self._array
        while isinstance(kept, np.ndarray) and kept.base is not None:
            kept = kept.base
        kept_bytes = kept.nbytes if isinstance(kept, np.ndarray) else len(kept) if isinstance(kept, bytes) else None
        small = kept_bytes is not None and kept_bytes <= 2 * self._array.nbytes
        return self if small else PackedTokens([self._array.copy()])

    def pack(self) -> msgspec.Raw:
        """A msgpack array: ids of 2 bytes where all of them fit, else of 4; readers take any width."""
        return msgspec.Raw(_native.pack_token_ids(self._array))


def encode_batch(batch: EventBatch, encoding: EventEncoding = "map") -> bytes:
    """The payload frame of a batch: always a 3-element array around the events."""
    if encoding == "map":
        return _encoder.encode(batch)
    return _encoder.encode([batch.ts, [_array(event) for event in batch.events], batch.data_parallel_rank])


def _pack(value: Any) -> Any:
    if isinstance(value, PackedTokens):
        return value.pack()
    raise TypeError(f"cannot encode a {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)


def _array(event: KvEvent) -> list[Any] | KvEvent:
    match event:
        case BlockStored():
            return [
                "BlockStored",
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                event.lora_id,
                event.medium,
                event.lora_name,
                _or_none(event.extra_keys),
                _or_none(event.group_idx),
                _or_none(event.kv_cache_spec_kind),
                _or_none(event.kv_cache_spec_sliding_window),
            ]
        case KeyedBlocksStored():
            return event  # always a map: nobody else reads it
        case BlockRemoved():
            return ["BlockRemoved", event.block_hashes, event.medium, _or_none(event.group_idx)]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


def _or_none(value: Any) -> Any:
    return None if value is msgspec.UNSET else value
