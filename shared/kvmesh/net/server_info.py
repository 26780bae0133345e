"""``GET /server_info``: what a server says of itself, read by those who find it instead of hearing from it."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from kvmesh.protocol.members import Count, Epoch, Member, Role
from kvmesh.protocol.version import PROTOCOL_VERSION

__all__ = ["MESH_DIALECT", "ServerInfo", "info_problem", "member_from_info"]

MESH_DIALECT = "kvmesh"

_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class _DisaggregatedInfo(msgspec.Struct):
    ctx_info_endpoint: str | list[str] | None = None


class ServerInfo(msgspec.Struct):
    """Of KVMesh and TensorRT-LLM servers; what the latter lack has a default."""

    instance_id: str = ""
    epoch: Epoch = 0
    role: str = ""
    dialect: str = ""
    protocol: Count | None = None
    """Version of the messages between processes; None: a server of another engine."""
    model: str = ""
    compat_digest: str = ""
    tokens_per_block: Count = 0
    kv_cache_hash_algo: str = ""
    max_batch_size: Count = 0
    dp_size: _Positive = 1
    tensor_parallel_size: _Positive = 1
    """Ranks of all its engines together, as TensorRT-LLM counts them."""
    pipeline_parallel_size: _Positive = 1
    max_seq_len: Count = 0
    ctx_addresses: list[str] = []
    transfer_backend: str | None = None
    events_endpoint: str | None = None
    replay_endpoint: str | None = None
    events_single_group: bool = False
    disaggregated_params: _DisaggregatedInfo | None = None


def info_problem(info: ServerInfo, role: Role | None) -> str | None:
    """Why a server is not taken in, whatever its health; None when it is.

    Args:
        info: what it says.
        role: what whoever found it was told that it does; None: it has to say it.
    """
    if info.role not in ("", "context", "generation", "both"):
        return f"is a {info.role}, which serves no requests"
    if role is None and not info.role:
        return "does not say its role; state it where the server is named"
    if role is not None and info.role not in ("", role):
        return f"is a {info.role} server, not a {role} server"
    if info.protocol is None:
        return None
    if info.protocol != PROTOCOL_VERSION:
        return f"speaks protocol {info.protocol}, and this mesh {PROTOCOL_VERSION}: run one version of KVMesh"
    if not info.model:
        return "does not say which model it serves"
    if not info.instance_id or "/" in info.instance_id:
        return f"has no usable instance_id ({info.instance_id!r})"
    if info.transfer_backend is not None and not info.compat_digest:
        return "moves pages, but does not say how they are laid out (compat_digest)"
    return None


def member_from_info(info: ServerInfo, url: str, *, role: Role, dialect: str = MESH_DIALECT) -> Member:
    """The server as a member of the mesh.

    Args:
        info: what it says.
        url: where it was found.
        role: what it does.
        dialect: how it is spoken to.
    """
    given = info.disaggregated_params.ctx_info_endpoint if info.disaggregated_params is not None else None
    endpoints = [given] if isinstance(given, str) else given or []
    return Member(
        instance_id=info.instance_id or urlsplit(url).netloc,
        role=role,
        url=url,
        epoch=info.epoch,
        dialect=dialect,
        model=info.model,
        compat_digest=info.compat_digest,
        tokens_per_block=info.tokens_per_block,
        kv_cache_hash_algo=info.kv_cache_hash_algo,
        max_batch_size=info.max_batch_size,
        max_seq_len=info.max_seq_len,
        dp_size=info.dp_size,
        tp_size=max(1, info.tensor_parallel_size // info.dp_size),
        pp_size=info.pipeline_parallel_size,
        ctx_info_endpoint=endpoints[0] if endpoints else None,
        ctx_addresses=info.ctx_addresses,
        transfer_backend=info.transfer_backend,
        events_endpoint=info.events_endpoint,
        replay_endpoint=info.replay_endpoint,
        events_single_group=info.events_single_group,
    )
