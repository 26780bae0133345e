"""Buffered KV cache events (the pull path), as they travel from an engine to its front: compact, tokens as bytes.

:mod:`kvmesh.events.buffered_json` turns them into the JSON that TensorRT-LLM's ``get_kv_cache_events`` gives.
"""

from __future__ import annotations

import msgspec

__all__ = ["CreatedData", "EventDiff", "KvCacheEvent", "RemovedData", "StoredData", "UpdatedData"]

BlockHash = str | int
"""Lowercase hex of a 32-byte key, or an unsigned 64-bit number: the event's ``hash_algo`` says which."""


class CreatedData(msgspec.Struct, tag="created", frozen=True):
    """The cache began; one event for each layer group."""

    num_blocks_per_cache_level: list[int]


class StoredData(msgspec.Struct, tag="stored", frozen=True, kw_only=True):
    """Consecutive blocks became reusable. All have ``block_size`` tokens, but the last one may have fewer."""

    parent_hash: BlockHash | None
    block_hashes: list[BlockHash]
    token_ids: bytes
    """int32 little-endian, all blocks' one after the other."""
    block_size: int
    cache_levels: list[int]
    priorities: bytes
    """One byte for each block."""
    cache_salt: str | None = None


class RemovedData(msgspec.Struct, tag="removed", frozen=True):
    """Blocks are not reusable any more."""

    block_hashes: list[BlockHash]


class EventDiff(msgspec.Struct, tag="event_diff", frozen=True):
    """A value that changed."""

    old_value: int
    new_value: int


class UpdatedData(msgspec.Struct, tag="updated", frozen=True, kw_only=True):
    """A block moved to another level, or its retention priority changed; what did not change is None."""

    block_hash: BlockHash
    cache_level: EventDiff | None = None
    priority: EventDiff | None = None


class KvCacheEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event in its envelope."""

    event_id: int
    """Per rank from 0, one more with each event."""
    data: CreatedData | StoredData | RemovedData | UpdatedData
    window_size: int
    """Attention window in tokens of the blocks' layers; the longest sequence for full attention."""
    attention_dp_rank: int | None = None
    hash_algo: str | None = None
    layer_group_id: int | None = None
