"""Configuration: the public cache, transceiver and event classes, and the settings of every service."""

from __future__ import annotations

from kvmesh.config.block_reuse import BlockReuseConfig
from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.config.coordinator import CoordinatorSettings
from kvmesh.config.disagg import DisaggConfig
from kvmesh.config.errors import ConfigError, ConfigWarning, NotSupportedYetError
from kvmesh.config.indexer import IndexerSettings
from kvmesh.config.kv_cache import KvCacheConfig
from kvmesh.config.kv_events import KVEventsConfig
from kvmesh.config.load import load_settings
from kvmesh.config.mamba_state import MambaStateConfig
from kvmesh.config.mesh import MeshSettings
from kvmesh.config.mixed_precision import MixedPrecisionKV
from kvmesh.config.pool_rebalance import KvPoolRebalanceConfig
from kvmesh.config.router import RouterSettings
from kvmesh.config.routing import (
    ConversationPolicy,
    KvCacheAwarePolicy,
    LoadBalancingPolicy,
    RoundRobinPolicy,
    RoutingPolicy,
)
from kvmesh.config.service import DEFAULT_MODEL
from kvmesh.config.worker import DEFAULT_CPU_MEMORY_BYTES, EventWireSettings, WorkerRole, WorkerSettings

__all__ = [
    "DEFAULT_CPU_MEMORY_BYTES",
    "DEFAULT_MODEL",
    "BlockReuseConfig",
    "CacheTransceiverConfig",
    "ConfigError",
    "ConfigWarning",
    "ConversationPolicy",
    "CoordinatorSettings",
    "DisaggConfig",
    "EventWireSettings",
    "IndexerSettings",
    "KVEventsConfig",
    "KvCacheAwarePolicy",
    "KvCacheConfig",
    "KvPoolRebalanceConfig",
    "LoadBalancingPolicy",
    "MambaStateConfig",
    "MeshSettings",
    "MixedPrecisionKV",
    "NotSupportedYetError",
    "RoundRobinPolicy",
    "RouterSettings",
    "RoutingPolicy",
    "WorkerRole",
    "WorkerSettings",
    "load_settings",
]
