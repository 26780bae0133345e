"""``KvPoolRebalanceConfig``: thresholds of the pool-ratio auto-tuner."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvmesh.config.base import StrictModel

__all__ = ["KvPoolRebalanceConfig"]


class KvPoolRebalanceConfig(StrictModel):
    """When and how far the manager moves memory between pool groups; used only with ``enable_kv_pool_rebalance``."""

    min_sampled_kv_caches: Annotated[int, Field(ge=0)] = 2000
    """Closed request caches that must have been sampled before an adjustment is considered."""
    cooldown_secs: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 120.0
    """Minimum seconds (monotonic clock) between adjustments; the clock starts when the manager is constructed."""
    target_ratio_update_interval: Annotated[int, Field(gt=0)] = 100
    """Newly sampled caches between two computations of the target ratios."""
    ratio_threshold: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] = 1.25
    """Adjust when any pool group's current/target ratio lies outside (1/threshold, threshold)."""
    moving_average_decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    """Decay of the moving averages of reused length, squared capacity and squared history."""
    check_interval: Annotated[int, Field(gt=0)] = 10
    """Executor iterations between attempts."""
