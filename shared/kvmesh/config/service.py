"""What the settings of every service have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvmesh.config.base import StrictModel
from kvmesh.config.tls import TlsSettings

__all__ = ["DEFAULT_MODEL", "LogFormat", "LogLevel", "Seconds", "ServiceSettings", "TracedSettings"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""Small enough to answer on two CPU cores."""

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "console"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite, positive duration in seconds."""


class ServiceSettings(StrictModel):
    """Logging, access and shutdown of one service."""

    host: str = "127.0.0.1"
    """Address to bind. Events and transfers carry prompts: bind others only on a trusted network."""
    api_keys_file: str | None = None
    """File of API keys, ``KEY`` or ``NAME KEY`` on each line, read again when it changes; clients then need
    ``Authorization: Bearer KEY``. Metrics show the names. Unset: no key is asked for."""
    tls: TlsSettings = Field(default_factory=TlsSettings)
    """Certificates of the HTTP face and of this service's requests to others."""
    log_level: LogLevel = "info"
    """Least severe log line that is written."""
    log_format: LogFormat = "console"
    """``console`` for people, ``json`` for machines (one object per line)."""
    drain_s: Seconds = 10.0
    """Seconds that running requests get to finish after a termination signal."""


class TracedSettings(ServiceSettings):
    """Settings of a service that takes part in requests, and so in their traces."""

    otlp_endpoint: str | None = None
    """OTLP/HTTP endpoint for traces, such as ``http://127.0.0.1:4318/v1/traces``; unset: none are exported."""
