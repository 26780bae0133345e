"""``KvCacheConfig``: defaults, constraints, validators, aliases and contradictions (semantics §1, §2, §2.1)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvmesh.config import (
    BlockReuseConfig,
    ConfigWarning,
    KvCacheConfig,
    KVEventsConfig,
    KvPoolRebalanceConfig,
    MambaStateConfig,
    MixedPrecisionKV,
    WorkerSettings,
)
from kvmesh.config.kv_cache import NEVER_OFFLOAD
from kvmesh.config.kv_cache_rules import RECURRENT_STATES_WINDOW
from kvmesh.protocol.retention import MAX_PRIORITY

SEED_DEFAULTS: dict[str, Any] = {
    "enable_block_reuse": True,
    "max_tokens": None,
    "max_attention_window": None,
    "sink_token_length": None,
    "free_gpu_memory_fraction": 0.9,
    "host_cache_size": None,
    "disk_cache_size": None,
    "disk_cache_path": None,
    "cross_kv_cache_fraction": None,
    "cold_tier_offload_min_priority": None,
    "secondary_offload_min_priority": None,
    "event_buffer_max_size": 0,
    "attention_dp_events_gather_period_ms": 5,
    "kv_events_config": None,
    "enable_partial_reuse": True,
    "copy_on_partial_reuse": True,
    "use_uvm": False,
    "max_gpu_total_bytes": 0,
    "iteration_stats_interval": 1,
    "dtype": "auto",
    "mixed_precision_first_n": 256,
    "mixed_precision_last_n": 256,
    "mamba_ssm_cache_dtype": "auto",
    "mamba_ssm_stochastic_rounding": False,
    "mamba_ssm_philox_rounds": 10,
    "tokens_per_block": 32,
    "mamba_state_cache_interval": None,
    "mamba_state_config": MambaStateConfig(),
    "use_kv_cache_manager_v2": True,
    "enable_swa_scratch_reuse": False,
    "kv_cache_event_hash_algo": "auto",
    "max_util_for_resume": 0.95,
    "enable_kv_pool_rebalance": False,
    "kv_pool_rebalance_config": KvPoolRebalanceConfig(),
    "disk_prefetch_num_reqs": 0,
    "fp8_context_mla_kv_len_cap": None,
    "pool_ratio": None,
    "avg_seq_len": None,
    "block_reuse_config": BlockReuseConfig(),
}


def test_fields_and_defaults_are_the_seeds() -> None:
    """§2: every field with its default, and no other field."""
    assert KvCacheConfig().__dict__ == SEED_DEFAULTS


@pytest.mark.filterwarnings("ignore::kvmesh.config.ConfigWarning")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attention_window", []),
        ("max_attention_window", [0]),
        ("max_attention_window", [-5]),
        ("max_attention_window", [1.5]),
        ("max_attention_window", [True]),
        ("max_attention_window", [4096, True]),
        ("cold_tier_offload_min_priority", -1),
        ("cold_tier_offload_min_priority", 102),
        ("event_buffer_max_size", -1),
        ("attention_dp_events_gather_period_ms", 0),
        ("attention_dp_events_gather_period_ms", -7),
        ("fp8_context_mla_kv_len_cap", 0),
        ("fp8_context_mla_kv_len_cap", -1),
        ("free_gpu_memory_fraction", 1.2),
        ("free_gpu_memory_fraction", -0.1),
        ("disk_cache_size", -1),
        ("cross_kv_cache_fraction", 1.5),
        ("cross_kv_cache_fraction", -0.5),
        ("max_gpu_total_bytes", -1),
        ("iteration_stats_interval", 0),
        ("dtype", "int3"),
        ("dtype", "mixed_nvfp4_float32"),
        ("mixed_precision_first_n", -1),
        ("mixed_precision_last_n", -1),
        ("mamba_ssm_cache_dtype", "int8"),
        ("mamba_ssm_philox_rounds", 0),
        ("mamba_state_cache_interval", -1),
        ("use_kv_cache_manager_v2", "maybe"),
        ("kv_cache_event_hash_algo", "md5"),
        ("max_util_for_resume", 0),
        ("max_util_for_resume", 1.01),
        ("disk_prefetch_num_reqs", -1),
        ("pool_ratio", []),
        ("pool_ratio", [0.5, 0.6]),
        ("pool_ratio", [1.0, 0]),
        ("pool_ratio", [float("nan"), 1.0]),
        ("avg_seq_len", 0),
        ("tokens_per_block", "many"),
    ],
)
def test_out_of_range_values_are_rejected(field: str, value: Any) -> None:
    """§2 and §2.2: the CHECKs that end in "reject"."""
    with pytest.raises(ValidationError, match=field):
        KvCacheConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("free_gpu_memory_fraction", None),
        ("free_gpu_memory_fraction", 0),
        ("free_gpu_memory_fraction", 1),
        ("max_attention_window", [4096, 256]),
        ("max_attention_window", [4096, RECURRENT_STATES_WINDOW]),
        ("cold_tier_offload_min_priority", 0),
        ("cold_tier_offload_min_priority", MAX_PRIORITY),
        ("cold_tier_offload_min_priority", NEVER_OFFLOAD),
        ("event_buffer_max_size", 0),
        ("attention_dp_events_gather_period_ms", 1),
        ("fp8_context_mla_kv_len_cap", 1),
        ("pool_ratio", [0.7, 0.3]),
        ("pool_ratio", [1.0]),
        ("pool_ratio", [0.7, 0.3 + 5e-7]),
        ("use_kv_cache_manager_v2", "auto"),
        ("use_kv_cache_manager_v2", False),
        ("max_util_for_resume", 1),
        ("host_cache_size", 0),
        ("disk_cache_size", 0),
    ],
)
def test_values_at_the_bounds_are_accepted(field: str, value: Any) -> None:
    """§2: the other side of the same CHECKs; an explicit None fraction is accepted."""
    assert getattr(KvCacheConfig(**{field: value}), field) == value


def test_no_block_has_a_priority_that_is_never_offloaded() -> None:
    assert NEVER_OFFLOAD == MAX_PRIORITY + 1


def test_the_deprecated_offload_priority_has_the_same_bounds() -> None:
    with pytest.raises(ValidationError, match="offload_min_priority"), pytest.warns(ConfigWarning):
        KvCacheConfig(secondary_offload_min_priority=102)


def test_pool_ratio_with_avg_seq_len() -> None:
    """§7 T2: both may be given; which one counts is the manager's business."""
    config = KvCacheConfig(pool_ratio=[1.0], avg_seq_len=256)
    assert (config.pool_ratio, config.avg_seq_len) == ([1.0], 256)


