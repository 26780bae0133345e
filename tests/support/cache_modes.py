"""Ways to run a KV cache, and what must have happened for a run to say anything about each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "MODES", "ROOMY", "Family", "Mode", "check_evidence"]

ALL = ("llama", "llama-windows", "mistral", "gemma2", "gemma3")
WINDOWED = ALL[1:]
TWO_POOLS = ("llama-windows", "gemma2", "gemma3")
ROOMY = 100.0
"""Times the size of a tight cache: nothing ever has to go."""


@dataclass(frozen=True)
class Family:
    """An architecture at a size for tests."""

    builds: str
    """Name in ``tiny_models``."""
    tight_tokens: int
    """``max_tokens`` of a cache in which a handful of requests can run."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration."""
    cache: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family("llama", 140),
    # Windows that the cache's configuration adds to a model without.
    "llama-windows": Family("llama", 140, {"num_hidden_layers": 3}, {"max_attention_window": [19, 128, 128]}),
    "mistral": Family("mistral", 72, {"sliding_window": 33}),
    "gemma2": Family("gemma2", 140),
    "gemma3": Family("gemma3", 140),
}


@dataclass(frozen=True)
class Mode:
    """A configuration of the cache.

    Tiers are given as shares of the device's bytes.
    """

    happened: tuple[str, ...] = ()
    """Counts that must not be zero, of :meth:`watched_engine.WatchedEngine.evidence`."""
    never: tuple[str, ...] = ()
    """Counts that must be zero."""
    cache: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    size: float = 1.0
    """Of the device level, in tight ones."""
    host: float = 0.0
    disk: float = 0.0
    families: tuple[str, ...] = ALL

    def cache_settings(self, device_bytes: int, directory: Path) -> dict[str, Any]:
        """Fields of ``KvCacheConfig`` for a device level of so many bytes, disk files in ``directory``."""
        tiers: dict[str, Any] = {"host_cache_size": int(self.host * device_bytes)}
        if self.disk:
            tiers |= {"disk_cache_size": int(self.disk * device_bytes), "disk_cache_path": str(directory)}
        return {**tiers, **self.cache}


def check_evidence(evidence: dict[str, int], mode: Mode) -> None:
    """What the mode is about happened, and what it must avoid did not."""
    assert [name for name in mode.happened if not evidence.get(name)] == [], evidence
    assert {name: evidence[name] for name in mode.never if evidence.get(name)} == {}


V1 = {"use_kv_cache_manager_v2": False}
NO_EVICT = {"scheduler_policy": "guaranteed_no_evict"}
LONG_CHUNKS = {"max_num_tokens": 48}
"""Longer than any window: else no block of a chunk is behind it at the chunk's end."""
REBALANCE = {
    "enable_kv_pool_rebalance": True,
    "kv_pool_rebalance_config": {
        "min_sampled_kv_caches": 2,
        "cooldown_secs": 0.01,
        "target_ratio_update_interval": 1,
        "ratio_threshold": 1.05,
        "moving_average_decay": 0.7,
        "check_interval": 1,
    },
}
REUSED = ("reused_full_blocks", "reused_partial_blocks")
PRESSED = (*REUSED, "evicted_pages")
SUSPENDED = ("gave_way_with_cache", "went_on")
PAUSED = ("suspended", "resumed")
"""Also by a rebalance."""
TO_HOST = (*PRESSED, "offloaded_pages", "onboarded_pages")
STAYED = ("gave_way_with_cache", "recomputed", "starved", "lost")


def _reuse(**options: Any) -> dict[str, Any]:
    return {"block_reuse_config": options}


