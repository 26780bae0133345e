"""Events as arrays whose first element is the tag: older vLLM and llm-d, SGLang, ATOM.

Trailing defaults may be cut. Where vLLM has the adapter's name, SGLang has a map with the salt. What follows the extra
keys differs between versions and is told by its type and order; see :class:`_Tail`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvmesh.events.dialects import normalise
from kvmesh.events.dialects.base import DecodedEvent
from kvmesh.events.dialects.identity import BlockContent
from kvmesh.events.dialects.normalise import WireHash
from kvmesh.events.dialects.tokens import read_tokens
from kvmesh.events.records import Cleared, Stored

__all__ = ["NAME", "SGLANG_NAME", "decode"]

NAME = "array"
SGLANG_NAME = "sglang"
"""Of events that only SGLang writes so; its shorter ones look like vLLM's."""

_LOCALITIES = frozenset({"LOCAL", "REMOTE"})
_FIXED_TAIL = 4
"""From this length on a tail is group, kind, window, locality, source kind, with nil in unused places."""


class _Stored(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name_or_metadata: Any = None
    extra_keys: Any = None
    tail_0: Any = msgspec.UNSET
    tail_1: Any = msgspec.UNSET
    tail_2: Any = msgspec.UNSET
    tail_3: Any = msgspec.UNSET
    tail_4: Any = msgspec.UNSET
    tail_5: Any = msgspec.UNSET


class _Removed(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[WireHash]
    medium: str | None = None
    tail_0: Any = msgspec.UNSET
    tail_1: Any = msgspec.UNSET
    tail_2: Any = msgspec.UNSET
    tail_3: Any = msgspec.UNSET
    tail_4: Any = msgspec.UNSET


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Ignored(msgspec.Struct, tag="Ignored", array_like=True, gc=False):
    pass


class _Tail(NamedTuple):
    """What comes after the extra keys.

    vLLM up to 0.23 writes group, kind, window. Dynamo's engines put a list about images before them and left unused
    places out; newer ones write all five of group, kind, window, locality, source kind. ATOM ends with the position
    of the first token. So a long tail goes by place, and in a short one the first number is the group and the first
    text that is no locality the kind.
    """

    group: int | None = None
    kind: str | None = None
    locality: str | None = None
    mm_infos: list[Any] | None = None

    @classmethod
    def of(cls, places: Sequence[Any]) -> _Tail:
        values = [value for value in places if value is not msgspec.UNSET]
        if not values:
            return _NO_TAIL
        if len(values) >= _FIXED_TAIL and _fits(values):
            return cls(values[0], values[1], values[3])
        texts = [value for value in values if isinstance(value, str)]
        return cls(
            group=next((value for value in values if isinstance(value, int)), None),
            kind=next((text for text in texts if text not in _LOCALITIES), None),
            locality=next((text for text in texts if text in _LOCALITIES), None),
            mm_infos=next((value for value in values if isinstance(value, list)), None),
        )


_NO_TAIL = _Tail()


def _fits(values: Sequence[Any]) -> bool:
    group, kind, window, locality = values[:_FIXED_TAIL]
    return (
        isinstance(group, int | None)
        and isinstance(kind, str | None)
        and kind not in _LOCALITIES
        and isinstance(window, int | None)
        and isinstance(locality, str | None)
    )


_Event = _Stored | _Removed | _Cleared | _Ignored
_decoder: msgspec.msgpack.Decoder[_Event] = msgspec.msgpack.Decoder(_Event)


def decode(event: memoryview) -> DecodedEvent:
    """One event.

    Raises:
        RejectedError: it cannot be used.
        msgspec.DecodeError: it is not in this dialect after all.
    """
    raw = _decoder.decode(event)
    match raw:
        case _Stored():
            name = SGLANG_NAME if isinstance(raw.lora_name_or_metadata, dict) else NAME
            return DecodedEvent(name, _stored(raw))
        case _Removed():
            tail = _Tail.of((raw.tail_0, raw.tail_1, raw.tail_2, raw.tail_3, raw.tail_4))
            record = normalise.removed(
                hashes=raw.block_hashes, medium=raw.medium, group=tail.group, locality=tail.locality
            )
            return DecodedEvent(NAME, record)
        case _Cleared():
            return DecodedEvent(NAME, Cleared())
        case _:
            return DecodedEvent(NAME, None)


def _stored(raw: _Stored) -> Stored:
    tail = _Tail.of((raw.tail_0, raw.tail_1, raw.tail_2, raw.tail_3, raw.tail_4, raw.tail_5))
    seventh = raw.lora_name_or_metadata
    metadata = seventh if isinstance(seventh, dict) else {}
    return normalise.stored(
        hashes=raw.block_hashes,
        parent=raw.parent_block_hash,
        tokens=read_tokens(raw.token_ids),
        block_size=raw.block_size,
        medium=raw.medium,
        lora_id=raw.lora_id,
        lora_name=_text(metadata.get("lora_name") if metadata else seventh),
        salt=_text(metadata.get("cache_salt")),
        content=BlockContent(
            extra_keys=raw.extra_keys if isinstance(raw.extra_keys, list) else None, mm_infos=tail.mm_infos
        ),
        group=tail.group,
        kind=tail.kind,
        locality=tail.locality,
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