def test_lax_conversions() -> None:
    """decisions 10: types are converted as pydantic does by default."""
    config = KvCacheConfig.model_validate(
        {"max_tokens": "1000", "enable_block_reuse": "false", "tokens_per_block": 64.0}
    )
    assert (config.max_tokens, config.enable_block_reuse, config.tokens_per_block) == (1000, False, 64)


def test_unknown_key_names_the_nearest() -> None:
    """decisions 10: an unknown key is an error; all of them are named at once."""
    with pytest.raises(ValidationError, match="did you mean 'free_gpu_memory_fraction'") as caught:
        KvCacheConfig(free_gpu_mem_fraction=0.5, zzz=1)  # type: ignore[call-arg]
    assert "unknown key 'zzz'; see docs/configuration.md" in str(caught.value)
    with pytest.raises(ValidationError, match="did you mean 'max_num_turns'"):
        KvCacheConfig.model_validate({"block_reuse_config": {"max_turns": 1}})


class TestDtype:
    """§2 dtype and mixed_precision_*."""

    def test_is_lower_cased(self) -> None:
        assert KvCacheConfig(dtype="FP8").dtype == "fp8"

    @pytest.mark.parametrize("dtype", ["auto", "fp8", "fp8_ds_mla", "nvfp4", "float32", "bfloat16", "mixed_nvfp4_fp8"])
    def test_known(self, dtype: str) -> None:
        assert KvCacheConfig(dtype=dtype).dtype == dtype

    def test_layout_of_a_mixed_cache(self) -> None:
        config = KvCacheConfig(dtype="mixed_nvfp4_BFLOAT16", mixed_precision_first_n=40, mixed_precision_last_n=0)
        assert config.mixed_precision_kv == MixedPrecisionKV("bfloat16", 40, 0)
        assert KvCacheConfig(dtype="nvfp4").mixed_precision_kv is None

    def test_retained_blocks(self) -> None:
        """§2: length 1000, 32 tokens a block, first and last 40: blocks 0, 1 and those of tokens 960..999."""
        layout = MixedPrecisionKV("fp8", 40, 40)
        assert [list(part) for part in layout.retained_blocks(1000, 32)] == [[0, 1], [30, 31]]
        assert [list(part) for part in layout.retained_blocks(50, 32)] == [[0, 1], []]
        assert [list(part) for part in MixedPrecisionKV("fp8", 0, 1).retained_blocks(33, 32)] == [[], [1]]
        assert [list(part) for part in MixedPrecisionKV("fp8", 1, 0).retained_blocks(33, 32)] == [[0], []]
        assert [list(part) for part in layout.retained_blocks(0, 32)] == [[], []]

    def test_mixed_must_retain_a_token(self) -> None:
        with pytest.raises(ValidationError, match="must retain at least one token"):
            KvCacheConfig(dtype="mixed_nvfp4_fp8", mixed_precision_first_n=0, mixed_precision_last_n=0)
        KvCacheConfig(dtype="auto", mixed_precision_first_n=0, mixed_precision_last_n=0)

    def test_packed_mla_cannot_be_rebalanced(self) -> None:
        with pytest.raises(ValidationError, match="fp8_ds_mla"):
            KvCacheConfig(dtype="fp8_ds_mla", enable_kv_pool_rebalance=True)


