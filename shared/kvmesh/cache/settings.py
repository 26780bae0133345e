"""The part of ``KvCacheConfig`` that decides how the V2 manager behaves (its size is decided in ``sizing``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmesh.config import KvCacheConfig

__all__ = ["DEFAULT_OFFLOAD_MIN_PRIORITY", "CacheSettings", "ReusePolicy"]

ReusePolicy = Literal["all_reusable", "per_request", "per_conversation"]

DEFAULT_OFFLOAD_MIN_PRIORITY = 30
"""What an unset ``cold_tier_offload_min_priority`` means."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Behaviour of the cache; the fields mean what they mean in ``KvCacheConfig``."""

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    max_util_for_resume: float = 0.95
    policy: ReusePolicy = "all_reusable"
    """``all_reusable``: full blocks are reusable after every commit; the others: once the whole prompt is."""
    max_num_turns: int = 1
    swa_endpoint_rewind_tokens: int = 0
    enable_branch_snapshot: bool = False
    enable_swa_scratch_reuse: bool = False
    cold_tier_offload_min_priority: int = DEFAULT_OFFLOAD_MIN_PRIORITY
    snapshot_interval: int = 0
    """``mamba_state_config.periodic_snapshot_interval``."""
    snapshot_offsets_from_start: tuple[int, ...] = ()
    snapshot_offsets_from_end: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: KvCacheConfig) -> CacheSettings:
        """Take the settings from the public configuration."""
        reuse, states = config.block_reuse_config, config.mamba_state_config
        priority = config.cold_tier_offload_min_priority
        return cls(
            enable_block_reuse=config.enable_block_reuse,
            enable_partial_reuse=config.enable_partial_reuse,
            max_util_for_resume=config.max_util_for_resume,
            policy=reuse.policy,
            max_num_turns=reuse.max_num_turns,
            swa_endpoint_rewind_tokens=reuse.swa_endpoint_rewind_tokens,
            enable_branch_snapshot=reuse.enable_branch_snapshot,
            enable_swa_scratch_reuse=config.enable_swa_scratch_reuse,
            cold_tier_offload_min_priority=DEFAULT_OFFLOAD_MIN_PRIORITY if priority is None else priority,
            snapshot_interval=states.periodic_snapshot_interval,
            snapshot_offsets_from_start=tuple(states.additional_snapshot_offsets_from_start),
            snapshot_offsets_from_end=tuple(states.additional_snapshot_offsets_from_end),
        )
