"""Waiting for ZMQ sockets on an asyncio loop without ``zmq.asyncio``, which costs several times more a message.

A socket's file descriptor only says that something happened inside it: whoever waits must first have received until
nothing was left (:func:`receive` gave None).
"""

from __future__ import annotations

import asyncio

import anyio
import zmq

__all__ = ["readable", "receive"]


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The next message's frames; None when there is none now.

    Raises:
        zmq.ZMQError: the socket does not work any more.
    """
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


async def readable(
    *sockets: zmq.Socket[bytes], timeout_s: float | None = None, happened: asyncio.Event | None = None
) -> bool:
    """Wait until something happens in one of the sockets; False when ``timeout_s`` passed before.

    Args:
        sockets: to wait for.
        timeout_s: longest wait in seconds, None: without bound.
        happened: set by whoever wants to end the wait, too; the caller clears it afterwards.
    """
    loop = asyncio.get_running_loop()
    happened = happened or asyncio.Event()
    descriptors = [socket.FD for socket in sockets]
    try:
        for descriptor in descriptors:
            loop.add_reader(descriptor, happened.set)
        with anyio.move_on_after(timeout_s):
            await happened.wait()
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
    return happened.is_set()
