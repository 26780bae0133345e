"""What a server refuses when it starts (semantics §2.1, §2b, §7 T12)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmesh.config import (
    CacheTransceiverConfig,
    ConfigError,
    KvCacheConfig,
    MeshSettings,
    NotSupportedYetError,
    RouterSettings,
    WorkerSettings,
)
from kvmesh.config.cache_effects import model_settings_without_effect
from kvmesh.config.event_ports import event_port_problems
from kvmesh.config.startup import refuse_impossible, refuse_unsupported, settings_without_effect


def worker(cache: dict[str, Any] | None = None, transfer: dict[str, Any] | None = None, **own: Any) -> WorkerSettings:
    return WorkerSettings(
        kv_cache_config=KvCacheConfig.model_validate(cache or {}),
        cache_transceiver_config=CacheTransceiverConfig.model_validate(transfer or {}),
        **own,
    )


TWO_RANKS = {"enable_attention_dp": True, "tensor_parallel_size": 2}

SUPPORTED_CACHE: list[dict[str, Any]] = [
    {},
    {"enable_block_reuse": False},
    {"max_tokens": 1000, "free_gpu_memory_fraction": None},
    {"max_gpu_total_bytes": 1 << 20},
    {"enable_partial_reuse": False, "copy_on_partial_reuse": False},
    {"tokens_per_block": 64},
    {"max_attention_window": [256, 4096]},
    {"max_util_for_resume": 0.5},
    {"fp8_context_mla_kv_len_cap": 100},
    {"iteration_stats_interval": 5},
    {"kv_events_config": {"enable_kv_cache_events": True, "topic": "t", "hwm": 5, "replay_endpoint": "tcp://*:5657"}},
    {"kv_cache_event_hash_algo": "v1_block_key"},
    {"kv_cache_event_hash_algo": "v2_sha256"},
    {"kv_cache_event_hash_algo": "v2_sha256_64"},
    {"event_buffer_max_size": 16384, "attention_dp_events_gather_period_ms": 6},
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"block_reuse_config": {"policy": "per_request"}},
    {"host_cache_size": 1},
    {"cold_tier_offload_min_priority": 30},
    {"use_kv_cache_manager_v2": False},
    {"use_kv_cache_manager_v2": "auto"},
    {"enable_swa_scratch_reuse": True},
    {"enable_kv_pool_rebalance": True},
    {"kv_pool_rebalance_config": {"check_interval": 5}},
    {"disk_prefetch_num_reqs": 1},
    {"pool_ratio": [1.0]},
    {"avg_seq_len": 100},
    {"block_reuse_config": {"policy": "per_conversation"}},
    {"block_reuse_config": {"max_num_turns": 2}},
    {"block_reuse_config": {"swa_endpoint_rewind_tokens": 2}},
    {"block_reuse_config": {"enable_branch_snapshot": True}},
    {"use_uvm": True, "sink_token_length": 4},
    {"host_cache_size": 0, "disk_cache_size": 0, "disk_cache_path": "/nope"},
    {"enable_block_reuse": False, "mamba_state_config": {"enable_branch_snapshot": True}},
]

UNSUPPORTED_CACHE: list[dict[str, Any]] = [
    {"dtype": "fp8"},
    {"dtype": "float64"},
    {"mixed_precision_first_n": 1},
    {"mixed_precision_last_n": 1},
    {"mamba_ssm_cache_dtype": "float16"},
    {"mamba_ssm_stochastic_rounding": True},
    {"mamba_ssm_philox_rounds": 7},
    {"mamba_state_config": {"periodic_snapshot_interval": 256}},
    {"mamba_state_config": {"additional_snapshot_offsets_from_start": [1]}},
    {"mamba_state_config": {"additional_snapshot_offsets_from_end": [1]}},
    {"cross_kv_cache_fraction": 0.5},
]


@pytest.mark.parametrize("cache", SUPPORTED_CACHE, ids=str)
def test_what_is_built_starts(cache: dict[str, Any]) -> None:
    refuse_unsupported(worker(cache))


@pytest.mark.parametrize("cache", UNSUPPORTED_CACHE, ids=str)
def test_what_is_not_built_is_refused(cache: dict[str, Any]) -> None:
    """No field may be silently ignored."""
    (name,) = cache
    with pytest.raises(NotSupportedYetError, match=rf"not supported yet: kv_cache_config\.{name}"):
        refuse_unsupported(worker(cache, max_seq_len=2048))


def test_a_disk_tier_starts(tmp_path: Path) -> None:
    refuse_unsupported(worker({"disk_cache_size": 1, "disk_cache_path": str(tmp_path)}))


@pytest.mark.filterwarnings("ignore::kvmesh.config.ConfigWarning")
@pytest.mark.parametrize(
    ("legacy", "named"),
    [
        ({"mamba_state_cache_interval": 256}, "mamba_state_config.periodic_snapshot_interval=256"),
    ],
)
def test_aliases_are_refused_under_their_new_name(legacy: dict[str, Any], named: str) -> None:
    with pytest.raises(NotSupportedYetError) as caught:
        refuse_unsupported(worker(legacy))
    assert str(caught.value) == f"not supported yet: kv_cache_config.{named}"


def test_every_cache_field_is_either_built_or_refused() -> None:
    """The two lists above leave no field out."""
    tried = {name for cache in (*SUPPORTED_CACHE, *UNSUPPORTED_CACHE) for name in cache}
    aliases = {"secondary_offload_min_priority", "mamba_state_cache_interval"}
    assert tried | aliases == set(KvCacheConfig.model_fields)


def test_the_cache_has_the_data_type_of_its_model() -> None:
    refuse_unsupported(worker({"dtype": "auto"}), cache_dtypes={"bfloat16"})
    refuse_unsupported(worker({"dtype": "BFloat16"}), cache_dtypes={"bfloat16"})
    refuse_unsupported(worker({"dtype": "float32"}))  # judged when the model is known
    words = r"not supported yet: kv_cache_config.dtype='float32' \(this model's cache has bfloat16\)$"
    with pytest.raises(NotSupportedYetError, match=words):
        refuse_unsupported(worker({"dtype": "float32"}), cache_dtypes={"bfloat16"})
    with pytest.raises(NotSupportedYetError) as caught:
        refuse_unsupported(worker({"dtype": "fp8"}), cache_dtypes={"bfloat16"})
    assert str(caught.value).count("kv_cache_config.dtype") == 1


@pytest.mark.parametrize(
    "transfer",
    [
        {},
        {"backend": "DEFAULT"},
        {"backend": "NIXL", "transceiver_runtime": "PYTHON"},
        {"backend": "NIXL", "enable_pipelined_transfer": True},
        {"kv_transfer_timeout_ms": 1, "kv_transfer_sender_future_timeout_ms": 1, "kv_transfer_poll_interval_ms": None},
        {"max_tokens_in_buffer": 2048},
        {"transceiver_runtime": "CPP"},
        {"transceiver_runtime": None},
        {"kv_transfer_timeout_ms": None},
        {"backend": "UCX"},
        {"backend": "MOONCAKE"},
        {"backend": "MPI"},
        {"backend": "NIXL", "kv_cache_bounce_size_mb": 64},
    ],
    ids=str,
)
def test_transfers_that_are_built(transfer: dict[str, Any]) -> None:
    refuse_unsupported(worker(transfer=transfer))


def test_all_blockers_are_in_one_message() -> None:
    with pytest.raises(NotSupportedYetError) as caught:
        refuse_unsupported(worker({"dtype": "fp8", "cross_kv_cache_fraction": 0.5}))
    assert str(caught.value) == (
        "not supported yet: kv_cache_config.cross_kv_cache_fraction=0.5; kv_cache_config.dtype='fp8' "
        "(this version has auto, and the data type that the model is served in)"
    )


@pytest.mark.parametrize("style", ["context_first", "generation_first"])
def test_both_schedule_styles_are_built(style: str) -> None:
    """§5.3."""
    refuse_unsupported(RouterSettings(schedule_style=style))


def test_a_mesh_is_judged_as_all_its_processes() -> None:
    mesh = MeshSettings(
        context=worker({"dtype": "fp8"}),
        aggregated=worker({"dtype": "nvfp4"}),
        generation=worker({"cross_kv_cache_fraction": 0.5}),
    )
    with pytest.raises(NotSupportedYetError) as caught:
        refuse_unsupported(mesh)
    message = str(caught.value)
    assert "context.kv_cache_config.dtype='fp8'" in message
    assert "generation.kv_cache_config.cross_kv_cache_fraction=0.5" in message
    assert "nvfp4" not in message, "there is no unrestricted server"


class TestImpossible:
    """§2.1, the rows that end in "startup"."""

    @pytest.mark.parametrize("size", [0, 1, 48, -32])
    def test_block_size(self, size: int) -> None:
        with pytest.raises(ConfigError, match="tokens_per_block must be a power of two above 1"):
            refuse_impossible(worker({"tokens_per_block": size}), max_seq_len=100)

    @pytest.mark.parametrize("size", [2, 32, 128])
    def test_block_sizes_that_work(self, size: int) -> None:
        refuse_impossible(worker({"tokens_per_block": size}), max_seq_len=100)

    @pytest.mark.parametrize("fraction", [None, 0])
    def test_no_size_at_all(self, fraction: float | None) -> None:
        nothing = {"free_gpu_memory_fraction": fraction}
        with pytest.raises(ConfigError, match="Quota not set"):
            refuse_impossible(worker(nothing), max_seq_len=100)
        refuse_impossible(worker(nothing | {"max_tokens": 64}), max_seq_len=100)
        refuse_impossible(worker(nothing | {"max_gpu_total_bytes": 64}), max_seq_len=100)

    def test_max_tokens_must_be_positive(self) -> None:
        with pytest.raises(ConfigError, match="max_tokens must be positive"):
            refuse_impossible(worker({"max_tokens": 0}), max_seq_len=100)

    def test_average_length_above_the_longest(self) -> None:
        refuse_impossible(worker({"avg_seq_len": 100}), max_seq_len=100)
        with pytest.raises(ConfigError, match="avg_seq_len 101 is above max_seq_len 100"):
            refuse_impossible(worker({"avg_seq_len": 101}), max_seq_len=100)

    def test_cross_attention(self) -> None:
        with pytest.raises(ConfigError, match="must not be set for a decoder-only model"):
            refuse_impossible(worker({"cross_kv_cache_fraction": 0.5}), max_seq_len=100)
        with pytest.raises(ConfigError, match="must be set for an encoder-decoder model"):
            refuse_impossible(worker(), max_seq_len=100, encoder_decoder=True)
        refuse_impossible(worker({"cross_kv_cache_fraction": 0.5}), max_seq_len=100, encoder_decoder=True)

    def test_mixed_precision_needs_v2(self) -> None:
        """§2 dtype: 'mixed_nvfp4_fp8' + V1."""
        with pytest.raises(ConfigError, match="requires use_kv_cache_manager_v2"):
            refuse_impossible(worker({"dtype": "mixed_nvfp4_fp8", "use_kv_cache_manager_v2": False}), max_seq_len=100)

    def test_stochastic_rounding_needs_float16(self) -> None:
        """§2.2."""
        rounding = {"mamba_ssm_stochastic_rounding": True, "mamba_ssm_cache_dtype": "bfloat16"}
        with pytest.raises(ConfigError, match="requires mamba_ssm_cache_dtype float16"):
            refuse_impossible(worker(rounding), max_seq_len=100)

    @pytest.mark.parametrize("size", [{"pipeline_parallel_size": 2}, {"context_parallel_size": 2}])
    def test_events_need_one_pipeline_and_context_rank(self, size: dict[str, int]) -> None:
        """§2.1, decisions 15."""
        refuse_impossible(worker(**size), max_seq_len=100)
        events = {"kv_events_config": {"enable_kv_cache_events": True}}
        with pytest.raises(ConfigError, match="pipeline_parallel_size=1 and context_parallel_size=1"):
            refuse_impossible(worker(events, **size), max_seq_len=100)

    def test_event_ports(self) -> None:
        """§2.1."""
        events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}
        refuse_impossible(worker({"kv_events_config": events}), max_seq_len=100)
        with pytest.raises(ConfigError, match="overlap"):
            refuse_impossible(worker({"kv_events_config": events}, **TWO_RANKS), max_seq_len=100)
        off = {"kv_events_config": events | {"enable_kv_cache_events": False}}
        refuse_impossible(worker(off, **TWO_RANKS), max_seq_len=100)

    def test_buffered_events_need_reuse(self) -> None:
        """§2."""
        refuse_impossible(worker({"event_buffer_max_size": 0, "enable_block_reuse": False}), max_seq_len=100)
        with pytest.raises(ConfigError, match="event_buffer_max_size needs enable_block_reuse"):
            refuse_impossible(worker({"event_buffer_max_size": 1, "enable_block_reuse": False}), max_seq_len=100)

    def test_every_problem_is_in_one_message(self) -> None:
        with pytest.raises(ConfigError, match=r"tokens_per_block.*; .*avg_seq_len"):
            refuse_impossible(worker({"tokens_per_block": 3, "avg_seq_len": 200}), max_seq_len=100)


class TestEventPorts:
    """§7 T12."""

    @pytest.mark.parametrize(
        ("publish", "replay", "ranks_per_host", "overlap"),
        [
            (5557, 5558, 2, True),
            (5557, 5558, 1, False),
            (5557, 5657, 2, False),
            (5558, 5557, 2, True),
            (5557, 5559, 2, False),
            (5557, 5565, 8, False),
            (5557, 5557, 1, True),
        ],
    )
    def test_overlap(self, publish: int, replay: int, ranks_per_host: int, overlap: bool) -> None:
        problems = event_port_problems(
            f"tcp://*:{publish}", f"tcp://127.0.0.1:{replay}", ranks_per_host=ranks_per_host, world_size=ranks_per_host
        )
        assert ["overlap" in problem for problem in problems] == [True] * overlap

    @pytest.mark.parametrize(
        ("publish", "replay", "world_size", "overflow"),
        [
            (65535, None, 2, True),
            (65535, None, 1, False),
            (65534, None, 2, False),
            (65534, None, 3, True),
            (5557, 65535, 2, True),
        ],
    )
    def test_overflow(self, publish: int, replay: int | None, world_size: int, overflow: bool) -> None:
        replay_endpoint = f"tcp://*:{replay}" if replay else None
        problems = event_port_problems(f"tcp://*:{publish}", replay_endpoint, world_size=world_size)
        assert ["above the maximum port 65535" in problem for problem in problems] == [True] * overflow

    @pytest.mark.parametrize("endpoint", ["ipc:///tmp/a", "inproc://a", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"])
    def test_without_a_fixed_port_there_is_nothing_to_judge(self, endpoint: str) -> None:
        assert event_port_problems(endpoint, endpoint, ranks_per_host=8, world_size=8) == []


def test_v1_may_stream_its_events() -> None:
    """§2 kv_events_config is for V2 alone in TensorRT-LLM; workers with V1 are routed to by their events, too."""
    settings = worker({"use_kv_cache_manager_v2": False, "kv_events_config": {"enable_kv_cache_events": True}})
    refuse_unsupported(settings)
    refuse_impossible(settings, max_seq_len=512)
    assert settings_without_effect(settings) == []


def test_settings_without_effect() -> None:
    assert settings_without_effect(worker()) == []
    settings = worker({"use_uvm": True, "sink_token_length": 4}, {"max_tokens_in_buffer": 5}, tensor_parallel_size=2)
    assert settings_without_effect(settings) == [
        "kv_cache_config.sink_token_length=4",
        "kv_cache_config.use_uvm=True",
    ]


TURNS = {"block_reuse_config": {"max_num_turns": 3}}
CONVERSATIONS = {"block_reuse_config": {"policy": "per_conversation", "max_num_turns": 3}}
REBALANCE = {"kv_pool_rebalance_config": {"check_interval": 5}}
DISK = {"disk_cache_size": 1 << 20, "disk_cache_path": "/"}


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        (TURNS, ["block_reuse_config.max_num_turns=3"]),
        (CONVERSATIONS, []),
        (REBALANCE, ["kv_pool_rebalance_config.check_interval=5"]),
        ({**REBALANCE, "enable_kv_pool_rebalance": True}, []),
        ({"disk_cache_path": "/"}, ["disk_cache_path='/'"]),
        ({"disk_prefetch_num_reqs": 2}, ["disk_prefetch_num_reqs=2"]),
        ({"disk_prefetch_num_reqs": 2, "use_kv_cache_manager_v2": False}, []),
        ({"disk_prefetch_num_reqs": 2, **DISK}, []),
        ({"disk_prefetch_num_reqs": 2, **DISK, "enable_block_reuse": False}, ["disk_prefetch_num_reqs=2"]),
        ({**CONVERSATIONS, "enable_block_reuse": False}, ["block_reuse_config.policy='per_conversation'"]),
        ({"cold_tier_offload_min_priority": 5}, []),
        (
            {"cold_tier_offload_min_priority": 5, "enable_partial_reuse": False, "enable_block_reuse": False},
            ["cold_tier_offload_min_priority=5", "enable_partial_reuse=False"],
        ),
        # Suspended sequences use the tiers.
        ({**DISK, "host_cache_size": 1 << 20, "enable_block_reuse": False}, []),
    ],
    ids=str,
)
def test_settings_without_effect_beside_others(cache: dict[str, Any], named: list[str]) -> None:
    notes = settings_without_effect(worker(cache))
    assert [note.split(" (")[0] for note in notes] == [f"kv_cache_config.{field}" for field in named]
    assert all(note.endswith(")") for note in notes), "each says why"


@pytest.mark.parametrize(
    ("cache", "num_pools", "windowed", "named"),
    [
        ({"enable_kv_pool_rebalance": True}, 1, True, ["enable_kv_pool_rebalance=True"]),
        ({"enable_kv_pool_rebalance": True}, 2, True, []),
        ({"enable_swa_scratch_reuse": True}, 1, False, ["enable_swa_scratch_reuse=True"]),
        ({"enable_swa_scratch_reuse": True}, 1, True, []),
        (
            {"block_reuse_config": {"swa_endpoint_rewind_tokens": 8}},
            1,
            False,
            ["block_reuse_config.swa_endpoint_rewind_tokens=8"],
        ),
        ({"block_reuse_config": {"swa_endpoint_rewind_tokens": 8}}, 1, True, []),
        ({"max_attention_window": [8, 16]}, 1, True, []),
        ({"max_attention_window": [8, 16, 32]}, 1, True, ["max_attention_window=[8, 16, 32]"]),
    ],
    ids=str,
)
def test_settings_without_effect_with_a_model_of_two_layers(
    cache: dict[str, Any], num_pools: int, windowed: bool, named: list[str]
) -> None:
    config = KvCacheConfig.model_validate(cache)
    notes = model_settings_without_effect(config, num_layers=2, num_pools=num_pools, windowed=windowed)
    assert [note.split(" (")[0] for note in notes] == [f"kv_cache_config.{field}" for field in named]
