"""The indexer's merged stream: the events of every worker of a mesh in one feed (see ``docs/indexer.md``).

A message is three ZMQ frames: topic (:func:`mesh_topic`), sequence (8 bytes big-endian, of the feed as a whole),
payload (msgpack :class:`MeshBatch`). Whatever dialect a worker speaks, events are tagged maps here, hashes unsigned
64-bit numbers and media those of three tiers.
"""

from __future__ import annotations

import msgspec

from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored

__all__ = ["TIER_MEDIA", "MeshBatch", "MeshEvent", "MeshOrigin", "MeshStored", "mesh_topic"]

TIER_MEDIA = ("GPU", "CPU", "DISK")
"""``medium`` by tier, warmest first."""


class MeshStored(BlockStored, tag="BlockStored", kw_only=True):
    """As a worker tells it, with the salt as a field of its own."""

    cache_salt: str | msgspec.UnsetType = msgspec.UNSET
    """Of the sequence; told with its first block."""
    tenant_id: str | msgspec.UnsetType = msgspec.UNSET
    """Whose the blocks are, where that is not the origin's tenant."""
    model_name: str | msgspec.UnsetType = msgspec.UNSET
    """What they are of, where that is not the origin's model."""


MeshEvent = MeshStored | BlockRemoved | AllBlocksCleared


class MeshOrigin(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Whose events they are."""

    instance_id: str
    dp_rank: int = 0
    epoch: int = 0
    model: str = ""
    tenant: str = "default"
    lora: str | int | None = None
    """Adapter of blocks that name none."""
    salt: str | None = None
    """Salt of blocks that name none."""
    sequence: int = 0
    """Number of the batch in the worker's own stream."""
    block_size: int = 0
    """Tokens per block, 0: only the events say."""
    hidden: bool = False
    """Its connection is broken: its blocks are left out of answers until a batch says otherwise."""


class MeshBatch(msgspec.Struct, array_like=True):
    """``[ts, events, data_parallel_rank, origin]``: the first three as in a worker's own batch."""

    ts: float
    events: list[MeshEvent]
    data_parallel_rank: int
    origin: MeshOrigin


def mesh_topic(instance_id: str, dp_rank: int, model: str) -> str:
    """What to subscribe to: ``kvmesh@INSTANCE@RANK@MODEL``, or the beginning of it."""
    return f"kvmesh@{instance_id}@{dp_rank}@{model}"
