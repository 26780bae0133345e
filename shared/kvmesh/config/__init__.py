"""Configuration: the public cache, transceiver and event classes, and the settings of every service."""

from __future__ import annotations

from kvmesh.config.block_reuse import BlockReuseConfig
from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.config.errors import ConfigError, ConfigWarning, NotSupportedYetError
from kvmesh.config.kv_cache import KvCacheConfig
from kvmesh.config.kv_events import KVEventsConfig
from kvmesh.config.mamba_state import MambaStateConfig
from kvmesh.config.mixed_precision import MixedPrecisionKV
from kvmesh.config.pool_rebalance import KvPoolRebalanceConfig

__all__ = [
    "BlockReuseConfig",
    "CacheTransceiverConfig",
    "ConfigError",
    "ConfigWarning",
    "KVEventsConfig",
    "KvCacheConfig",
    "KvPoolRebalanceConfig",
    "MambaStateConfig",
    "MixedPrecisionKV",
    "NotSupportedYetError",
]
