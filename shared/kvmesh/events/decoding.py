"""Payloads of the event stream, in the encodings of every engine that speaks maps or positional arrays.

One event that cannot be read is counted and left out; its batch goes on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent

__all__ = ["DecodedBatch", "PayloadError", "decode_payload"]

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_OPTIONAL = frozenset({"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"})
_HASH_MASK = 2**64 - 1

_typed = msgspec.msgpack.Decoder(EventBatch)
_untyped = msgspec.msgpack.Decoder()


class PayloadError(ValueError):
    """A payload of which not even the envelope can be read."""


class DecodedBatch(NamedTuple):
    """The readable events of one message, hashes as unsigned 64-bit numbers."""

    events: list[KvEvent]
    data_parallel_rank: int
    unreadable: int
    """Events that were left out."""


def decode_payload(payload: bytes) -> DecodedBatch:
    """The events of one payload frame.

    Raises:
        PayloadError: it is no msgpack, or no batch.
    """
    try:
        batch = _typed.decode(payload)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return _decode_leniently(payload)
    return DecodedBatch([_unsigned(event) for event in batch.events], batch.data_parallel_rank or 0, 0)


def _decode_leniently(payload: bytes) -> DecodedBatch:
    try:
        raw = _untyped.decode(payload)
    except msgspec.DecodeError as error:
        raise PayloadError(f"the payload is no msgpack: {error}") from None
    if isinstance(raw, dict):
        raw = [raw.get("ts"), raw.get("events"), raw.get("data_parallel_rank", raw.get("dp_rank"))]
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise PayloadError("the payload is no [ts, events, rank]")
    rank = raw[2] if len(raw) > 2 and isinstance(raw[2], int) else 0
    events: list[KvEvent] = []
    for item in raw[1]:
        try:
            events.append(_unsigned(msgspec.convert(_as_map(item), KvEvent, strict=False)))
        except (msgspec.ValidationError, TypeError, ValueError, KeyError):
            continue
    return DecodedBatch(events, rank, len(raw[1]) - len(events))


def _as_map(item: Any) -> dict[str, Any]:
    """A positional event as the map it stands for; maps lose their absent optional fields."""
    if isinstance(item, list) and item:
        tag, *values = item
        names = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS, "AllBlocksCleared": ()}[tag]
        item = {"type": tag, **dict(zip(names, values, strict=False))}
    if not isinstance(item, dict):
        raise TypeError("an event is a map or an array")
    fields = {str(key): value for key, value in item.items() if value is not None or key not in _OPTIONAL}
    for key in ("block_hashes", "parent_block_hash"):
        if key in fields:
            fields[key] = _number(fields[key])
    return fields


def _number(value: Any) -> Any:
    """A hash as a number: byte digests give their last 8 bytes."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value


def _unsigned(event: KvEvent) -> KvEvent:
    if isinstance(event, AllBlocksCleared):
        return event
    if any(hash_ < 0 for hash_ in event.block_hashes):
        event.block_hashes = [hash_ & _HASH_MASK for hash_ in event.block_hashes]
    if isinstance(event, BlockStored) and event.parent_block_hash is not None:
        event.parent_block_hash &= _HASH_MASK
    assert isinstance(event, BlockStored | BlockRemoved)
    return event
