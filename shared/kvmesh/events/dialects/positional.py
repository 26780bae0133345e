"""Events as arrays whose first element is the tag: older vLLM and llm-d, SGLang.

Trailing defaults may be cut. Where vLLM has the adapter's name, SGLang has a map with the salt. What follows the extra
keys differs between versions: there the first number is the group, the first text that is no locality the kind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvmesh.events.dialects import normalise
from kvmesh.events.dialects.base import Dialect
from kvmesh.events.dialects.normalise import WireHash
from kvmesh.events.records import Cleared, EventRecord, Removed

__all__ = ["DIALECT"]

_LOCALITIES = frozenset({"LOCAL", "REMOTE"})


class _Stored(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name_or_metadata: str | dict[str, Any] | None = None
    extra_keys: list[Any] | None = None
    tail_0: Any = None
    tail_1: Any = None
    tail_2: Any = None
    tail_3: Any = None
    tail_4: Any = None
    tail_5: Any = None


class _Removed(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[WireHash]
    medium: str | None = None
    tail_0: Any = None
    tail_1: Any = None
    tail_2: Any = None
    tail_3: Any = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Tail(NamedTuple):
    group: int | None
    kind: str | None
    locality: str | None

    @classmethod
    def of(cls, *values: Any) -> _Tail:
        texts = [value for value in values if isinstance(value, str)]
        return cls(
            group=next((value for value in values if isinstance(value, int)), None),
            kind=next((text for text in texts if text not in _LOCALITIES), None),
            locality=next((text for text in texts if text in _LOCALITIES), None),
        )


_Event = _Stored | _Removed | _Cleared
_decoder: msgspec.msgpack.Decoder[_Event] = msgspec.msgpack.Decoder(_Event)


def _decode(event: memoryview) -> EventRecord:
    raw = _decoder.decode(event)
    match raw:
        case _Stored():
            tail = _Tail.of(raw.tail_0, raw.tail_1, raw.tail_2, raw.tail_3, raw.tail_4, raw.tail_5)
            name = raw.lora_name_or_metadata
            return normalise.stored(
                hashes=raw.block_hashes,
                parent=raw.parent_block_hash,
                token_ids=raw.token_ids,
                block_size=raw.block_size,
                medium=raw.medium,
                lora_id=raw.lora_id,
                lora_name=None if isinstance(name, dict) else name,
                salt=_salt(name) if isinstance(name, dict) else None,
                extra_keys=raw.extra_keys,
                group=tail.group,
                kind=tail.kind,
                locality=tail.locality,
            )
        case _Removed():
            tail = _Tail.of(raw.tail_0, raw.tail_1, raw.tail_2, raw.tail_3)
            normalise.local_only(tail.locality)
            return Removed(
                hashes=normalise.block_hashes(raw.block_hashes), tier=normalise.tier_of(raw.medium), group=tail.group
            )
        case _:
            return Cleared()


def _salt(metadata: dict[str, Any]) -> str | None:
    salt = metadata.get("cache_salt")
    return salt if isinstance(salt, str) else None


DIALECT = Dialect("array", _decode)
