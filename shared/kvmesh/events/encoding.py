"""Event batches as msgpack, in either of the encodings that readers expect.

``map`` (vLLM since mid-2026, TensorRT-LLM): events are maps tagged ``type``. ``array`` (older vLLM, SGLang and llm-d):
events are positional arrays whose first element is the tag.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent

__all__ = ["END_SEQUENCE", "EventEncoding", "encode_batch"]

END_SEQUENCE = 2**64 - 1
"""Closes a replay; never the number of a batch."""

EventEncoding = Literal["map", "array"]

_encoder = msgspec.msgpack.Encoder()


def encode_batch(batch: EventBatch, encoding: EventEncoding = "map") -> bytes:
    """The payload frame of a batch: always a 3-element array around the events."""
    if encoding == "map":
        return _encoder.encode(batch)
    return _encoder.encode([batch.ts, [_array(event) for event in batch.events], batch.data_parallel_rank])


def _array(event: KvEvent) -> list[Any]:
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
        case BlockRemoved():
            return ["BlockRemoved", event.block_hashes, event.medium, _or_none(event.group_idx)]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


def _or_none(value: Any) -> Any:
    return None if value is msgspec.UNSET else value
