"""Where each rank publishes and answers replays, and the checks made before any port is bound."""

from __future__ import annotations

from kvmesh.config.endpoints import MAX_PORT, tcp_port

__all__ = ["EndpointError", "check_port_ranges", "rank_endpoint"]

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


def check_port_ranges(endpoint: str, replay_endpoint: str | None, *, ranks_per_host: int, world_size: int) -> None:
    """Refuse base ports whose ranks run into each other or past the last port.

    Raises:
        EndpointError: naming the endpoints and what to change.
    """
    ports = {name: tcp_port(name) for name in (endpoint, replay_endpoint) if name is not None}
    for name, port in ports.items():
        if port is not None and port + world_size - 1 > MAX_PORT:
            raise EndpointError(
                f"{name!r} with {world_size} ranks needs port {port + world_size - 1}, "
                f"above the maximum port {MAX_PORT}; choose a lower base port"
            )
    publish = tcp_port(endpoint)
    replay = None if replay_endpoint is None else tcp_port(replay_endpoint)
    if publish is not None and replay is not None and abs(publish - replay) < ranks_per_host:
        raise EndpointError(
            f"the port ranges of {endpoint!r} and {replay_endpoint!r} overlap with {ranks_per_host} ranks on a host; "
            f"keep the base ports at least {ranks_per_host} apart"
        )