MODES = {
    "reuse": Mode((*REUSED, "copied_pages"), (*STAYED, "evicted_pages"), size=ROOMY),
    "whole-blocks": Mode(
        ("reused_full_blocks", "evicted_pages"), ("reused_partial_blocks",), {"enable_partial_reuse": False}
    ),
    "no-reuse": Mode(("allocated_pages",), (*REUSED, "stored_blocks"), {"enable_block_reuse": False}),
    "eviction": Mode((*PRESSED, "recomputed", "dropped_pages"), ("offloaded_pages", "starved")),
    "eviction-no-evict": Mode(PRESSED, (*STAYED, "offloaded_pages"), settings=NO_EVICT),
    "host": Mode((*TO_HOST, *SUSPENDED, "to_host", "from_host", "changed_priorities"), ("starved",), host=1.0),
    "host-no-evict": Mode((*TO_HOST, "to_host"), STAYED, settings=NO_EVICT, host=1.0),
    "disk": Mode((*TO_HOST, *SUSPENDED, "to_disk", "from_disk"), ("starved", "damaged_pages"), disk=2.0),
    "disk-no-evict": Mode((*TO_HOST, "to_disk", "from_disk"), STAYED, settings=NO_EVICT, disk=2.0),
    "host-disk": Mode(
        (*TO_HOST, *SUSPENDED, "to_host", "to_disk", "from_disk"), ("starved", "damaged_pages"), host=0.5, disk=2.0
    ),
    "prefetch": Mode(
        (*TO_HOST, "to_disk", "prefetched"),
        ("starved", "damaged_pages"),
        {"disk_prefetch_num_reqs": 4},
        host=0.5,
        disk=4.0,
    ),
    "threshold": Mode((*TO_HOST, "dropped_pages"), ("starved",), {"cold_tier_offload_min_priority": 36}, host=1.0),
    "scratch": Mode(
        (*PRESSED, "scratch_blocks"),
        ("starved",),
        {"enable_swa_scratch_reuse": True},
        LONG_CHUNKS,
        size=1.4,
        families=WINDOWED,
    ),
    "scratch-host-per-request": Mode(
        ("reused_full_blocks", "scratch_blocks", "offloaded_pages", "onboarded_pages"),
        ("starved",),
        {"enable_swa_scratch_reuse": True, **_reuse(policy="per_request")},
        LONG_CHUNKS,
        size=1.4,
        host=1.0,
        families=WINDOWED,
    ),
    "rebalance": Mode((*PRESSED, "rebalances"), ("starved",), REBALANCE, families=TWO_POOLS),
    "rebalance-tiers": Mode(
        (*TO_HOST, *PAUSED, "rebalances", "to_disk"), ("starved",), REBALANCE, host=0.5, disk=2.0, families=TWO_POOLS
    ),
    "per-request": Mode(PRESSED, ("starved",), _reuse(policy="per_request"), host=1.0),
    # With full attention a turn needs all blocks of those before it.
    "per-conversation": Mode(
        (*PRESSED, "dropped_by_turns"),
        ("starved",),
        _reuse(policy="per_conversation"),
        host=1.0,
        disk=60.0,
        families=WINDOWED,
    ),
    "two-turns": Mode(
        PRESSED, ("starved", "dropped_by_turns"), _reuse(policy="per_conversation", max_num_turns=2), disk=2.0
    ),
    # With full attention a match never ends before the fork.
    "branches": Mode(
        (*PRESSED, "forced_chunks"), ("starved",), _reuse(enable_branch_snapshot=True), host=1.0, families=WINDOWED
    ),
    "rewind": Mode(
        (*PRESSED, "endpoint_blocks"),
        ("starved",),
        _reuse(swa_endpoint_rewind_tokens=6),
        host=1.0,
        families=WINDOWED,
    ),
    "everything": Mode(
        (*TO_HOST, *PAUSED, "rebalances", "scratch_blocks", "forced_chunks", "to_disk", "prefetched"),
        ("starved", "damaged_pages"),
        {
            **REBALANCE,
            "enable_swa_scratch_reuse": True,
            "disk_prefetch_num_reqs": 4,
            **_reuse(enable_branch_snapshot=True, swa_endpoint_rewind_tokens=6),
        },
        host=0.5,
        disk=2.0,
        families=TWO_POOLS,
    ),
    "v1": Mode((*PRESSED, "recomputed"), ("offloaded_pages", "starved"), V1),
    # A block can be claimed while nothing continues it; such blocks are the first to be evicted.
    "v1-claiming": Mode(REUSED, ("starved", "copied_pages"), {**V1, "copy_on_partial_reuse": False}, size=ROOMY),
    "v1-no-evict": Mode(PRESSED, STAYED, V1, NO_EVICT),
    "v1-host": Mode(TO_HOST, ("starved",), V1, host=1.0),
    "v1-host-claiming": Mode(
        ("reused_full_blocks", "evicted_pages", "offloaded_pages", "onboarded_pages"),
        ("starved", "copied_pages"),
        {**V1, "copy_on_partial_reuse": False},
        host=1.0,
    ),
    "v1-host-no-evict": Mode(TO_HOST, STAYED, V1, NO_EVICT, host=1.0),
}
