"""The engine's end of the ZMQ pair to its front process."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec
import zmq

from kvmesh.protocol.engine import FromEngine, ToEngine

__all__ = ["FrontChannel", "MessageChannel"]


class MessageChannel(Protocol):
    """What the loop waits on."""

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """Everything that has arrived, after waiting at most ``timeout_s`` for the first message or a wake-up."""
        ...

    def send(self, message: FromEngine) -> None:
        """Queue one message to the front; never blocks."""
        ...


class FrontChannel:
    """A :class:`MessageChannel` over ZMQ.

    Args:
        endpoint: address that the front process has bound.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # The front bounds what is under way (its queue); a limit here could only block the loop.
        self._socket.set_hwm(0)
        self._socket.linger = 1000
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def wake_on(self, fd: int) -> None:
        """End waits when ``fd`` is readable; whoever owns it reads it."""
        self._poller.register(fd, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """See :class:`MessageChannel`."""
        if timeout_s > 0:
            self._poller.poll(math.ceil(timeout_s * 1000))
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(data))

    def send(self, message: FromEngine) -> None:
        """See :class:`MessageChannel`."""
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        """Deliver what is queued (one second at most) and close."""
        self._socket.close()
        self._context.term()
