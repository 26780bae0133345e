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
    """Capacity of the staging buffer in tokens; should be at least the longest prompt. Not used by the PYTHON
    runtime."""
    kv_transfer_timeout_ms: Annotated[int, Field(gt=0)] | None = 60_000
    """The transfer deadline in milliseconds: absolute for blocking sender waits, per task for blocking receiver waits.
    The PYTHON runtime needs a finite value."""
    kv_transfer_sender_future_timeout_ms: Annotated[int, Field(gt=0)] | None = 1000
    """Length in milliseconds of one bounded wait slice on the sender's side; not a deadline. None means 1000."""
    kv_transfer_poll_interval_ms: Annotated[int, Field(gt=0)] | None = 5000
    """Longest wait in milliseconds for transfer progress when transfers block admission. None means 1000."""
    kv_cache_bounce_size_mb: Annotated[int, Field(ge=0)] = 0
    """Size in MiB of each of the two bounce regions (send, receive) that coalesce scattered pages into one write; 0
    turns bounce off. PYTHON runtime only."""
    enable_pipelined_transfer: bool = False
    """Send each finished prefill chunk while later chunks compute. Needs Python NIXL, generation-first scheduling,
    chunked prefill, no bounce buffer, beam width 1, one pipeline and context-parallel rank, no recurrent-state cache,
    and block reuse off or ``all_reusable``."""
