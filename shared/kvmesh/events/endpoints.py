"""Where each rank publishes and answers replays."""

from __future__ import annotations

from kvmesh.config.endpoints import MAX_PORT

__all__ = ["EndpointError", "rank_endpoint"]

_TRANSPORTS = ("tcp://", "ipc://", "inproc://")


class EndpointError(ValueError):
    """An event endpoint that cannot work, with the reason."""


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
