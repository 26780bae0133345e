"""Where each rank publishes and answers replays."""

from __future__ import annotations

from kvmesh.config.endpoints import MAX_PORT

__all__ = ["EndpointError", "check_endpoint", "rank_endpoint"]

_TRANSPORTS = ("tcp://", "ipc://", "inproc://")

_MAX_IPC_PATH = 107
"""Bytes that a Unix socket's address has room for (``man 7 unix``)."""


class EndpointError(ValueError):
    """An event endpoint that cannot work, with the reason."""


def check_endpoint(endpoint: str) -> str:
    """An endpoint that can be connected to: ``tcp://HOST:PORT`` or ``ipc://PATH``.

    Raises:
        EndpointError: it cannot be, whoever listens; the message says why.
    """
    transport, _, address = endpoint.partition("://")
    if transport not in ("tcp", "ipc"):
        raise EndpointError(f"{endpoint!r} is neither tcp://HOST:PORT nor ipc://PATH")
    if not address.isprintable() or " " in address:
        raise EndpointError(f"{endpoint!r} has a character that no address has")
    if transport == "ipc":
        if not 0 < len(address.encode()) <= _MAX_IPC_PATH:
            raise EndpointError(f"the path of an ipc:// endpoint has 1 to {_MAX_IPC_PATH} bytes")
        return endpoint
    host, _, port = address.rpartition(":")
    if host == "*":
        raise EndpointError(f"{endpoint!r} is what its publisher binds; name the host by which it is reached from here")
    if not (host and address.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= MAX_PORT):
        raise EndpointError(f"{endpoint!r} is not tcp://HOST:PORT with a port from 1 to {MAX_PORT}")
    return endpoint


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of one rank: ``tcp`` ports count up from the base, the others get the suffix ``_dpN``.

    ``tcp://HOST:0`` and ``tcp://HOST:*`` let the system choose for every rank.

    Raises:
        EndpointError: unknown transport, no port, or a port above 65535.
    """
    if not endpoint.startswith(_TRANSPORTS):
        raise EndpointError(f"{endpoint!r} is not tcp://HOST:PORT, ipc://PATH or inproc://NAME")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    host, _, port = endpoint.rpartition(":")
    if port in ("0", "*"):
        return f"{host}:*"
    if not (port.isascii() and port.isdigit()):
        raise EndpointError(f"{endpoint!r} has no port; write tcp://HOST:PORT")
    if int(port) + rank > MAX_PORT:
        raise EndpointError(f"{endpoint!r} and rank {rank} give port {int(port) + rank}, above the maximum {MAX_PORT}")
    return f"{host}:{int(port) + rank}"
