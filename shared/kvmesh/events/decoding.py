"""From the payload of a message to records: any envelope, any dialect; a bad event never takes its batch with it.

Events as most engines write them are read natively. The others go through the dialects.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvmesh.events.dialects import RejectedError, decode_event, normalise, positional, tagged_map
from kvmesh.events.keyed import KeyRingPart
from kvmesh.events.records import EventRecord, RecordBatch, Removed, Stored
from kvmesh.kernels import _native

__all__ = ["SAMPLE_BYTES", "BatchError", "decode_batch", "decode_by_dialects", "rank_of"]

_PLAIN = (Stored, Removed, dict(normalise.TIERS), partial(np.frombuffer, dtype="<i4"))
"""What the native reader makes records with."""

SAMPLE_BYTES = 32
"""Kept of an event that cannot be used: enough to know its layout by, and mostly ahead of the tokens."""


class BatchError(ValueError):
    """A payload that is no batch of events at all."""


# What is around the events is taken as it comes: nobody loses a batch over its time stamp.


class _ArrayEnvelope(msgspec.Struct, array_like=True, gc=False):
    ts: Any
    events: list[msgspec.Raw]
    rank: Any = None


class _MapEnvelope(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]
    ts: Any = None
    data_parallel_rank: Any = None
    dp_rank: Any = None


_array_decoder = msgspec.msgpack.Decoder(_ArrayEnvelope)
_map_decoder = msgspec.msgpack.Decoder(_MapEnvelope)


def decode_batch(payload: bytes, keys: KeyRingPart | None = None) -> RecordBatch:
    """Decode ``[ts, events]``, ``[ts, events, rank]`` or a map of these.

    Events that cannot be used are counted in ``rejected`` and left out.

    Args:
        payload: last frame of a message.
        keys: by which keyed events may be read.

    Raises:
        BatchError: the envelope itself is unreadable.
    """
    read = _native.read_events(payload, _PLAIN)
    if read is None:
        return decode_by_dialects(payload, keys)
    ts, rank, items, maps, arrays = read
    dialects: dict[str, int] = {}
    if maps:
        dialects[tagged_map.NAME] = maps
    if arrays:
        dialects[positional.NAME] = arrays
    if maps + arrays == len(items):
        return RecordBatch(ts=ts, rank=rank, records=items, dialects=dialects, rejected={}, samples={})
    return _collect(ts, rank, items, dialects, keys)


def decode_by_dialects(payload: bytes, keys: KeyRingPart | None = None) -> RecordBatch:
    """As :func:`decode_batch`, every event by the module of its dialect: what the native reader must agree with.

    Raises:
        BatchError: the envelope itself is unreadable.
    """
    ts, events, rank = _open(payload)
    return _collect(ts, rank, events, {}, keys)


def _collect(
    ts: float, rank: int | None, items: Sequence[Any], dialects: dict[str, int], keys: KeyRingPart | None
) -> RecordBatch:
    """Records of items that are records already, or an event's bytes."""
    records: list[EventRecord] = []
    rejected: dict[str, int] = {}
    samples: dict[str, bytes] = {}
    keyed_tokens = 0
    for item in items:
        if isinstance(item, EventRecord):
            records.append(item)
            continue
        view = memoryview(item)
        try:
            dialect, record = decode_event(view, keys)
            if dialect == tagged_map.KEYED_NAME and keys is not None and isinstance(record, Stored):
                keyed_tokens += len(record.token_ids)
                if keyed_tokens > keys.max_tokens:
                    raise RejectedError("keyed_too_long")
        except Exception as error:
            # The border of error isolation: whatever one event makes go wrong costs that event.
            reason = error.reason if isinstance(error, RejectedError) else "failed"
            rejected[reason] = rejected.get(reason, 0) + 1
            samples.setdefault(reason, bytes(view[:SAMPLE_BYTES]))
            continue
        dialects[dialect] = dialects.get(dialect, 0) + 1
        if record is not None:
            records.append(record)
    return RecordBatch(ts=ts, rank=rank, records=records, dialects=dialects, rejected=rejected, samples=samples)


def rank_of(payload: bytes) -> int | None:
    """The rank that a batch says it is of, without decoding its events.

    Raises:
        BatchError: the envelope itself is unreadable.
    """
    return _open(payload)[2]


def _open(payload: bytes) -> tuple[float, list[msgspec.Raw], int | None]:
    try:
        first = payload[0] if payload else 0
        if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            batch = _map_decoder.decode(payload)
            ts, events = batch.ts, batch.events
            rank = batch.dp_rank if batch.data_parallel_rank is None else batch.data_parallel_rank
        else:
            envelope = _array_decoder.decode(payload)
            ts, events, rank = envelope.ts, envelope.events, envelope.rank
    except (msgspec.DecodeError, RecursionError) as error:
        raise BatchError(f"not a batch of KV events: {error}") from error
    return (
        float(ts) if isinstance(ts, int | float) else 0.0,
        events,
        rank if isinstance(rank, int) and rank >= 0 else None,
    )
