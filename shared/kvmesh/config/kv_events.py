"""``KVEventsConfig``: streaming (push) publication of KV cache events."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvmesh.config.base import StrictModel

__all__ = ["KVEventsConfig"]


class KVEventsConfig(StrictModel):
    """Configuration for streaming (push-based) KV cache event publishing over ZeroMQ.

    TensorRT-LLM streams with KV cache manager V2 only; this works with both managers.
    """

    enable_kv_cache_events: bool = False
    """Whether to produce and publish KV cache events over the streaming (push) path."""
    publisher: Literal["null", "zmq"] | None = None
    """Publisher implementation; unset means ``zmq`` when events are enabled and ``null`` otherwise."""
    endpoint: Annotated[str, Field(min_length=1)] = "tcp://*:5557"
    """Base ZeroMQ endpoint the publisher binds; each attention-DP rank binds base port + rank, so engines on one host
    need distinct base ports."""
    replay_endpoint: Annotated[str, Field(min_length=1)] | None = None
    """Optional base ZeroMQ endpoint for replay, with the same base port + rank rule; the two base ports must be at
    least ranks-per-host apart."""
    buffer_steps: Annotated[int, Field(gt=0)] = 10_000
    """Number of previously published batches kept for replay."""
    hwm: Annotated[int, Field(gt=0)] = 100_000
    """High-water mark of the publisher socket, in messages; 0 would mean unlimited to ZeroMQ and is refused."""
    max_queue_size: Annotated[int, Field(gt=0)] = 100_000
    """Maximum number of batches queued for background publishing; 0 would be unbounded and is refused."""
    topic: str = ""
    """ZeroMQ subscription topic of the event batches."""

    @model_validator(mode="after")
    def resolve_publisher(self) -> Self:
        """Fill an unset publisher; an explicit one is kept, even ``zmq`` with events disabled."""
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"
        return self
