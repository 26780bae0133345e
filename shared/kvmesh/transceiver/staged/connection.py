"""A receiver's connection as the owner has it: who is there, which sessions it has opened, what it asks for."""

from __future__ import annotations

import queue
import socket
import threading

from kvmesh.transceiver.planes.sockets import shut
from kvmesh.transceiver.staged.frames import AnswerKind, Request, encode_answer
from kvmesh.transceiver.types import PeerKey

__all__ = ["ReceiverConnection", "SessionKey"]

SessionKey = tuple[int, int]
"""Transfer id and the receiver's session number."""


class ReceiverConnection:
    """One receiver. Frames are written whole, by whichever thread has something to say."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.peer: PeerKey | None = None
        self.sessions: set[SessionKey] = set()
        self.requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.working = False
        """Whether a piece is being gathered or sent, or waits for a room."""
        self.sending_s: float | None = None
        """Since when a piece is being sent."""
        self._writing = threading.Lock()

    def answer(self, kind: AnswerKind, *, tag: int = 0, number: int = 0, text: str = "") -> None:
        """Write a frame; a connection that is gone is noticed by its reader."""
        with self._writing:
            try:
                self.stream.sendall(encode_answer(kind, tag=tag, number=number, text=text))
            except OSError:
                shut(self.stream)
