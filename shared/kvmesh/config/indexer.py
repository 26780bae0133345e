"""``IndexerSettings``: the KV event indexer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

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
    max_memory_bytes: Annotated[int, Field(gt=0)] = 1 << 30
    """Bound of the index in bytes; blocks beyond it are not taken in, so that the index claims less, never more."""
