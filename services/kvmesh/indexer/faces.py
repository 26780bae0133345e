"""Bodies of the indexer's HTTP face, in the shapes that Mooncake's and Dynamo's clients send (``docs/indexer.md``)."""

from __future__ import annotations

from typing import Any

import msgspec

from kvmesh.protocol.match import WorkerMatch

__all__ = ["HashQuery", "Query", "RegisterBody", "Unregister", "query_reply"]

DEFAULT_TENANT = "default"


class RegisterBody(msgspec.Struct, kw_only=True):
    """``POST /register``: follow a worker that no coordinator knows."""

    endpoint: str
    instance_id: str
    modelname: str
    replay_endpoint: str | None = None
    type: str = "vLLM"
    lora_name: str | None = None
    tenant_id: str = DEFAULT_TENANT
    block_size: int | None = None
    dp_rank: int = 0
    additionalsalt: str | None = None


class Unregister(msgspec.Struct, kw_only=True):
    """``POST /unregister``."""

    instance_id: str


class Query(msgspec.Struct, kw_only=True):
    """``POST /query``: who holds how much of these tokens."""

    model: str
    token_ids: list[int]
    lora_name: str | None = None
    lora_id: int | None = None
    tenant_id: str = DEFAULT_TENANT
    instance_id: str | None = None
    block_size: int | None = None
    cache_salt: str | None = None


class HashQuery(msgspec.Struct, kw_only=True):
    """``POST /query_by_hash``: the same for rolling XXH3 hashes."""

    model: str
    seq_hashes: list[int]


def query_reply(matches: list[WorkerMatch], tenant_id: str, instance_id: str | None) -> dict[str, Any]:
    """``{tenant: {instance: {longest_matched, GPU, CPU, DISK, DP: {rank: n}}}}``, all in tokens."""
    instances: dict[str, dict[str, Any]] = {}
    for match in matches:
        if instance_id not in (None, match.instance_id):
            continue
        entry = instances.setdefault(match.instance_id, {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {}})
        entry["longest_matched"] = max(entry["longest_matched"], match.disk_tokens)
        entry["GPU"] = max(entry["GPU"], match.device_tokens)
        entry["CPU"] = max(entry["CPU"], match.host_tokens)
        entry["DISK"] = max(entry["DISK"], match.disk_tokens)
        entry["DP"][str(match.dp_rank)] = match.disk_tokens
    return {tenant_id: instances}
