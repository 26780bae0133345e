"""Asks a publisher for the batches that it still keeps, from a sequence number on."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import anyio.lowlevel
import zmq

from kvmesh.events.encoding import END_SEQUENCE, STATE_REQUEST
from kvmesh.events.polling import readable, receive
from kvmesh.net.address import choose_family
from kvmesh.net.curve import CurveSecurity

__all__ = [
    "REPLAY_SILENCE_S",
    "KeptBatch",
    "ReplayAnswer",
    "ReplayFailedError",
    "ReplayRequest",
    "ReplayService",
    "Replays",
]

REPLAY_SILENCE_S = 2.0
"""Longest pause between two answers. A publisher answers between two sends, within 100 ms."""


class ReplayFailedError(ConnectionError):
    """The publisher fell silent before the end of its answer."""


class KeptBatch(NamedTuple):
    """One batch as it was published."""

    sequence: int
    topic: bytes
    payload: bytes


class ReplayAnswer(Protocol):
    """What comes of one request."""

    async def next(self) -> KeptBatch | None:
        """The next kept batch; None at the end.

        Raises:
            ReplayFailedError: the answer broke off.
        """


class Replays(Protocol):
    """Whom a publisher's reader asks for what it has missed."""

    def ask(self, start: int, *, with_state: bool = False) -> AbstractAsyncContextManager[ReplayAnswer]:
        """See :class:`ReplayRequest`."""


class ReplayService:
    """One publisher's, over the network; the arguments are those of :class:`ReplayRequest`."""

    def __init__(
        self,
        endpoint: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        silence_s: float = REPLAY_SILENCE_S,
        security: CurveSecurity | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._context = context
        self._silence_s = silence_s
        self._security = security

    def ask(self, start: int, *, with_state: bool = False) -> ReplayRequest:
        """See :meth:`Replays.ask`."""
        return ReplayRequest(
            self._context, self._endpoint, start, self._silence_s, security=self._security, with_state=with_state
        )


class ReplayRequest:
    """One request on a connection of its own, so that a late answer is never taken for that to a later request.

    Args:
        context: of the socket.
        endpoint: the publisher's replay service.
        start: first sequence number wanted.
        silence_s: longest pause between two answers.
        security: keys, where the publisher asks for some.
        with_state: instead of batches, everything that is held, as one; only KVMesh's publishers understand it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        start: int,
        silence_s: float,
        *,
        security: CurveSecurity | None = None,
        with_state: bool = False,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._request = STATE_REQUEST if with_state else start.to_bytes(8, "big")
        self._silence_s = silence_s
        self._security = security
        self._socket: zmq.Socket[bytes] | None = None

    async def __aenter__(self) -> Self:
        """Ask.

        Raises:
            ReplayFailedError: there is no socket to be had, or the endpoint is none.
        """
        try:
            socket = self._socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            if self._security is not None:
                self._security.apply_client(socket)
            choose_family(socket, self._endpoint)
            socket.connect(self._endpoint)
            socket.send_multipart([b"", self._request])
        except zmq.ZMQError as error:
            if self._socket is not None:
                self._socket.close()
            raise ReplayFailedError(f"{self._endpoint} cannot be asked: {error.strerror}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hang up."""
        if self._socket is not None:
            self._socket.close()

    async def next(self) -> KeptBatch | None:
        """The next kept batch; None at the end.

        Raises:
            ReplayFailedError: nothing came for ``silence_s``, or what came was no answer.
        """
        assert self._socket is not None, "next() is called inside the async with block"
        await anyio.lowlevel.checkpoint()  # a long answer is no reason for other tasks to wait
        while (frames := receive(self._socket)) is None:
            if not await readable(self._socket, timeout_s=self._silence_s):
                raise ReplayFailedError(f"{self._endpoint} was silent for {self._silence_s} s")
        return _parse(frames)


def _parse(frames: list[bytes]) -> KeptBatch | None:
    """``[empty, topic, sequence, payload]``; older engines leave the topic out, some end with an empty frame."""
    if frames and not frames[0]:
        frames = frames[1:]
    if not frames or not frames[-1]:
        return None
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise ReplayFailedError("the answer is not [topic, sequence, payload]")
    sequence = int.from_bytes(frames[-2], "big")
    topic = frames[-3] if len(frames) > 2 else b""
    return None if sequence == END_SEQUENCE else KeptBatch(sequence, topic, frames[-1])
