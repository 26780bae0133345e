"""What V1 takes from ``KvCacheConfig``, refuses and ignores (§2, §2.1, §2.2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmesh.cache.v1 import V1Settings, ignored_by_v1
from kvmesh.config import KvCacheConfig
from kvmesh.config.errors import ConfigError

V1 = {"use_kv_cache_manager_v2": False}


def config(**fields: Any) -> KvCacheConfig:
    return KvCacheConfig.model_validate({**V1, **fields})


def test_defaults() -> None:
    """§2 cold_tier_offload_min_priority: None is effectively 30."""
    assert V1Settings.from_config(config()) == V1Settings(
        enable_block_reuse=True,
        enable_partial_reuse=True,
        copy_on_partial_reuse=True,
        cold_tier_offload_min_priority=30,
    )


def test_every_field_is_taken() -> None:
    settings = V1Settings.from_config(
        config(
            enable_block_reuse=False,
            enable_partial_reuse=False,
            copy_on_partial_reuse=False,
            cold_tier_offload_min_priority=0,
        )
    )
    assert settings == V1Settings(
        enable_block_reuse=False,
        enable_partial_reuse=False,
        copy_on_partial_reuse=False,
        cold_tier_offload_min_priority=0,
    )


REFUSED_AT_START: list[dict[str, Any]] = [
    {"enable_swa_scratch_reuse": True},
    {"enable_kv_pool_rebalance": True},
    {"dtype": "mixed_nvfp4_fp8"},
    {"block_reuse_config": {"policy": "per_request"}},
    {"block_reuse_config": {"policy": "per_conversation"}},
]


@pytest.mark.parametrize("fields", REFUSED_AT_START, ids=str)
def test_what_only_v2_has_is_refused_at_start(fields: dict[str, Any]) -> None:
    """§2.2 use_kv_cache_manager_v2, §2 dtype (mixed + V1: startup reject)."""
    with pytest.raises(ConfigError, match=r"only KV cache manager V2 has: .*use_kv_cache_manager_v2: true"):
        V1Settings.from_config(config(**fields))


def test_a_disk_tier_is_refused_at_start(tmp_path: Path) -> None:
    """§2 disk_cache_size: third tier, V2 only."""
    with pytest.raises(ConfigError, match=r"a disk tier \(disk_cache_size=1\)"):
        V1Settings.from_config(config(disk_cache_size=1, disk_cache_path=str(tmp_path)))
    V1Settings.from_config(config(disk_cache_size=0, disk_cache_path=str(tmp_path)))


REFUSED_AT_CONSTRUCTION: list[dict[str, Any]] = [
    {"mamba_state_config": {"additional_snapshot_offsets_from_start": [1]}},
    {"mamba_state_config": {"additional_snapshot_offsets_from_end": [0]}},
    {"block_reuse_config": {"enable_branch_snapshot": True}},
    {"mamba_state_config": {"enable_branch_snapshot": True}},
    {"block_reuse_config": {"swa_endpoint_rewind_tokens": 1}},
]


@pytest.mark.parametrize("fields", REFUSED_AT_CONSTRUCTION, ids=str)
@pytest.mark.filterwarnings("ignore::kvmesh.config.errors.ConfigWarning")
def test_what_only_v2_has_is_refused_at_construction(fields: dict[str, Any]) -> None:
    """§2.1: additional offsets, branch snapshot and endpoint rewind with use_kv_cache_manager_v2 False."""
    with pytest.raises(ValueError, match=r"[Rr]equires? (V2|.*use_kv_cache_manager_v2)"):
        config(**fields)
    # 'auto' may still become V1: then they are refused at start.
    auto = KvCacheConfig.model_validate({"use_kv_cache_manager_v2": "auto", **fields})
    with pytest.raises(ConfigError, match="only KV cache manager V2 has"):
        V1Settings.from_config(auto)


def test_one_message_names_everything() -> None:
    with pytest.raises(ConfigError, match="enable_swa_scratch_reuse; enable_kv_pool_rebalance"):
        V1Settings.from_config(config(enable_swa_scratch_reuse=True, enable_kv_pool_rebalance=True))


@pytest.mark.parametrize("name", ["disk_prefetch_num_reqs", "max_util_for_resume"])
def test_what_has_no_effect_is_named(name: str) -> None:
    settings = config(**{name: 0.5 if name == "max_util_for_resume" else 1})
    assert V1Settings.from_config(settings) == V1Settings()
    [note] = ignored_by_v1(settings)
    assert note.startswith(name)
    assert ignored_by_v1(config()) == []
