"""The engine's end of the ZMQ pair to its front process, and the one place where the engine waits."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from typing import Protocol

import msgspec
import zmq

from kvmesh.protocol.engine import FromEngine, ToEngine

__all__ = ["FrontChannel", "MessageChannel"]


class MessageChannel(Protocol):
    """What the loop waits on. Only :meth:`wake` may be called from other threads than the loop's."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is a message or a wake-up, ``timeout_s`` at most; returns whether there is."""
        ...

    def receive(self) -> list[ToEngine]:
        """Everything that has arrived, without waiting. Takes wake-ups back: what they announced is looked at next."""
        ...

    def send(self, message: FromEngine) -> None:
        """Queue one message to the front; never blocks."""
        ...

    def wake(self) -> None:
        """End the current wait, or the next one if the loop does not wait now; never blocks."""
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
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._closed = False
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def wait(self, timeout_s: float) -> bool:
        """See :class:`MessageChannel`."""
        return bool(self._poller.poll(math.ceil(timeout_s * 1000)))

    def receive(self) -> list[ToEngine]:
        """See :class:`MessageChannel`."""
        with contextlib.suppress(BlockingIOError):  # Raised when nobody has called.
            os.eventfd_read(self._wake)
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

    def wake(self) -> None:
        """See :class:`MessageChannel`; does nothing once the channel is closed."""
        with self._wake_lock:  # A descriptor that was closed may be somebody else's by now.
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Deliver what is queued (one second at most) and close."""
        self._socket.close()
        self._context.term()
        with self._wake_lock:
            self._closed = True
            os.close(self._wake)
