"""What a stream says, whatever dialect it was written in: the vocabulary of decoders, subscribers and the index."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from kvmesh.hashing import TokenIds

__all__ = ["Cleared", "EventRecord", "LoraKey", "Owner", "RecordBatch", "Removed", "Stored", "Tier"]

LoraKey = str | int | None
"""An adapter by name, or by number where the engine gives no name; None: the base model."""


class Tier(IntEnum):
    """Where blocks lie, warmest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Owner(NamedTuple):
    """Whose blocks are, as an event names them; empty: nobody's in particular, None: it does not say."""

    model: str | None
    tenant: str | None
    lora: str | None
    salt: str | None


class Stored(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Consecutive blocks became reusable in ``tier``."""

    hashes: list[int]
    """The engine's own block hashes as unsigned 64-bit numbers, no two equal."""
    parent: int | None
    """Engine hash of the block before the first one; None at the start of a sequence."""
    token_ids: TokenIds
    """int32 ``[len(hashes) * block_size + lookahead]``, or empty when known blocks moved to ``tier``."""
    block_size: int
    """Tokens per block."""
    lookahead: int = 0
    """So many tokens after its own are part of a block's identity: two blocks with the same tokens differ when others
    follow them."""
    tier: Tier = Tier.DEVICE
    lora: LoraKey = None
    salt: str | None = None
    """Of the whole sequence; given with its first block."""
    extra_keys: list[Any] | None = None
    """What else identifies each block (multimodal content...), None for blocks that are their tokens alone."""
    group: int | None = None
    """KV cache group of the engine."""
    kind: str | None = None
    """Attention kind of the group, such as ``full_attention``."""
    tenant: str | None = None
    """Whose it is, None: the source's."""
    model: str | None = None
    """What it is of, None: the source's."""
    owner: Owner | None = None
    """Where hashes are marked with owners: who is named (``kvmesh.events.owners``)."""


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks left ``tier``."""

    hashes: list[int]
    tier: Tier = Tier.DEVICE
    group: int | None = None
    owner: Owner | None = None
    """As in :class:`Stored`."""


class Cleared(msgspec.Struct, frozen=True):
    """Everything that the worker held is gone, in every tier."""


EventRecord = Stored | Removed | Cleared


class RecordBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One message of a stream."""

    ts: float
    """Seconds on the publisher's clock; for people only, never for ordering."""
    rank: int | None
    """Attention data-parallel rank of the publisher."""
    records: Sequence[EventRecord]
    """Made when they are asked for, where the payload was read natively: the index needs none."""
    dialects: dict[str, int]
    """Events by the dialect they were written in."""
    rejected: dict[str, int]
    """Events that were left out, by reason."""
    samples: dict[str, bytes]
    """The first bytes of one event for each reason, for the log."""
