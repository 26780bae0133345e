"""Builds the channel of a backend. Its library is loaded here, and only then."""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.transceiver.channels.base import BackendName, Channel, Region
from kvmesh.transceiver.planes.builtin import PlaneChoice

__all__ = ["create_channel"]


def create_channel(
    backend: BackendName,
    send: Region,
    receive: Region,
    *,
    name: str,
    bind_host: str,
    connect_timeout_s: float,
    choice: PlaneChoice,
) -> Channel:
    """The channel of ``backend`` over two staging regions.

    Args:
        backend: which library moves the bytes.
        send: this engine's send region.
        receive: its receive region.
        name: of this engine, unique in the mesh.
        bind_host: where it listens.
        connect_timeout_s: bound of connection set-up.
        choice: which way the built-in channel takes.

    Raises:
        PlaneError: the library is missing or does not work here.
    """
    if backend == "BUILTIN":
        from kvmesh.transceiver.channels.builtin import BuiltinChannel

        return BuiltinChannel(
            send, receive, name=name, bind_host=bind_host, connect_timeout_s=connect_timeout_s, choice=choice
        )
    create: Callable[..., Channel]
    if backend == "NIXL":
        from kvmesh.transceiver.channels.nixl import NixlChannel

        create = NixlChannel
    elif backend == "UCX":
        from kvmesh.transceiver.channels.ucx import UcxChannel

        create = UcxChannel
    elif backend == "MOONCAKE":
        from kvmesh.transceiver.channels.mooncake import MooncakeChannel

        create = MooncakeChannel
    else:
        from kvmesh.transceiver.channels.mpi import MpiChannel

        create = MpiChannel
    return create(send, receive, name=name, bind_host=bind_host, connect_timeout_s=connect_timeout_s)
