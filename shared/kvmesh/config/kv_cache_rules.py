"""The rules of ``KvCacheConfig`` that are more than a bound: value checks, migrations and contradictions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmesh.config.errors import warn_config
from kvmesh.config.mamba_state import MambaStateConfig
from kvmesh.config.mixed_precision import MIXED_DTYPE_PREFIX, RETAINED_DTYPES

if TYPE_CHECKING:
    from kvmesh.config.kv_cache import KvCacheConfig

__all__ = [
    "RECURRENT_STATES_WINDOW",
    "check_attention_window",
    "check_pool_ratio",
    "contradictions",
    "drop_periodic_snapshots",
    "migrate_branch_snapshot",
    "migrate_mamba_interval",
    "migrate_offload_priority",
    "normalise_dtype",
    "reject_boolean_windows",
]

RECURRENT_STATES_WINDOW = -0x7FFFFFFF
"""The window value by which TensorRT-LLM marks a recurrent-state layer (0x80000001 as a signed 32-bit integer)."""

_QUANTISED_DTYPES = ("auto", "fp8", "fp8_ds_mla", "nvfp4")
_TORCH_DTYPES = (
    "bfloat16", "bool", "double", "float", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "half",
    "int", "int16", "int32", "int64", "int8", "long", "short", "uint8",
)  # fmt: skip
_MIXED_DTYPES = tuple(MIXED_DTYPE_PREFIX + dtype for dtype in RETAINED_DTYPES)
_KNOWN_DTYPES = frozenset((*_QUANTISED_DTYPES, *_TORCH_DTYPES, *_MIXED_DTYPES))

_RATIO_SUM_TOLERANCE = 1e-6


def reject_boolean_windows(windows: Any) -> Any:
    """Booleans in unvalidated data are no windows, although they would pass for the numbers 0 and 1."""
    if isinstance(windows, (list, tuple)) and any(isinstance(window, bool) for window in windows):
        raise ValueError("max_attention_window values must be integers, not booleans")
    return windows


def check_attention_window(windows: list[int] | None) -> list[int] | None:
    """Every window is positive or :data:`RECURRENT_STATES_WINDOW`."""
    if windows is not None and any(window <= 0 and window != RECURRENT_STATES_WINDOW for window in windows):
        raise ValueError("max_attention_window values must be positive or the recurrent-state marker")
    return windows


def normalise_dtype(dtype: str) -> str:
    """Lower-case and check the data type of the cache."""
    lowered = dtype.lower()
    if lowered not in _KNOWN_DTYPES:
        raise ValueError(
            f"unknown KV cache dtype {dtype!r}; use one of {', '.join((*_QUANTISED_DTYPES, *_MIXED_DTYPES))} "
            "or a torch dtype name such as float16, bfloat16 or float32"
        )
    return lowered


def check_pool_ratio(ratios: list[float] | None) -> list[float] | None:
    """Positive ratios whose sum is 1."""
    if ratios is None:
        return None
    if not all(ratio > 0 for ratio in ratios):
        raise ValueError("pool_ratio values must be positive")
    if not math.isclose(math.fsum(ratios), 1.0, rel_tol=0.0, abs_tol=_RATIO_SUM_TOLERANCE):
        raise ValueError(f"pool_ratio values must sum to 1.0, got {math.fsum(ratios):g}")
    return ratios


def migrate_offload_priority(data: dict[str, Any]) -> dict[str, Any]:
    """Carry ``secondary_offload_min_priority`` over in unvalidated data; both names at once are a contradiction."""
    legacy = data.get("secondary_offload_min_priority")
    if legacy is None:
        return data
    if data.get("cold_tier_offload_min_priority") is not None:
        raise ValueError(
            "Cannot set both cold_tier_offload_min_priority and its deprecated alias secondary_offload_min_priority"
        )
    warn_config("secondary_offload_min_priority is deprecated; use cold_tier_offload_min_priority")
    return data | {"cold_tier_offload_min_priority": legacy}


def migrate_mamba_interval(data: dict[str, Any]) -> dict[str, Any]:
    """Carry ``mamba_state_cache_interval`` over in unvalidated data; both names at once are a contradiction."""
    legacy = data.get("mamba_state_cache_interval")
    if legacy is None:
        return data
    state = data.get("mamba_state_config", {})
    stated = state.model_fields_set if isinstance(state, MambaStateConfig) else state
    if not isinstance(stated, (dict, set)):
        return data  # not a configuration at all: the field's own validation says so
    if "periodic_snapshot_interval" in stated:
        raise ValueError(
            "Cannot set both mamba_state_config.periodic_snapshot_interval and its deprecated alias "
            "mamba_state_cache_interval"
        )
    warn_config("mamba_state_cache_interval is deprecated; use mamba_state_config.periodic_snapshot_interval")
    if isinstance(state, MambaStateConfig):
        state = {name: getattr(state, name) for name in state.model_fields_set}
    return data | {"mamba_state_config": state | {"periodic_snapshot_interval": legacy}}


def migrate_branch_snapshot(config: KvCacheConfig) -> None:
    """Carry ``mamba_state_config.enable_branch_snapshot`` over.

    Without block reuse the old flag never had an effect, so it is dropped then instead of being refused.
    """
    if not (config.mamba_state_config.enable_branch_snapshot and config.enable_block_reuse):
        return
    if config.block_reuse_config.enable_branch_snapshot:
        return
    warn_config(
        "mamba_state_config.enable_branch_snapshot is deprecated; use block_reuse_config.enable_branch_snapshot"
    )
    config.block_reuse_config = config.block_reuse_config.model_copy(update={"enable_branch_snapshot": True})


def drop_periodic_snapshots(config: KvCacheConfig) -> None:
    """Conversation reuse keeps explicit stable boundaries only."""
    if config.block_reuse_config.policy != "per_conversation":
        return
    if config.mamba_state_config.periodic_snapshot_interval != 0:
        warn_config(
            "block_reuse_config.policy per_conversation keeps no periodic snapshots: "
            "mamba_state_config.periodic_snapshot_interval becomes 0"
        )
        # Replaced, not mutated: the nested object may be the caller's own.
        config.mamba_state_config = config.mamba_state_config.model_copy(update={"periodic_snapshot_interval": 0})


def contradictions(config: KvCacheConfig) -> list[str]:
    """Every combination of fields that can never work, as one sentence each."""
    problems: list[str] = []
    reuse = config.block_reuse_config
    if config.disk_cache_size:
        if config.disk_cache_path is None:
            problems.append("disk_cache_path must be set when disk_cache_size is positive")
        elif not Path(config.disk_cache_path).is_dir():
            problems.append(f"disk_cache_path {config.disk_cache_path!r} is not an existing directory")
    if config.dtype == "fp8_ds_mla" and config.enable_kv_pool_rebalance:
        problems.append("enable_kv_pool_rebalance cannot be used with dtype fp8_ds_mla, whose pool views are fixed")
    if config.mixed_precision_kv and config.mixed_precision_first_n + config.mixed_precision_last_n == 0:
        problems.append(
            "a mixed-precision KV cache must retain at least one token: "
            "mixed_precision_first_n and mixed_precision_last_n are both 0"
        )
    if config.mamba_state_config.has_additional_offsets and not config.may_use_v2:
        problems.append("additional snapshot offsets require V2: use_kv_cache_manager_v2 is False")
    if reuse.enable_branch_snapshot and not (config.may_use_v2 and config.enable_block_reuse):
        problems.append(
            "block_reuse_config.enable_branch_snapshot requires enable_block_reuse and use_kv_cache_manager_v2"
        )
    if reuse.swa_endpoint_rewind_tokens > 0 and not (
        config.may_use_v2 and config.enable_block_reuse and reuse.policy == "all_reusable"
    ):
        problems.append(
            "block_reuse_config.swa_endpoint_rewind_tokens requires use_kv_cache_manager_v2, enable_block_reuse "
            "and policy all_reusable"
        )
    return problems
