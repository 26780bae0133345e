"""Membership: what a worker tells the coordinator, and what watchers hear (HTTP, JSON)."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmesh.protocol.version import PROTOCOL_VERSION

__all__ = [
    "Heartbeat",
    "Load",
    "Member",
    "MemberEvent",
    "MemberList",
    "Registration",
    "RegistrationReply",
    "Role",
    "WatchReply",
]

Role = Literal["router", "context", "generation", "both", "indexer"]
"""``both``: a worker with no role restriction (aggregated mode)."""


class Load(msgspec.Struct, kw_only=True):
    """What a worker is doing now."""

    healthy: bool = True
    """Whether its engine's loop answers; an unhealthy worker gets no new requests."""
    running: int = 0
    waiting: int = 0
    in_transfer: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_evictable: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0


class Member(msgspec.Struct, kw_only=True):
    """One process of the mesh."""

    instance_id: str
    role: Role
    url: str
    """Base URL of its HTTP face, e.g. ``http://127.0.0.1:8101``."""
    epoch: int = 0
    """A higher epoch of the same id fences the older. 0 in a registration: the coordinator chooses one."""
    dialect: str = "kvmesh"
    """Which adapter speaks to it."""
    model: str = ""
    compat_digest: str = ""
    """Must be equal between a context and a generation server that are paired."""
    tokens_per_block: int = 0
    kv_cache_hash_algo: str = ""
    max_batch_size: int = 0
    max_seq_len: int = 0
    dp_size: int = 1
    ctx_info_endpoint: str | None = None
    transfer_backend: str | None = None
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    match_endpoint: str | None = None
    """An indexer's match socket (``kvmesh.protocol.match``)."""
    started_unix_ms: int = 0
    pid: int = 0
    draining: bool = False
    load: Load = msgspec.field(default_factory=Load)
    protocol: int = PROTOCOL_VERSION


class Registration(msgspec.Struct, kw_only=True):
    """``POST /members``."""

    member: Member


class RegistrationReply(msgspec.Struct, kw_only=True):
    """Answer to a registration."""

    epoch: int
    """The member's epoch from now on; the one it asked for unless that was taken by an older life."""
    lease_s: float
    revision: int
    incarnation: str = ""


class Heartbeat(msgspec.Struct, kw_only=True):
    """``POST /members/{instance_id}/heartbeat``: 200, or 404 when unknown (register again), 409 when fenced."""

    epoch: int
    load: Load
    draining: bool = False


class MemberEvent(msgspec.Struct, kw_only=True):
    """A change of the membership."""

    revision: int
    kind: Literal["joined", "updated", "left", "dead"]
    """``left``: said goodbye; ``dead``: its lease expired or a newer epoch took its place."""
    member: Member


class MemberList(msgspec.Struct, kw_only=True):
    """``GET /members``."""

    revision: int
    members: list[Member]
    incarnation: str = ""
    lease_s: float = 0.0


class WatchReply(msgspec.Struct, kw_only=True):
    """``GET /members/watch?incarnation=I&revision=N&timeout_s=T``: events after N, maybe none after T seconds.

    ``reset`` set means that the history does not reach back to N: take ``members`` as the whole truth, but for the
    next ``grace_s`` seconds: a coordinator that has just started has not yet heard from everyone.
    """

    revision: int
    events: list[MemberEvent] = []
    reset: bool = False
    members: list[Member] = []
    incarnation: str = ""
    """Names one life of the coordinator; revisions of different incarnations cannot be compared."""
    grace_s: float = 0.0
    """Seconds until every live member must have registered with this incarnation."""
