"""A context with room for a fleet."""

from __future__ import annotations

import resource

import zmq

from kvmesh.events.sockets import make_context


def test_more_sockets_than_by_default() -> None:
    """255 publishers take the 1023 sockets that a context has by default."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    context = make_context()
    sockets = []
    try:
        for _ in range(1100):
            sockets.append(context.socket(zmq.SUB))
    finally:
        for socket in sockets:
            socket.close(0)
        context.term()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
