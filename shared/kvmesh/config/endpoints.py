"""Types of the addresses that settings carry, and the one way to take a port apart."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

__all__ = ["MAX_PORT", "HttpUrl", "Port", "ZmqEndpoint", "tcp_port", "with_tcp_port"]

MAX_PORT = 65_535

_ZMQ_TRANSPORTS = ("tcp://", "ipc://", "inproc://")


def _normalise_url(url: str) -> str:
    """``host:port`` becomes ``http://host:port``, as TensorRT-LLM writes its server lists."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an HTTP address; write http://HOST:PORT")
    return full.rstrip("/")


def _check_zmq(endpoint: str) -> str:
    if not endpoint.startswith(_ZMQ_TRANSPORTS):
        raise ValueError(f"{endpoint!r} is not a ZeroMQ endpoint; write tcp://HOST:PORT")
    return endpoint


HttpUrl = Annotated[str, AfterValidator(_normalise_url)]
"""Base URL of an HTTP face without a trailing slash; ``host:port`` is taken as ``http://host:port``."""

ZmqEndpoint = Annotated[str, AfterValidator(_check_zmq)]
"""A ZeroMQ endpoint: ``tcp://``, ``ipc://`` or ``inproc://``."""

Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
"""A TCP port; 0 lets the system choose."""


def tcp_port(endpoint: str) -> int | None:
    """The port of a ``tcp://`` endpoint; None for other transports and where the system chooses (``*``, 0)."""
    if not endpoint.startswith("tcp://"):
        return None
    _, _, port = endpoint.rpartition(":")
    return int(port) or None if port.isascii() and port.isdigit() else None


def with_tcp_port(endpoint: str, port: int) -> str:
    """The same ``tcp://`` endpoint at another port."""
    host, _, _ = endpoint.rpartition(":")
    return f"{host}:{port}"
