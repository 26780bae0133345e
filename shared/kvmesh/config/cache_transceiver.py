"""``CacheTransceiverConfig``: how KV cache crosses from a context to a generation server."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvmesh.config.base import StrictModel

__all__ = ["CacheTransceiverConfig", "TransceiverBackend", "TransceiverRuntime"]

TransceiverBackend = Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"]
TransceiverRuntime = Literal["CPP", "PYTHON", "auto"]


class CacheTransceiverConfig(StrictModel):
    """Configuration for the cache transceiver."""

    backend: TransceiverBackend | None = None
    """Communication backend; None turns the transceiver off. ``DEFAULT`` means NIXL for CUDA pools and the built-in
    plane for CPU pools. ``MPI`` is deprecated."""
    transceiver_runtime: TransceiverRuntime | None = "auto"
    """Runtime implementation: ``PYTHON`` moves pages one-sidedly, ``CPP`` (the same as None) goes through a staging
    buffer; ``auto`` takes the model's preference, else PYTHON unless this configuration rules it out. Decided on each
    server by itself: keep context and generation configurations equal."""
    max_tokens_in_buffer: Annotated[int, Field(gt=0)] | None = None
    """Capacity in tokens of each of the two staging buffers of the CPP runtime, at least one page; None: the longest
    sequence. Longer prompts go in pieces. Not used by the PYTHON runtime."""
    kv_transfer_timeout_ms: Annotated[int, Field(gt=0)] | None = 60_000
    """The transfer deadline in milliseconds: for the sender from the hand-off on, for the receiver from asking on; also
    the life of a ticket. None: no deadline, which the PYTHON runtime does not have."""
    kv_transfer_sender_future_timeout_ms: Annotated[int, Field(gt=0)] | None = 1000
    """Length in milliseconds of one bounded wait slice on the sender's side; not a deadline. None means 1000, too."""
    kv_transfer_poll_interval_ms: Annotated[int, Field(gt=0)] | None = 5000
    """Longest wait in milliseconds for transfer progress when transfers block admission. Without this key 5000; a
    stated null means 1000, as in TensorRT-LLM."""
    kv_cache_bounce_size_mb: Annotated[int, Field(ge=0)] = 0
    """Size in MiB of each of the two bounce regions (send, receive) that coalesce scattered pages into one write; 0
    turns bounce off. PYTHON runtime only."""
    enable_pipelined_transfer: bool = False
    """Send each finished prefill chunk while later chunks compute. Needs Python NIXL, generation-first scheduling,
    chunked prefill, no bounce buffer, one pipeline and context-parallel rank, no recurrent-state cache,
    and block reuse off or ``all_reusable``."""
