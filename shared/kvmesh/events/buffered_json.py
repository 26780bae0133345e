"""Buffered events as the JSON of ``POST /kv_cache_events`` (semantics §4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from kvmesh.protocol.kv_cache_events import KvCacheEvent, StoredData

__all__ = ["events_as_json"]

_TOKEN = b'{"type":"unique_token","token_id":%d,"token_extra_id":0}'
_OPTIONAL = ("attention_dp_rank", "hash_algo", "layer_group_id")


class _StoredBlock(msgspec.Struct, tag="stored_block"):
    block_hash: str | int
    tokens: msgspec.Raw
    cache_level: int
    priority: int
    mm_keys: tuple[()] = ()
    """Of multimodal content, of which no model here has any."""
    cache_salt: str | msgspec.UnsetType = msgspec.UNSET


class _Stored(msgspec.Struct, tag="stored"):
    parent_hash: str | int | None
    blocks: list[_StoredBlock]


def events_as_json(events: Sequence[KvCacheEvent]) -> bytes:
    """A JSON array. Takes about 0.2 microseconds for each token: call it off the event loop."""
    return msgspec.json.encode([_with_envelope(event) for event in events])


def _with_envelope(event: KvCacheEvent) -> dict[str, Any]:
    data = event.data
    view: dict[str, Any] = {
        "event_id": event.event_id,
        "data": _Stored(data.parent_hash, list(_blocks(data))) if isinstance(data, StoredData) else data,
        "window_size": event.window_size,
    }
    for name in _OPTIONAL:
        if (value := getattr(event, name)) is not None:
            view[name] = value
    return view


def _blocks(data: StoredData) -> Iterator[_StoredBlock]:
    salt = msgspec.UNSET if data.cache_salt is None else data.cache_salt
    tokens = np.frombuffer(data.token_ids, dtype="<i4").tolist()
    for i, (name, level, priority) in enumerate(
        zip(data.block_hashes, data.cache_levels, data.priorities, strict=True)
    ):
        block = tokens[i * data.block_size : (i + 1) * data.block_size]
        unique_tokens = msgspec.Raw(b"[%b]" % b",".join(map(_TOKEN.__mod__, block)))
        yield _StoredBlock(name, unique_tokens, level, priority, (), salt)
