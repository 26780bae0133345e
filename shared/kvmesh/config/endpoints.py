"""Types of the addresses that settings carry, and the one way to take a port apart."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

__all__ = ["MAX_PORT", "EtcdEndpoints", "HttpUrl", "HttpUrls", "Port", "ZmqEndpoint", "tcp_port", "with_tcp_port"]

MAX_PORT = 65_535

_ZMQ_TRANSPORTS = ("tcp://", "ipc://", "inproc://")


def _normalise_url(url: str) -> str:
    """``host:port`` becomes ``http://host:port``, as TensorRT-LLM writes its server lists."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an HTTP address; write http://HOST:PORT")
    return full.rstrip("/")


def _normalise_urls(urls: str) -> str:
    return ",".join(_normalise_url(url.strip()) for url in urls.split(","))


def _etcd_list(value: Any) -> Any:
    """A list, or one string with commas between; ``etcd://`` is how TensorRT-LLM writes etcd's HTTP address."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        return value
    return tuple(
        item.strip().replace("etcd://", "http://", 1) if isinstance(item, str) else item for item in items if item
    )


def _without_user(url: str) -> str:
    if "@" in url:
        raise ValueError("an etcd endpoint names no user; set etcd_user and etcd_password_file")
    return url


def _check_zmq(endpoint: str) -> str:
    if not endpoint.startswith(_ZMQ_TRANSPORTS):
        raise ValueError(f"{endpoint!r} is not a ZeroMQ endpoint; write tcp://HOST:PORT")
    return endpoint


HttpUrl = Annotated[str, AfterValidator(_normalise_url)]
"""Base URL of an HTTP face without a trailing slash; ``host:port`` is taken as ``http://host:port``."""

HttpUrls = Annotated[str, AfterValidator(_normalise_urls)]
"""One :data:`HttpUrl`, or several with commas between, of which any will do."""

EtcdEndpoints = Annotated[tuple[Annotated[HttpUrl, AfterValidator(_without_user)], ...], BeforeValidator(_etcd_list)]
"""Base URLs of the members of an etcd cluster."""

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
