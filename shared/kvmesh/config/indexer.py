"""``IndexerSettings``: the KV event indexer."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvmesh.config.curve import CurveSettings
from kvmesh.config.endpoints import HttpUrls, Port, ZmqEndpoint
from kvmesh.config.service import ServiceSettings

__all__ = ["IndexerSettings"]


class IndexerSettings(ServiceSettings):
    """Settings of the KV event indexer."""

    port: Port = 8300
    """Port of the HTTP face."""
    match_endpoint: ZmqEndpoint = "tcp://127.0.0.1:8301"
    """Endpoint that the match service binds."""
    coordinator_url: HttpUrls | None = None
    """Coordinator that knows the publishers, or several with commas between; unset: only those registered over HTTP
    count."""
    curve: CurveSettings = Field(default_factory=CurveSettings)
    """Encryption of the ZeroMQ sockets: the match service, and the streams that the mesh has."""
    event_key_file: str | None = None
    """File of the keys by which workers with ``events.key_file`` name blocks, one a line; unset: such streams cannot be
    read."""
    max_memory_bytes: Annotated[int, Field(gt=0)] = 1 << 30
    """Bound of the index in bytes; blocks beyond it are not taken in, so that the index claims less, never more."""
    publish_endpoint: ZmqEndpoint | None = None
    """Endpoint that binds the merged stream of all workers' events; unset: there is none. It carries prompt tokens."""
    publish_replay_endpoint: ZmqEndpoint | None = None
    """Endpoint that replays the latest of the merged stream; unset: it cannot be replayed."""
    publish_buffer_bytes: Annotated[int, Field(gt=0)] = 64 << 20
    """Bytes of the merged stream that can be replayed."""

    @model_validator(mode="after")
    def require_stream_for_its_replay(self) -> Self:
        """Without a stream there is nothing to replay."""
        if self.publish_replay_endpoint is not None and self.publish_endpoint is None:
            raise ValueError("publish_replay_endpoint requires publish_endpoint")
        return self
