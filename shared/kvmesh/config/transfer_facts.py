"""What the choice of backend and runtime needs to know of a server, read from its settings."""

from __future__ import annotations

from typing import Literal

from kvmesh.config.transfer_backend import ServerFacts, installed_backends
from kvmesh.config.worker import WorkerSettings

__all__ = ["server_facts"]


def server_facts(settings: WorkerSettings, pool_device: Literal["cpu", "cuda"]) -> ServerFacts:
    """The facts of a server whose pages lie on ``pool_device``."""
    cache = settings.kv_cache_config
    return ServerFacts(
        pool_device=pool_device,
        installed=installed_backends(),
        enable_chunked_prefill=settings.enable_chunked_prefill,
        cp_size=settings.context_parallel_size,
        pp_size=settings.pipeline_parallel_size,
        reuse_policy=cache.block_reuse_config.policy if cache.enable_block_reuse else "off",
    )
