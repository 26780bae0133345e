"""``KvCacheConfig``: the KV cache of one server, field by field as in TensorRT-LLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvmesh.config import kv_cache_rules as rules
from kvmesh.config.base import StrictModel
from kvmesh.config.block_reuse import BlockReuseConfig
from kvmesh.config.kv_events import KVEventsConfig
from kvmesh.config.mamba_state import MambaStateConfig
from kvmesh.config.mixed_precision import MixedPrecisionKV
from kvmesh.config.pool_rebalance import KvPoolRebalanceConfig

__all__ = ["NEVER_OFFLOAD", "EventHashAlgo", "KvCacheConfig"]

NEVER_OFFLOAD = 101
"""An offload priority above every priority that a block can have (``kvmesh.protocol.retention.MAX_PRIORITY``)."""

EventHashAlgo = Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"]


class KvCacheConfig(StrictModel):
    """Configuration for the KV cache."""

    enable_block_reuse: bool = True
    """Whether KV cache blocks can be reused for different requests."""
    max_tokens: int | None = None
    """Most tokens stored in the KV cache; the smallest of this and the byte limits counts."""
    max_attention_window: Annotated[list[int], Field(min_length=1)] | None = None
    """Attention window of each layer in tokens, repeated over the layers; only the last tokens are stored. The model's
    sequence length means full attention."""
    sink_token_length: Annotated[int | None, Field(deprecated="sink_token_length has no effect")] = None
    """Deprecated and without effect."""
    free_gpu_memory_fraction: Annotated[float, Field(ge=0, le=1)] | None = 0.9
    """Fraction of the memory that is free after loading the weights; the smallest of this and the other limits counts.
    None sets no such limit."""
    host_cache_size: int | None = None
    """Size of the host tier in bytes; 0 means none, unset means automatic."""
    disk_cache_size: Annotated[int, Field(ge=0)] | None = None
    """Size of the disk tier in bytes (V2 only)."""
    disk_cache_path: str | None = None
    """Existing directory for the files of the disk tier; needed when ``disk_cache_size`` is positive."""
    cross_kv_cache_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Fraction of the cache memory for cross attention; required by encoder-decoder models, refused for others."""
    cold_tier_offload_min_priority: Annotated[int, Field(ge=0, le=NEVER_OFFLOAD)] | None = None
    """Lowest priority of an unreferenced block that may move to a cold tier; unset means 30. Priorities go to 100, so
    that 101 lets none move."""
    secondary_offload_min_priority: Annotated[
        int | None,
        Field(deprecated="use cold_tier_offload_min_priority", exclude=True),
    ] = None
    """Deprecated alias of ``cold_tier_offload_min_priority``."""
    event_buffer_max_size: Annotated[int, Field(ge=0)] = 0
    """Most events kept for the buffered (pull) path; 0 turns the buffer off."""
    attention_dp_events_gather_period_ms: Annotated[int, Field(gt=0)] = 5
    """Period in milliseconds of gathering attention-DP events across ranks."""
    kv_events_config: KVEventsConfig | None = None
    """Streaming (push) publication of KV cache events, by each rank itself. In TensorRT-LLM with V2 only; here with V1,
    too, whose keys have 8 bytes."""
    enable_partial_reuse: bool = True
    """Whether a block that matches only in part can be reused."""
    copy_on_partial_reuse: bool = True
    """Whether a partially matched block in use can be reused after a copy. V2 always copies."""
    use_uvm: bool = False
    """Deprecated and without effect."""
    max_gpu_total_bytes: Annotated[int, Field(ge=0)] = 0
    """Most bytes of device memory for the KV cache; 0 means unset. The smallest limit counts."""
    iteration_stats_interval: Annotated[int, Field(gt=0)] = 1
    """Iterations between two reports of cache statistics; deltas accumulate in between."""
    dtype: str = "auto"
    """Data type of the cache: ``auto`` (the checkpoint's), ``fp8``, ``fp8_ds_mla``, ``nvfp4``, a torch dtype name, or
    ``mixed_nvfp4_<dtype>`` with fp8, float16 or bfloat16. Any case."""
    mixed_precision_first_n: Annotated[int, Field(ge=0)] = 256
    """Mixed precision only: leading tokens of each sequence kept at the retained dtype, block-granular."""
    mixed_precision_last_n: Annotated[int, Field(ge=0)] = 256
    """Mixed precision only: most recent tokens of each sequence kept at the retained dtype, block-granular."""
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Data type of the recurrent-state cache; ``auto`` follows the model's configuration."""
    mamba_ssm_stochastic_rounding: bool = False
    """Stochastic rounding of recurrent-state updates; float16 only."""
    mamba_ssm_philox_rounds: Annotated[int, Field(ge=1)] = 10
    """Philox rounds of the stochastic rounding generator."""
    tokens_per_block: int = 32
    """Tokens per block: a power of two above 1, equal on context and generation servers."""
    mamba_state_cache_interval: Annotated[int | None, Field(ge=0, exclude=True)] = None
    """Deprecated alias of ``mamba_state_config.periodic_snapshot_interval``."""
    mamba_state_config: MambaStateConfig = Field(default_factory=MambaStateConfig)
    """Reusable recurrent-state snapshots."""
    use_kv_cache_manager_v2: bool | Literal["auto"] = True
    """True selects V2, False V1, ``auto`` the model's preference (V1 when it has none)."""
    enable_swa_scratch_reuse: bool = False
    """Whether sliding-window blocks of a prefill that leave the window share scratch slots (V2 only)."""
    kv_cache_event_hash_algo: EventHashAlgo = "auto"
    """Block hash of KV cache manager events; ``auto`` is the manager's own: ``v1_block_key`` or ``v2_sha256``."""
    max_util_for_resume: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Highest utilisation of any pool group at which a suspended sequence may resume (V2 only)."""
    enable_kv_pool_rebalance: bool = False
    """Let the auto-tuner move memory between pool groups (V2 only)."""
    kv_pool_rebalance_config: KvPoolRebalanceConfig = Field(default_factory=KvPoolRebalanceConfig)
    """Thresholds of that auto-tuner."""
    disk_prefetch_num_reqs: Annotated[int, Field(ge=0)] = 0
    """Queued context requests whose disk-tier blocks are fetched to the host ahead of time; 0 turns it off."""
    fp8_context_mla_kv_len_cap: Annotated[int, Field(gt=0)] | None = None
    """Cap, in tokens, of the summed attended KV length per step that the fp8 context-MLA workspace is reserved for."""
    pool_ratio: Annotated[list[float], Field(min_length=1)] | None = None
    """Initial hot-tier byte ratios by layer group; each positive, sum 1. Takes precedence over ``avg_seq_len``."""
    avg_seq_len: Annotated[int, Field(gt=0)] | None = None
    """Average total sequence length of the workload, for sizing layer groups; at most the sequence length."""
    block_reuse_config: BlockReuseConfig = Field(default_factory=BlockReuseConfig)
    """Block reuse policies (V2 only)."""

    @property
    def mixed_precision_kv(self) -> MixedPrecisionKV | None:
        """Layout of a mixed-precision KV cache, else None."""
        return MixedPrecisionKV.from_dtype(self.dtype, self.mixed_precision_first_n, self.mixed_precision_last_n)

    @property
    def may_use_v2(self) -> bool:
        """Whether the V2 manager is chosen or left to the model."""
        return self.use_kv_cache_manager_v2 is not False

    validate_max_attention_window_types = field_validator("max_attention_window", mode="before")(
        rules.reject_boolean_windows
    )
    validate_max_attention_window = field_validator("max_attention_window")(rules.check_attention_window)
    validate_dtype = field_validator("dtype")(rules.normalise_dtype)
    validate_pool_ratio = field_validator("pool_ratio")(rules.check_pool_ratio)

    @model_validator(mode="before")
    @classmethod
    def migrate_legacy_offload_min_priority(cls, data: Any) -> Any:
        """Copy the deprecated offload priority into its new field."""
        return rules.migrate_offload_priority(data) if isinstance(data, dict) else data

    @model_validator(mode="before")
    @classmethod
    def migrate_legacy_mamba_interval(cls, data: Any) -> Any:
        """Copy the deprecated Mamba interval into its nested replacement."""
        return rules.migrate_mamba_interval(data) if isinstance(data, dict) else data

    # Pydantic runs after-validators again when a finished object becomes part of another: they change nothing twice.

    @model_validator(mode="after")
    def migrate_mamba_branch_snapshot(self) -> Self:
        """Copy the deprecated Mamba branch snapshot flag into ``block_reuse_config``."""
        rules.migrate_branch_snapshot(self)
        return self

    @model_validator(mode="after")
    def disable_periodic_mamba_snapshots_for_conversations(self) -> Self:
        """Use only explicit stable boundaries for conversation reuse."""
        rules.drop_periodic_snapshots(self)
        return self

    @model_validator(mode="after")
    def reject_contradictions(self) -> Self:
        """Refuse combinations that can never work, each with its own sentence."""
        problems = rules.contradictions(self)
        if problems:
            raise ValueError("; ".join(problems))
        return self
