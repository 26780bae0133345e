"""What a worker tells others about itself: its entry in the membership, its load, and ``/server_info``."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvmesh.config import WorkerSettings
from kvmesh.protocol.engine import EngineReady, EngineStats
from kvmesh.protocol.members import Load, Member
from kvmesh.protocol.ranks import rank_instance_ids
from kvmesh.protocol.version import package_version

__all__ = ["load_of", "member_of", "server_info", "stats_body"]

DIALECT = "kvmesh"
"""Which of a router's adapters speaks to this worker."""


def load_of(stats: EngineStats, *, healthy: bool) -> Load:
    """What a worker is doing now, for its heartbeats."""
    return Load(
        healthy=healthy,
        running=stats.running,
        waiting=stats.waiting,
        in_transfer=stats.in_transfer,
        pages_total=stats.pages_total,
        pages_free=stats.pages_free,
        pages_evictable=stats.pages_evictable,
        prompt_tokens_total=stats.prompt_tokens_total,
        cached_tokens_total=stats.cached_tokens_total,
        generated_tokens_total=stats.generated_tokens_total,
    )


def member_of(
    settings: WorkerSettings, model_name: str, ranks: Sequence[EngineReady], *, epoch: int, url: str
) -> Member:
    """The worker as a member of the mesh, about to register.

    Of several attention data-parallel ranks the endpoints are those of rank 0, from which the others' event endpoints
    follow.
    """
    ready = ranks[0]
    return Member(
        instance_id=settings.instance_id or "",
        role=settings.role,
        url=url,
        epoch=epoch,
        dialect=DIALECT,
        model=model_name,
        compat_digest=ready.layout_digest,
        tokens_per_block=ready.tokens_per_block,
        kv_cache_hash_algo=ready.kv_cache_hash_algo,
        max_batch_size=ready.max_batch_size,
        max_seq_len=_max_seq_len(ranks),
        dp_size=len(ranks),
        tp_size=settings.tensor_parallel_size // len(ranks),
        pp_size=settings.pipeline_parallel_size,
        ctx_info_endpoint=ready.ctx_info_endpoint,
        ctx_addresses=_addresses(ranks),
        transfer_backend=ready.transfer_backend,
        events_endpoint=ready.events_endpoint,
        replay_endpoint=ready.replay_endpoint,
        events_single_group=ready.events_endpoint is not None,
        started_unix_ms=time.time_ns() // 1_000_000,
        pid=os.getpid(),
    )


def server_info(
    settings: WorkerSettings, model_name: str, ranks: Sequence[EngineReady], *, epoch: int
) -> dict[str, Any]:
    """The body of ``/server_info``: TensorRT-LLM's fields, and what a router without a coordinator needs."""
    ready = ranks[0]
    return {
        "instance_id": settings.instance_id,
        "epoch": epoch,
        "role": settings.role,
        "dialect": DIALECT,
        "protocol": ready.protocol,
        "version": package_version(),
        "model": model_name,
        "max_batch_size": ready.max_batch_size,
        "max_num_tokens": ready.max_num_tokens,
        "max_seq_len": _max_seq_len(ranks),
        "tokens_per_block": ready.tokens_per_block,
        "kv_cache_hash_algo": ready.kv_cache_hash_algo,
        "compat_digest": ready.layout_digest,
        "num_pages": sum(rank.num_pages for rank in ranks),
        "page_bytes": ready.page_bytes,
        "device": ready.device,
        "transfer_backend": ready.transfer_backend,
        "events_endpoint": ready.events_endpoint,
        "replay_endpoint": ready.replay_endpoint,
        "events_single_group": ready.events_endpoint is not None,
        "world_size": settings.world_size,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "dp_size": len(ranks),
        "attention_dp_ranks": _ranks(settings.instance_id or "", ranks) if len(ranks) > 1 else [],
        "ctx_addresses": _addresses(ranks),
        "disaggregated_params": {
            "ctx_info_endpoint": [rank.ctx_info_endpoint for rank in ranks if rank.ctx_info_endpoint],
            "ctx_dp_rank": 0 if len(ranks) == 1 else None,
        },
    }


def stats_body(ranks: Sequence[EngineStats], total: EngineStats) -> dict[str, Any]:
    """The body of ``/stats``: the sums over all ranks, and each rank's own where there are several."""
    body = msgspec.structs.asdict(total)
    return body if len(ranks) == 1 else {**body, "attention_dp_ranks": list(ranks)}


def _addresses(ranks: Sequence[EngineReady]) -> list[str]:
    """Base64 of the transceivers' signed addresses, by rank; empty without transceivers."""
    return [base64.b64encode(rank.ctx_address).decode() for rank in ranks if rank.ctx_address]


def _ranks(instance_id: str, ranks: Sequence[EngineReady]) -> list[dict[str, Any]]:
    """What differs between the ranks, by rank."""
    return [
        {
            "instance_id": name,
            "num_pages": rank.num_pages,
            "ctx_info_endpoint": rank.ctx_info_endpoint,
            "events_endpoint": rank.events_endpoint,
            "replay_endpoint": rank.replay_endpoint,
            "pid": rank.pid,
        }
        for name, rank in zip(rank_instance_ids(instance_id, len(ranks)), ranks, strict=True)
    ]


def _max_seq_len(ranks: Sequence[EngineReady]) -> int:
    """Longest sequence in tokens that every rank takes."""
    return min(rank.max_seq_len for rank in ranks)
