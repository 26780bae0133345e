"""``IndexerSettings``: the KV event indexer."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvmesh.config.curve import CurveSettings
from kvmesh.config.endpoints import HttpUrls, Port, ZmqEndpoint
from kvmesh.config.index import Pause
from kvmesh.config.service import Seconds, ServiceSettings

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
    listen_endpoint: ZmqEndpoint | None = None
    """Endpoint that binds for publishers that connect to their reader. They are known by their topic,
    ``kv@INSTANCE@MODEL``, or registered with ``bind``; unset: every publisher is connected to."""
    max_memory_bytes: Annotated[int, Field(gt=0)] = 1 << 30
    """Bound of the index in bytes; blocks beyond it are not taken in, so that the index claims less, never more."""
    predicted_ttl_s: Seconds = 5.0
    """Seconds for which a predicted prompt counts as held, unless its events come before or it says otherwise."""
    approximate_ttl_s: Seconds = 120.0
    """The same for workers that tell no events: predictions are all that is known of them."""
    anti_entropy_interval_s: Pause = 10.0
    """Seconds between two comparisons with the digest of each worker that offers one; 0: never."""
    snapshot_path: str | None = None
    """File that the index is written to and, on start, read from; unset: a restarted indexer begins with what the
    workers still keep. It tells which tokens prompts share, as hashes."""
    snapshot_interval_s: Pause = 60.0
    """Seconds between two snapshots; 0: only one, when the indexer stops."""
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
