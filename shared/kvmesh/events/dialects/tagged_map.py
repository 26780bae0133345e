"""Events as maps tagged ``type``: vLLM since mid-2026, TensorRT-LLM, SGLang's newest, KVMesh.

The order of the keys does not matter, unknown keys are skipped and absent ones have their default.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvmesh.events.dialects import normalise
from kvmesh.events.dialects.base import DecodedEvent, RejectedError
from kvmesh.events.dialects.identity import BlockContent
from kvmesh.events.dialects.normalise import WireHash
from kvmesh.events.dialects.tokens import WireTokens, read_tokens, with_lookahead
from kvmesh.events.keyed import KeyRingPart, disguised, keyed_salt
from kvmesh.events.records import Cleared, EventRecord, Stored

__all__ = ["KEYED_NAME", "NAME", "decode"]

NAME = "map"
KEYED_NAME = "keyed"


class _Stored(msgspec.Struct, tag="BlockStored", kw_only=True, gc=False):
    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None = None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[Any] | None = None
    mm_keys: list[Any] | None = None
    block_mm_infos: list[Any] | None = None
    cache_salt: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class _Keyed(msgspec.Struct, tag="KeyedBlocksStored", kw_only=True, gc=False):
    key_id: str
    block_hashes: list[int]
    parent_block_hash: int | None = None
    block_size: int
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", kw_only=True, gc=False):
    block_hashes: list[WireHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _Ignored(msgspec.Struct, tag="Ignored", gc=False):
    pass


_Event = _Stored | _Keyed | _Removed | _Cleared | _Ignored
_decoder: msgspec.msgpack.Decoder[_Event] = msgspec.msgpack.Decoder(_Event)


def decode(event: memoryview, keys: KeyRingPart | None = None) -> DecodedEvent:
    """One event.

    Args:
        event: one msgpack value.
        keys: by which keyed events may be read.

    Raises:
        RejectedError: it cannot be used.
        msgspec.DecodeError: it is not in this dialect after all.
    """
    raw = _decoder.decode(event)
    if isinstance(raw, _Keyed):
        return DecodedEvent(KEYED_NAME, _keyed(raw, keys))
    return DecodedEvent(NAME, _record(raw))


def _keyed(raw: _Keyed, keys: KeyRingPart | None) -> Stored:
    if keys is None or raw.key_id not in keys:
        raise RejectedError("keyed_without_its_key")
    if not keys.admits(raw.block_size):
        raise RejectedError("keyed_block_size")
    if len(raw.block_hashes) * raw.block_size > keys.max_tokens:
        raise RejectedError("keyed_too_long")
    names = np.array(normalise.block_hashes(raw.block_hashes), np.uint64)
    return normalise.stored(
        hashes=raw.block_hashes,
        parent=raw.parent_block_hash,
        tokens=WireTokens(disguised(names, raw.block_size)),
        block_size=raw.block_size,
        medium=raw.medium,
        lora_id=None,
        lora_name=None,
        salt=keyed_salt(raw.key_id),
        content=BlockContent(),
        group=raw.group_idx,
        kind=raw.kv_cache_spec_kind,
    )


def _record(raw: _Stored | _Removed | _Cleared | _Ignored) -> EventRecord | None:
    match raw:
        case _Stored():
            return _stored(raw)
        case _Removed():
            return normalise.removed(
                hashes=raw.block_hashes, medium=raw.medium, group=raw.group_idx, locality=raw.locality
            )
        case _Cleared():
            return Cleared()
        case _:
            return None


def _stored(raw: _Stored) -> Stored:
    tokens = read_tokens(raw.token_ids)
    if raw.lookahead_token_ids is not None:
        if raw.block_size < 1:
            raise RejectedError("no_blocks")
        tokens = with_lookahead(tokens, raw.lookahead_token_ids, raw.block_size)
    return normalise.stored(
        hashes=raw.block_hashes,
        parent=raw.parent_block_hash,
        tokens=tokens,
        block_size=raw.block_size,
        medium=raw.medium,
        lora_id=raw.lora_id,
        lora_name=raw.lora_name,
        salt=raw.cache_salt,
        content=BlockContent(raw.extra_keys, raw.mm_keys, raw.block_mm_infos),
        group=raw.group_idx,
        kind=raw.kv_cache_spec_kind,
        locality=raw.locality,
    )
