"""The engine's end of the ZMQ pair to its front process, and the one place where the engine waits."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec
import zmq

from kvmesh.net.doorbell import Doorbell
from kvmesh.protocol.engine import FromEngine, ToEngine

__all__ = ["FrontChannel", "MessageChannel"]


class MessageChannel(Protocol):
    """What the loop waits on, on its thread."""

    @property
    def bell(self) -> Doorbell:
        """Ends the current wait, or the next one if the loop does not wait now; other processes may ring it, too."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a message or the bell is rung, ``timeout_s`` at most; returns whether there is."""
        ...

    def receive(self) -> list[ToEngine]:
        """Everything that has arrived, without waiting. Silences the bell: what it announced is looked at next."""
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
        self.bell = Doorbell()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self.bell.fd, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def wait(self, timeout_s: float) -> bool:
        """See :class:`MessageChannel`."""
        return bool(self._poller.poll(math.ceil(timeout_s * 1000)))

    def receive(self) -> list[ToEngine]:
        """See :class:`MessageChannel`."""
        self.bell.silence()
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
        self.bell.close()
