"""Events as maps tagged ``type``: vLLM since mid-2026, TensorRT-LLM, SGLang's newest, KVMesh.

The order of the keys does not matter, unknown keys are skipped and absent ones have their default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvmesh.events.dialects import normalise
from kvmesh.events.dialects.base import Dialect
from kvmesh.events.dialects.normalise import WireHash
from kvmesh.events.records import Cleared, EventRecord, Removed

__all__ = ["DIALECT"]


class _Stored(msgspec.Struct, tag="BlockStored", kw_only=True, gc=False):
    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None = None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[Any] | None = None
    cache_salt: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", kw_only=True, gc=False):
    block_hashes: list[WireHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


_Event = _Stored | _Removed | _Cleared
_decoder: msgspec.msgpack.Decoder[_Event] = msgspec.msgpack.Decoder(_Event)


def _decode(event: memoryview) -> EventRecord:
    raw = _decoder.decode(event)
    match raw:
        case _Stored():
            return normalise.stored(
                hashes=raw.block_hashes,
                parent=raw.parent_block_hash,
                token_ids=raw.token_ids,
                block_size=raw.block_size,
                medium=raw.medium,
                lora_id=raw.lora_id,
                lora_name=raw.lora_name,
                salt=raw.cache_salt,
                extra_keys=raw.extra_keys,
                group=raw.group_idx,
                kind=raw.kv_cache_spec_kind,
                locality=raw.locality,
            )
        case _Removed():
            normalise.local_only(raw.locality)
            return Removed(
                hashes=normalise.block_hashes(raw.block_hashes),
                tier=normalise.tier_of(raw.medium),
                group=raw.group_idx,
            )
        case _:
            return Cleared()


DIALECT = Dialect("map", _decode)
