"""KV cache events on the wire, as vLLM, SGLang and TensorRT-LLM consumers read them (see ``docs/events.md``).

A message is three ZMQ frames: topic, sequence (8 bytes big-endian), payload (msgpack :class:`EventBatch`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "KeyedBlocksStored", "KvEvent"]


class BlockStored(msgspec.Struct, tag=True, kw_only=True):
    """A run of consecutive blocks became reusable.

    ``token_ids`` holds ``block_size`` ids for each hash, or none when known blocks are in ``medium`` now.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | msgspec.UnsetType | None = msgspec.UNSET
    group_idx: int | msgspec.UnsetType = msgspec.UNSET
    kv_cache_spec_kind: str | msgspec.UnsetType = msgspec.UNSET
    kv_cache_spec_sliding_window: int | msgspec.UnsetType = msgspec.UNSET


class KeyedBlocksStored(msgspec.Struct, tag=True, kw_only=True):
    """As :class:`BlockStored`, to readers that have the key (``kvmesh.events.keyed``) and to nobody else.

    ``block_hashes`` are keyed names, which stand for tokens, adapter and salt, too.
    """

    key_id: str
    block_hashes: list[int]
    parent_block_hash: int | None
    block_size: int
    medium: str | None = "GPU"
    group_idx: int | msgspec.UnsetType = msgspec.UNSET
    kv_cache_spec_kind: str | msgspec.UnsetType = msgspec.UNSET
    kv_cache_spec_sliding_window: int | msgspec.UnsetType = msgspec.UNSET


class BlockRemoved(msgspec.Struct, tag=True, kw_only=True):
    """Blocks left ``medium``."""

    block_hashes: list[int]
    medium: str | None = "GPU"
    group_idx: int | msgspec.UnsetType = msgspec.UNSET


class AllBlocksCleared(msgspec.Struct, tag=True, kw_only=True):
    """The worker's whole cache is gone."""


KvEvent = BlockStored | KeyedBlocksStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """``[ts, events, data_parallel_rank]``; ``ts`` is Unix seconds, for people only."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None
