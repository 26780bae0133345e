"""Membership: what a worker tells the coordinator, and what watchers hear (HTTP, JSON)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvmesh.protocol.version import PROTOCOL_VERSION

__all__ = [
    "MAX_EPOCH",
    "Count",
    "Epoch",
    "Heartbeat",
    "Life",
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

MAX_EPOCH = 2**63 - 1
"""What fits the signed 64-bit integers that epochs travel in between processes."""

Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Address = Annotated[str, msgspec.Meta(max_length=2048)]


class Load(msgspec.Struct, kw_only=True):
    """What a worker is doing now."""

    healthy: bool = True
    """Whether its engine's loop answers; an unhealthy worker gets no new requests."""
    running: Count = 0
    waiting: Count = 0
    in_transfer: Count = 0
    pages_total: Count = 0
    pages_free: Count = 0
    pages_evictable: Count = 0
    prompt_tokens_total: Count = 0
    cached_tokens_total: Count = 0
    generated_tokens_total: Count = 0


class Member(msgspec.Struct, kw_only=True):
    """One process of the mesh."""

    instance_id: Name
    role: Role
    url: Address
    """Base URL of its HTTP face, e.g. ``http://127.0.0.1:8101``."""
    epoch: Epoch = 0
    """A higher epoch of the same id fences the older. 0 in a registration: the coordinator chooses one."""
    dialect: Name = "kvmesh"
    """Which adapter speaks to it."""
    model: Address = ""
    compat_digest: Name = ""
    """Must be equal between a context and a generation server that are paired."""
    tokens_per_block: Count = 0
    kv_cache_hash_algo: Name = ""
    max_batch_size: Count = 0
    max_seq_len: Count = 0
    dp_size: Count = 1
    tp_size: Count = 1
    """Tensor-parallel ranks of each of its engines."""
    pp_size: Count = 1
    """Pipeline stages of each of its engines."""
    ctx_info_endpoint: Address | None = None
    ctx_addresses: list[Address] = []
    """Base64 of signed :class:`kvmesh.protocol.disagg.ContextAddress`, by attention data-parallel rank: whom a
    generation-first leg asks for the prompt. Empty: it moves no pages, or its engine knows only context first."""
    transfer_backend: Name | None = None
    events_endpoint: Address | None = None
    replay_endpoint: Address | None = None
    events_single_group: bool = False
    """Its events tell one layer group only, that with the largest window."""
    match_endpoint: Address | None = None
    """An indexer's match socket (``kvmesh.protocol.match``)."""
    started_unix_ms: Count = 0
    pid: Count = 0
    draining: bool = False
    source: Name = ""
    """Where the coordinator found it (``dns:context``, say); empty: it has registered itself."""
    load: Load = msgspec.field(default_factory=Load)
    protocol: Count = PROTOCOL_VERSION


class Registration(msgspec.Struct, kw_only=True):
    """``POST /members``."""

    member: Member


class RegistrationReply(msgspec.Struct, kw_only=True):
    """Answer to a registration."""

    epoch: Epoch
    """The member's epoch from now on; the one it asked for unless that was taken by an older life."""
    lease_s: float
    revision: int
    incarnation: str = ""
    leads: bool = True
    """Whether no other coordinator can lead now. Else another one may, whom it is better to tell as well."""


class Heartbeat(msgspec.Struct, kw_only=True):
    """``POST /members/{instance_id}/heartbeat``: 200, or 404 when unknown (register again), 409 when fenced."""

    epoch: Epoch
    load: Load
    draining: bool = False


class HeartbeatReply(msgspec.Struct, kw_only=True):
    """Answer to a heartbeat."""

    leads: bool = True
    """As in a :class:`RegistrationReply`."""


class Life(msgspec.Struct, kw_only=True):
    """``POST /members/{instance_id}/met``: a life that the sender knows, so that no earlier one is taken for alive."""

    epoch: Epoch


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
    leads: bool = True
    """Whether no other coordinator can lead now. Else nobody is to be given up for not being listed."""
