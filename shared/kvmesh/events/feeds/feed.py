"""What is followed: one rank of one worker, and what its blocks are of."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.events.endpoints import EndpointError, rank_endpoint
from kvmesh.events.index import DEFAULT_TENANT, Source
from kvmesh.events.records import LoraKey, Owner
from kvmesh.protocol.match import MAX_BLOCK_TOKENS, MAX_DP_RANK
from kvmesh.protocol.members import Member

__all__ = ["Feed", "feeds_of"]

_ENGINES = frozenset({"context", "generation", "both"})


class Feed(NamedTuple):
    """What to follow, and what its blocks are of. Feeds of one source that differ in anything are different lives."""

    source: Source
    model: str
    endpoint: str | None
    """Of its stream; None: it publishes nothing, and is known by what is predicted of it alone."""
    replay_endpoint: str | None = None
    epoch: int = 0
    tenant: str = DEFAULT_TENANT
    lora: LoraKey = None
    """Adapter of blocks that name none."""
    salt: str | None = None
    """Salt of blocks that name none."""
    single_group: bool = False
    """It tells one layer group only, the widest."""
    block_size: int = 0
    """Tokens per block, 0: only its events say."""
    topic: str | None = None
    """It connects to this side, with this topic; None: it is connected to."""
    in_mesh: bool = False
    """Its sockets speak CURVE where those of the mesh do."""

    @property
    def approximate(self) -> bool:
        """Whether it is known by predictions alone."""
        return self.endpoint is None

    @property
    def owner(self) -> Owner:
        """Whose blocks are that name nobody."""
        return Owner(self.model, self.tenant, self.lora if isinstance(self.lora, str) else "", self.salt or "")


def feeds_of(member: Member) -> list[Feed]:
    """A feed for each rank of a member that has an engine.

    A server without events is approximate. One that does not say its block size either has no feed.

    Raises:
        EndpointError: its endpoints cannot be those of so many ranks, or nobody's are so many or so large blocks.
    """
    stream, replay = member.events_endpoint, member.replay_endpoint
    if member.role not in _ENGINES or (stream is None and not member.tokens_per_block):
        return []
    if member.dp_size > MAX_DP_RANK + 1 or member.tokens_per_block > MAX_BLOCK_TOKENS:
        raise EndpointError(f"{member.dp_size} ranks with blocks of {member.tokens_per_block} tokens cannot be")
    return [
        Feed(
            Source(member.instance_id, rank),
            member.model,
            None if stream is None else rank_endpoint(stream, rank),
            None if stream is None or replay is None else rank_endpoint(replay, rank),
            member.epoch,
            single_group=member.events_single_group,
            block_size=member.tokens_per_block,
            in_mesh=True,
        )
        for rank in range(member.dp_size)
    ]
