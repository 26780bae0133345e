"""From the payload of a message to records: any envelope, any dialect; a bad event never takes its batch with it."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmesh.events.dialects import RejectedError, decode_event
from kvmesh.events.keyed import KeyRing
from kvmesh.events.records import EventRecord, RecordBatch

__all__ = ["SAMPLE_BYTES", "BatchError", "decode_batch", "rank_of"]

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


def decode_batch(payload: bytes, keys: KeyRing | None = None) -> RecordBatch:
    """Decode ``[ts, events]``, ``[ts, events, rank]`` or a map of these.

    Events that cannot be used are counted in ``rejected`` and left out.

    Args:
        payload: last frame of a message.
        keys: by which keyed events may be read.

    Raises:
        BatchError: the envelope itself is unreadable.
    """
    ts, events, rank = _open(payload)
    records: list[EventRecord] = []
    dialects: dict[str, int] = {}
    rejected: dict[str, int] = {}
    samples: dict[str, bytes] = {}
    for event in events:
        view = memoryview(event)
        try:
            dialect, record = decode_event(view, keys)
        except RejectedError as error:
            rejected[error.reason] = rejected.get(error.reason, 0) + 1
            samples.setdefault(error.reason, bytes(view[:SAMPLE_BYTES]))
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