class TestDisk:
    """§2 disk_cache_size, disk_cache_path."""

    def test_needs_an_existing_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ValidationError, match="disk_cache_path must be set"):
            KvCacheConfig(disk_cache_size=1)
        with pytest.raises(ValidationError, match="not an existing directory"):
            KvCacheConfig(disk_cache_size=1, disk_cache_path=str(tmp_path / "nope"))
        KvCacheConfig(disk_cache_size=1, disk_cache_path=str(tmp_path))

    @pytest.mark.parametrize("size", [None, 0])
    def test_path_is_ignored_without_a_size(self, size: int | None) -> None:
        KvCacheConfig(disk_cache_size=size, disk_cache_path="/nope")


class TestDeprecated:
    """§2: deprecated fields and aliases."""

    def test_sink_token_length_warns_when_read(self) -> None:
        config = KvCacheConfig(sink_token_length=4)
        with pytest.warns(DeprecationWarning, match="no effect"):
            assert config.sink_token_length == 4

    def test_use_uvm_is_accepted(self) -> None:
        assert KvCacheConfig(use_uvm=True).use_uvm

    def test_offload_priority_is_copied(self) -> None:
        with pytest.warns(ConfigWarning, match="cold_tier_offload_min_priority"):
            config = KvCacheConfig(secondary_offload_min_priority=35)
        assert config.cold_tier_offload_min_priority == 35
        with pytest.warns(DeprecationWarning, match="cold_tier_offload_min_priority"):
            assert config.secondary_offload_min_priority == 35

    def test_both_offload_priorities_are_rejected(self) -> None:
        with pytest.raises(ValidationError, match="Cannot set both"):
            KvCacheConfig(secondary_offload_min_priority=35, cold_tier_offload_min_priority=35)

    def test_mamba_interval_is_copied(self) -> None:
        """§7 T3."""
        nested = MambaStateConfig(additional_snapshot_offsets_from_end=[0], enable_branch_snapshot=True)
        with pytest.warns(ConfigWarning, match="periodic_snapshot_interval|enable_branch_snapshot"):
            config = KvCacheConfig(mamba_state_cache_interval=256, mamba_state_config=nested)
        assert config.mamba_state_config.periodic_snapshot_interval == 256
        assert config.mamba_state_config.additional_snapshot_offsets_from_end == [0]
        assert config.block_reuse_config.enable_branch_snapshot
        assert nested.periodic_snapshot_interval == 0, "the caller's object is its own"

    @pytest.mark.parametrize("explicit", [0, 256, 512])
    def test_both_mamba_intervals_are_rejected(self, explicit: int) -> None:
        """§7 T3: even an explicit default counts as set."""
        with pytest.raises(ValidationError, match="Cannot set both"):
            KvCacheConfig(
                mamba_state_cache_interval=256,
                mamba_state_config=MambaStateConfig(periodic_snapshot_interval=explicit),
            )

    def test_branch_snapshot_is_copied(self) -> None:
        """§1.3."""
        with pytest.warns(ConfigWarning, match="block_reuse_config.enable_branch_snapshot"):
            config = KvCacheConfig(mamba_state_config=MambaStateConfig(enable_branch_snapshot=True))
        assert config.block_reuse_config.enable_branch_snapshot

    def test_branch_snapshot_without_reuse_is_dropped(self) -> None:
        """§1.3: it never had an effect then, so it is not rejected either."""
        config = KvCacheConfig(
            enable_block_reuse=False, mamba_state_config=MambaStateConfig(enable_branch_snapshot=True)
        )
        assert not config.block_reuse_config.enable_branch_snapshot

    @pytest.mark.filterwarnings("ignore::kvmesh.config.ConfigWarning")
    def test_copied_branch_snapshot_is_judged(self) -> None:
        """§1.3: the copy happens before the check."""
        with pytest.raises(ValidationError, match="enable_branch_snapshot requires"):
            KvCacheConfig(
                use_kv_cache_manager_v2=False, mamba_state_config=MambaStateConfig(enable_branch_snapshot=True)
            )

    @pytest.mark.filterwarnings("ignore::kvmesh.config.ConfigWarning")
    @pytest.mark.parametrize(
        "legacy",
        [
            {"secondary_offload_min_priority": 35},
            {"mamba_state_cache_interval": 256},
            {"mamba_state_config": {"enable_branch_snapshot": True}},
            {"sink_token_length": 4},
        ],
    )
    def test_a_dump_loads_again_in_silence(self, legacy: dict[str, Any]) -> None:
        """§2: aliases are left out of dumps, so a dump neither contradicts itself nor warns again."""
        first = KvCacheConfig.model_validate(legacy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = KvCacheConfig.model_validate_json(first.model_dump_json())
        assert second.model_dump() == first.model_dump()


class TestBlockReuse:
    """§1.3 and its rows of §2.1."""

    def test_defaults(self) -> None:
        assert BlockReuseConfig().model_dump() == {
            "policy": "all_reusable",
            "max_num_turns": 1,
            "swa_endpoint_rewind_tokens": 0,
            "enable_branch_snapshot": False,
        }

    def test_renamed_key_names_its_new_place(self) -> None:
        """§1.3 CHECK D."""
        with pytest.raises(ValidationError, match=r"renamed to kv_cache_config\.block_reuse_config\.policy"):
            BlockReuseConfig.model_validate({"block_reuse_policy": "per_request"})

    @pytest.mark.parametrize(
        "wrong", [{"policy": "never"}, {"max_num_turns": 0}, {"swa_endpoint_rewind_tokens": -1}, {"turns": 1}]
    )
    def test_rejects(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            BlockReuseConfig.model_validate(wrong)

    @pytest.mark.parametrize("contradiction", [{"use_kv_cache_manager_v2": False}, {"enable_block_reuse": False}])
    def test_branch_snapshot_needs_v2_and_reuse(self, contradiction: dict[str, Any]) -> None:
        reuse = BlockReuseConfig(enable_branch_snapshot=True)
        KvCacheConfig(block_reuse_config=reuse, use_kv_cache_manager_v2="auto")
        with pytest.raises(ValidationError, match="enable_branch_snapshot requires"):
            KvCacheConfig(block_reuse_config=reuse, **contradiction)

    @pytest.mark.parametrize(
        ("cache", "policy"),
        [
            ({"use_kv_cache_manager_v2": False}, "all_reusable"),
            ({"enable_block_reuse": False}, "all_reusable"),
            ({}, "per_request"),
        ],
    )
    def test_endpoint_rewind_needs_v2_reuse_and_all_reusable(self, cache: dict[str, Any], policy: Any) -> None:
        KvCacheConfig(block_reuse_config=BlockReuseConfig(swa_endpoint_rewind_tokens=8))
        with pytest.raises(ValidationError, match="swa_endpoint_rewind_tokens requires"):
            KvCacheConfig(block_reuse_config=BlockReuseConfig(swa_endpoint_rewind_tokens=8, policy=policy), **cache)


class TestMambaState:
    """§1.2 and its rows of §2.1."""

    @pytest.mark.parametrize("value", [True, 1.0, "1", 0, -1])
    def test_offsets_from_start_are_strict_positive_integers(self, value: Any) -> None:
        with pytest.raises(ValidationError):
            MambaStateConfig(additional_snapshot_offsets_from_start=[value])

    @pytest.mark.parametrize("value", [False, 0.0, "0", -1])
    def test_offsets_from_end_are_strict_integers(self, value: Any) -> None:
        with pytest.raises(ValidationError):
            MambaStateConfig(additional_snapshot_offsets_from_end=[value])

    def test_offsets_are_accepted(self) -> None:
        config = MambaStateConfig.model_validate(
            {"additional_snapshot_offsets_from_start": [128, 64], "additional_snapshot_offsets_from_end": [0, 32, 500]}
        )
        assert config.additional_snapshot_offsets_from_start == [128, 64]
        assert config.additional_snapshot_offsets_from_end == [0, 32, 500]

    def test_interval_is_not_negative(self) -> None:
        with pytest.raises(ValidationError):
            MambaStateConfig(periodic_snapshot_interval=-1)

    @pytest.mark.parametrize("side", ["start", "end"])
    def test_offsets_need_v2(self, side: str) -> None:
        state = MambaStateConfig.model_validate({f"additional_snapshot_offsets_from_{side}": [1]})
        KvCacheConfig(mamba_state_config=state, use_kv_cache_manager_v2="auto")
        with pytest.raises(ValidationError, match="additional snapshot offsets require V2"):
            KvCacheConfig(mamba_state_config=state, use_kv_cache_manager_v2=False)

    def test_conversations_keep_no_periodic_snapshots(self) -> None:
        """§7 T3."""
        state = MambaStateConfig(periodic_snapshot_interval=256)
        with pytest.warns(ConfigWarning, match="per_conversation"):
            config = KvCacheConfig(
                mamba_state_config=state, block_reuse_config=BlockReuseConfig(policy="per_conversation")
            )
        assert config.mamba_state_config.periodic_snapshot_interval == 0
        assert state.periodic_snapshot_interval == 256, "the caller's object is its own"

    def test_conversations_drop_a_migrated_interval(self) -> None:
        """§2.1: the legacy name is carried over first."""
        with pytest.warns(ConfigWarning) as caught:
            config = KvCacheConfig(
                mamba_state_cache_interval=256, block_reuse_config=BlockReuseConfig(policy="per_conversation")
            )
        assert len(caught) == 2
        assert config.mamba_state_config.periodic_snapshot_interval == 0


class TestPoolRebalance:
    """§1.1."""

    def test_defaults(self) -> None:
        assert KvPoolRebalanceConfig().model_dump() == {
            "min_sampled_kv_caches": 2000,
            "cooldown_secs": 120.0,
            "target_ratio_update_interval": 100,
            "ratio_threshold": 1.25,
            "moving_average_decay": 0.9999,
            "check_interval": 10,
        }

    @pytest.mark.parametrize(
        "wrong",
        [
            {"min_sampled_kv_caches": -1},
            {"cooldown_secs": -1},
            {"cooldown_secs": float("inf")},
            {"cooldown_secs": float("nan")},
            {"target_ratio_update_interval": 0},
            {"ratio_threshold": 1.0},
            {"ratio_threshold": float("inf")},
            {"moving_average_decay": 0},
            {"moving_average_decay": 1},
            {"check_interval": 0},
            {"kv_pool_rebalance_check_interval": 1},
        ],
    )
    def test_rejects(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            KvPoolRebalanceConfig.model_validate(wrong)

    def test_bounds_are_accepted(self) -> None:
        KvPoolRebalanceConfig(min_sampled_kv_caches=0, cooldown_secs=0, ratio_threshold=1.0001)


@pytest.mark.filterwarnings("ignore::kvmesh.config.ConfigWarning")
@pytest.mark.parametrize(
    "legacy",
    [
        {"secondary_offload_min_priority": 35},
        {"mamba_state_cache_interval": 256},
        {"mamba_state_config": {"enable_branch_snapshot": True}},
    ],
)
def test_a_finished_object_can_become_part_of_another(legacy: dict[str, Any]) -> None:
    """§2: migrations happen once, in whatever object the configuration ends up."""
    config = KvCacheConfig.model_validate(legacy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert WorkerSettings(kv_cache_config=config).kv_cache_config == config


@pytest.mark.parametrize("nonsense", [5, "x", [1]])
def test_nonsense_beside_an_alias(nonsense: Any) -> None:
    """The field's own error is the one reported."""
    with pytest.raises(ValidationError, match="mamba_state_config"):
        KvCacheConfig(mamba_state_cache_interval=256, mamba_state_config=nonsense)


def test_every_contradiction_is_named_at_once() -> None:
    """§2.1: one error lists them all."""
    with pytest.raises(ValidationError) as caught:
        KvCacheConfig(
            disk_cache_size=1,
            dtype="fp8_ds_mla",
            enable_kv_pool_rebalance=True,
            use_kv_cache_manager_v2=False,
            mamba_state_config=MambaStateConfig(additional_snapshot_offsets_from_end=[0]),
        )
    for part in ("disk_cache_path", "fp8_ds_mla", "additional snapshot offsets"):
        assert part in str(caught.value)


def test_nested_events_config() -> None:
    """§2 kv_events_config."""
    config = KvCacheConfig.model_validate({"kv_events_config": {"enable_kv_cache_events": True}})
    assert config.kv_events_config == KVEventsConfig(enable_kv_cache_events=True)
