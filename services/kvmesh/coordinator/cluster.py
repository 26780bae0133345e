"""Whether the mesh has enough servers to answer; pure, over members and TensorRT-LLM worker records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

import msgspec

from kvmesh.protocol.members import Member

__all__ = ["WORKERS_PREFIX", "ClusterInfo", "MinimalInstances", "WorkerInfo", "cluster_info"]

WORKERS_PREFIX = "/trtllm-disagg/"
"""TensorRT-LLM workers store themselves at ``/trtllm-disagg/<cluster>/workers/<id>``."""

_CONTEXT_ROLES = frozenset({"context", "both"})
_GENERATION_ROLES = frozenset({"generation", "both"})

_RECORD_ROLES = {0: "context", 1: "generation"}
"""TensorRT-LLM stores its role enumeration as a number."""


class _WorkerRecord(msgspec.Struct):
    worker_id: str
    host: str
    port: int
    role: int | str


class WorkerInfo(msgspec.Struct, kw_only=True):
    """One server, as TensorRT-LLM describes it."""

    worker_id: str
    host: str
    port: int
    role: str


class MinimalInstances(msgspec.Struct, kw_only=True):
    """How many servers of each role make the cluster ready."""

    context_servers: int = 1
    generation_servers: int = 1


class ClusterInfo(msgspec.Struct, kw_only=True):
    """``GET /cluster_info``."""

    is_ready: bool
    current_workers: dict[str, list[WorkerInfo]]
    minimal_instances: MinimalInstances


def cluster_info(
    members: Iterable[Member], records: Mapping[str, str], minimal: MinimalInstances | None = None
) -> ClusterInfo:
    """Count the servers of each role.

    Args:
        members: live members; draining ones do not count.
        records: keys and JSON values stored under :data:`WORKERS_PREFIX`; what is no worker record is skipped.
        minimal: what is needed; one of each by default.
    """
    minimal = minimal or MinimalInstances()
    workers = [_from_member(member) for member in members if not member.draining]
    workers += [worker for value in records.values() if (worker := _from_record(value)) is not None]
    context = [worker for worker in workers if worker.role in _CONTEXT_ROLES]
    generation = [worker for worker in workers if worker.role in _GENERATION_ROLES]
    return ClusterInfo(
        is_ready=len(context) >= minimal.context_servers and len(generation) >= minimal.generation_servers,
        current_workers={"context_servers": context, "generation_servers": generation},
        minimal_instances=minimal,
    )


def _from_member(member: Member) -> WorkerInfo:
    address = urlsplit(member.url)
    return WorkerInfo(
        worker_id=member.instance_id, host=address.hostname or "", port=address.port or 0, role=member.role
    )


def _from_record(value: str) -> WorkerInfo | None:
    try:
        record = msgspec.json.decode(value, type=_WorkerRecord)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    role = _RECORD_ROLES.get(record.role) if isinstance(record.role, int) else record.role.lower()
    return (
        None if role is None else WorkerInfo(worker_id=record.worker_id, host=record.host, port=record.port, role=role)
    )
