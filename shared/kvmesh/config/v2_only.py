"""What of ``KvCacheConfig`` only KV cache manager V2 has: asked of V1, it is refused."""

from __future__ import annotations

from collections.abc import Iterator

from kvmesh.config.errors import ConfigError
from kvmesh.config.kv_cache import KvCacheConfig

__all__ = ["refuse_v2_only"]


def refuse_v2_only(config: KvCacheConfig) -> None:
    """Refuse, for a server with V1, every setting whose promise V1 cannot keep (semantics §2, §2.1).

    Raises:
        ConfigError: one message names everything.
    """
    if problems := list(_v2_only(config)):
        raise ConfigError(f"only KV cache manager V2 has: {'; '.join(problems)}; set use_kv_cache_manager_v2: true")


def _v2_only(config: KvCacheConfig) -> Iterator[str]:
    reuse = config.block_reuse_config
    if config.disk_cache_size:
        yield f"a disk tier (disk_cache_size={config.disk_cache_size})"
    if config.enable_swa_scratch_reuse:
        yield "enable_swa_scratch_reuse"
    if config.enable_kv_pool_rebalance:
        yield "enable_kv_pool_rebalance"
    if config.mixed_precision_kv is not None:
        yield f"mixed-precision data types (dtype={config.dtype!r})"
    if reuse.policy != "all_reusable":
        yield f"block_reuse_config.policy={reuse.policy!r}"
    if reuse.swa_endpoint_rewind_tokens:
        yield "block_reuse_config.swa_endpoint_rewind_tokens"
    if reuse.enable_branch_snapshot:
        yield "block_reuse_config.enable_branch_snapshot"
    if config.mamba_state_config.has_additional_offsets:
        yield "additional snapshot offsets in mamba_state_config"
