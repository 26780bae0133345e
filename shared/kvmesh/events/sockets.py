"""A ZMQ context with room for a fleet: each publisher that is followed takes four sockets, and twice as many files."""

from __future__ import annotations

import resource

import zmq

__all__ = ["make_context"]


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context with as many sockets as ZMQ has numbers for; this process may open as many files as it is allowed to.

    By default there are 1023 sockets in a context, and often 1024 files in a process.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return context
