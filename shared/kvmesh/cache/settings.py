"""The part of ``KvCacheConfig`` that decides how the V2 manager behaves (its size is decided in ``sizing``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmesh.config import KvCacheConfig

__all__ = ["CacheSettings", "ReusePolicy"]

ReusePolicy = Literal["all_reusable", "per_request"]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Behaviour of the cache; the fields mean what they mean in ``KvCacheConfig``."""

    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    max_util_for_resume: float = 0.95
    policy: ReusePolicy = "all_reusable"
    """``all_reusable``: full blocks are reusable after every commit; ``per_request``: once the whole prompt is."""

    @classmethod
    def from_config(cls, config: KvCacheConfig) -> CacheSettings:
        """Take the settings from the public configuration.

        Raises:
            ValueError: the policy is not supported yet.
        """
        policy = config.block_reuse_config.policy
        if policy == "per_conversation":
            raise ValueError("not supported yet: kv_cache_config.block_reuse_config.policy 'per_conversation'")
        return cls(
            enable_block_reuse=config.enable_block_reuse,
            enable_partial_reuse=config.enable_partial_reuse,
            max_util_for_resume=config.max_util_for_resume,
            policy=policy,
        )
