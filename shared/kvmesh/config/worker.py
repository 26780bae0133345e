"""``WorkerSettings``: one context, generation or unrestricted server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvmesh.config.base import StrictModel
from kvmesh.config.cache_transceiver import CacheTransceiverConfig
from kvmesh.config.curve import CurveSettings
from kvmesh.config.endpoints import HttpUrls, Port
from kvmesh.config.kv_cache import KvCacheConfig
from kvmesh.config.service import DEFAULT_MODEL, Seconds, TracedSettings

__all__ = ["DEFAULT_CPU_MEMORY_BYTES", "EventWireSettings", "WorkerRole", "WorkerSettings"]

DEFAULT_CPU_MEMORY_BYTES = 1 << 30
"""Cache memory of a CPU "device" when none is stated: 46,000 tokens of the default model in float32, on any laptop."""

WorkerRole = Literal["context", "generation", "both"]


class EventWireSettings(StrictModel):
    """How streamed KV events look on the wire, for consumers that expect another engine's habits."""

    topic_style: Literal["plain", "kv"] = "plain"
    """Topic when ``kv_events_config.topic`` is empty: ``plain`` leaves it empty, ``kv`` is ``kv@HOST:PORT@MODEL``."""
    hash_sign: Literal["unsigned", "signed"] = "unsigned"
    """Whether 64-bit block hashes are sent as unsigned or as two's complement signed integers."""
    event_encoding: Literal["map", "array"] = "map"
    """Tagged maps, or positional arrays for older consumers."""
    tier_moves: Literal["publish", "device_only"] = "publish"
    """What is told of a block that moves between device, host and disk. ``publish``: it is stored in the new medium and
    then removed from the old one. ``device_only``: nothing, and every block is in ``GPU`` until it is gone, as in
    TensorRT-LLM."""
    key_file: str | None = None
    """File of keys, as ``kvmesh keys events FILE`` makes it: the stream then tells keyed names of blocks instead of
    tokens, adapters and salts, by the first key of the file. Only KVMesh's readers that have the key can use it. Unset:
    tokens are told."""


class WorkerSettings(TracedSettings):
    """Settings of a context server, a generation server, or one with no role restriction."""

    role: WorkerRole = "both"
    """Which requests it takes: prefill only, decode only, or whole requests as well."""
    model: str = DEFAULT_MODEL
    """Name of a known model, a directory in Hugging Face layout, or a GGUF file."""
    served_model_name: str | None = None
    """Name that clients use; unset: the model's own name."""
    port: Port = 0
    """Port of the HTTP face; 0 lets the system choose."""
    instance_id: str | None = None
    """Stable name in the mesh; unset: role, host name and a random suffix."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; ``auto`` takes CUDA where there is a GPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations; ``auto`` is the checkpoint's on CUDA and float32 on the CPU."""
    device_memory_bytes: Annotated[int, Field(gt=0)] | None = None
    """Byte budget of a CPU device, from which ``free_gpu_memory_fraction`` takes its share; unset: 1 GiB. Attention
    data-parallel ranks divide it evenly, tensor and pipeline ranks by what they keep of a token. On CUDA the device's
    own free memory counts."""
    num_threads: Annotated[int, Field(gt=0)] | None = None
    """CPU threads of the server's engine, or of its attention data-parallel ranks together; unset: all cores it may
    use."""
    max_batch_size: Annotated[int, Field(gt=0)] = 64
    """Most requests that run in one step."""
    max_num_tokens: Annotated[int, Field(gt=0)] = 512
    """Most tokens computed in one step; prompts are prefilled in chunks of at most this size."""
    max_seq_len: Annotated[int, Field(gt=0)] | None = None
    """Longest sequence, prompt and answer together, in tokens; unset: the model's own limit."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be prefilled over several steps."""
    scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = "max_utilization"
    """``max_utilization`` admits more and pauses requests when pages run out; ``guaranteed_no_evict`` reserves room for
    the longest possible answer at admission."""
    enable_prefix_aware_scheduling: bool = True
    """Whether a prompt waits for another one that is computing the same beginning, and cached tokens cost nothing of a
    step's ``max_num_tokens``. Without block reuse it has no effect."""
    transfer_plane: Literal["auto", "memfd", "tcp"] = "auto"
    """Way of the built-in data plane: shared memory on one host, TCP otherwise; ``auto`` picks per peer."""
    transfer_checksums: bool = True
    """Whether received pages are checked against the sender's checksums."""
    transfer_bind_host: str = "127.0.0.1"
    """Address that the transfer sockets bind, and that other servers are told; ``0.0.0.0`` stands for this machine's
    own address."""
    coordinator_url: HttpUrls | None = None
    """Coordinator to register with, or several with commas between; unset: the server stands alone."""
    cluster_secret: Annotated[str | None, Field(min_length=1, repr=False)] = None
    """Secret that signs transfer tickets, equal on all servers of a mesh. Prefer ``cluster_secret_file``."""
    cluster_secret_file: str | None = None
    """File that holds the cluster secret; read where ``cluster_secret`` is unset."""
    request_timeout_s: Seconds = 180.0
    """Deadline of one request in seconds."""
    max_queue: Annotated[int, Field(gt=0)] = 1024
    """Most requests that wait for admission; more are answered 429."""
    max_unread_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of its cache that a context server lends to finished prompts until they are fetched. Beyond it prompts
    start one at a time, so that a generation server that never fetches does not starve the others."""
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    """The KV cache."""
    cache_transceiver_config: CacheTransceiverConfig = Field(default_factory=CacheTransceiverConfig)
    """The KV cache transfer between servers."""
    events: EventWireSettings = Field(default_factory=EventWireSettings)
    """The wire format of streamed KV events."""
    curve: CurveSettings = Field(default_factory=CurveSettings)
    """Encryption of the ZeroMQ sockets of KV events."""
    tensor_parallel_size: Annotated[int, Field(gt=0)] = 1
    """Tensor-parallel ranks: processes that share the heads and columns of every layer (CPU only)."""
    pipeline_parallel_size: Annotated[int, Field(gt=0)] = 1
    """Pipeline stages: groups of tensor-parallel ranks that share the layers (CPU only)."""
    context_parallel_size: Annotated[int, Field(gt=0)] = 1
    """Context-parallel ranks."""
    enable_attention_dp: bool = False
    """Whether the ``tensor_parallel_size`` ranks share the requests instead of each layer: each has the whole model and
    its own scheduler, cache, transceiver and event port, and a request belongs to one of them."""

    @property
    def dp_size(self) -> int:
        """Attention data-parallel ranks: engines that share the requests."""
        return self.tensor_parallel_size if self.enable_attention_dp else 1

    @property
    def ranks_per_engine(self) -> int:
        """Processes that compute every step of one engine together: tensor ranks times pipeline stages."""
        return self.world_size // self.dp_size

    @property
    def world_size(self) -> int:
        """Ranks of all kinds together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def read_cluster_secret(self) -> Self:
        """Take the cluster secret from its file, so that everyone finds it in one place."""
        if self.cluster_secret is None and self.cluster_secret_file is not None:
            try:
                secret = Path(self.cluster_secret_file).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ValueError(
                    f"cannot read cluster_secret_file {self.cluster_secret_file}: {error.strerror or error}"
                ) from error
            if not secret:
                raise ValueError(f"cluster_secret_file {self.cluster_secret_file} is empty")
            self.cluster_secret = secret
        return self
