"""From the payload of a message to records: any envelope, any dialect; a bad event never takes its batch with it."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmesh.events.dialects import RejectedError, dialect_of
from kvmesh.events.records import EventRecord, RecordBatch

__all__ = ["SAMPLE_BYTES", "BatchError", "decode_batch"]

SAMPLE_BYTES = 32
"""Kept of an event that cannot be used: enough to know its layout by, and mostly ahead of the tokens."""


class BatchError(ValueError):
    """A payload that is no batch of events at all."""


class _ArrayEnvelope(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


class _MapEnvelope(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]
    ts: float = 0.0
    data_parallel_rank: int | None = None
    dp_rank: int | None = None


_array_decoder = msgspec.msgpack.Decoder(_ArrayEnvelope)
_map_decoder = msgspec.msgpack.Decoder(_MapEnvelope)


def decode_batch(payload: bytes) -> RecordBatch:
    """Decode ``[ts, events]``, ``[ts, events, rank]`` or a map of these.

    Events that cannot be used are counted in ``rejected`` and left out.

    Raises:
        BatchError: the envelope itself is unreadable.
    """
    ts, events, rank = _open(payload)
    records: list[EventRecord] = []
    dialects: dict[str, int] = {}
    rejected: dict[str, int] = {}
    samples: dict[str, bytes] = {}
    for event in events:
        try:
            dialect = dialect_of(memoryview(event))
            records.append(dialect.decode(memoryview(event)))
            dialects[dialect.name] = dialects.get(dialect.name, 0) + 1
        except RejectedError as error:
            reason = error.reason
        except (msgspec.DecodeError, RecursionError):
            reason = "malformed"
        else:
            continue
        rejected[reason] = rejected.get(reason, 0) + 1
        samples.setdefault(reason, bytes(memoryview(event)[:SAMPLE_BYTES]))
    return RecordBatch(ts=ts, rank=rank, records=records, dialects=dialects, rejected=rejected, samples=samples)


def _open(payload: bytes) -> tuple[float, list[Any], int | None]:
    try:
        first = payload[0] if payload else 0
        if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
            batch = _map_decoder.decode(payload)
            rank = batch.data_parallel_rank if batch.data_parallel_rank is not None else batch.dp_rank
            return batch.ts, batch.events, rank
        envelope = _array_decoder.decode(payload)
        return envelope.ts, envelope.events, envelope.rank
    except (msgspec.DecodeError, RecursionError) as error:
        raise BatchError(f"not a batch of KV events: {error}") from error
