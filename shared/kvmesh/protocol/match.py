"""The router's question to the indexer: how much of this prompt does each worker hold.

A DEALER sends ``[msgpack(MatchRequest)]`` to the indexer's ROUTER and receives ``[msgpack(MatchReply)]``. Where it then
sends a prompt it tells by ``["routed", msgpack(Routed)]``, which is not answered.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvmesh.protocol.version import PROTOCOL_VERSION

__all__ = [
    "MAX_BLOCK_TOKENS",
    "MAX_DP_RANK",
    "MAX_TTL_S",
    "ROUTED",
    "MatchReply",
    "MatchRequest",
    "Routed",
    "WorkerMatch",
]

ROUTED = b"routed"
"""Frame before a :class:`Routed`."""

MAX_BLOCK_TOKENS = 1 << 20
"""Tokens per block; far above every engine's."""

MAX_TTL_S = 86_400
"""Longest that a prediction counts."""

MAX_DP_RANK = 65_535
"""Above every rank: each has a port."""


class MatchRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One prompt to look up."""

    id: int
    """Echoed in the reply; a late reply to an older id is dropped."""
    model: str
    token_ids: bytes
    """int32 little-endian token ids of the whole prompt."""
    lora_id: int | None = None
    cache_salt: str | None = None
    protocol: int = PROTOCOL_VERSION


class WorkerMatch(msgspec.Struct, array_like=True, gc=False):
    """Leading tokens that one worker holds, by tier; a colder tier's count includes what the warmer ones hold."""

    instance_id: str
    dp_rank: int
    device_tokens: int
    host_tokens: int = 0
    disk_tokens: int = 0


class MatchReply(msgspec.Struct, kw_only=True):
    """Workers with at least one matching block."""

    id: int
    matches: list[WorkerMatch]
    protocol: int = PROTOCOL_VERSION


class Routed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A prompt is on its way to a worker, which will soon hold it: counted as held before its events come."""

    instance_id: str
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=MAX_DP_RANK)] = 0
    model: str
    token_ids: bytes
    """int32 little-endian token ids of the whole prompt."""
    lora_id: int | None = None
    cache_salt: str | None = None
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)]
    """Seconds until it counts no more unless its events have come."""
    protocol: int = PROTOCOL_VERSION
