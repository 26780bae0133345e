"""Answers to readers of the merged stream that ask for everything that is held.

The index has no tokens, so every publisher is asked once more. That costs each of them time, so readers that ask
together get the same answer, and answers have a share of the time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import anyio
import anyio.lowlevel
import zmq

from kvmesh.events.allowance import Allowance
from kvmesh.events.encoding import END_SEQUENCE
from kvmesh.events.feeds import Feed
from kvmesh.events.subscriber import Batch
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.telemetry import get_logger

__all__ = ["StateAnswers", "ToldAgain"]

SHARE = 0.2
"""Of the time, in the long run."""

AT_ONCE_S = 2.0
"""Of the time, after a rest."""

ToldAgain = Callable[[], AsyncGenerator[tuple[Feed, Batch | None], None]]
"""Each publisher with None, and then with batches of what it holds."""

_log = get_logger("indexer.merged")


class StateAnswers:
    """Run :meth:`serve` beside whatever receives the requests.

    Args:
        socket: ROUTER with ``router_mandatory``.
        told_again: what is told.
        encode: makes topic and payload of each of that.
        clock: of the share.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        told_again: ToldAgain,
        encode: Callable[[Feed, Batch | None], tuple[bytes, bytes]],
        *,
        clock: Clock | None = None,
    ) -> None:
        self._socket = socket
        self._told_again = told_again
        self._encode = encode
        self._clock = clock or SystemClock()
        self._allowance = Allowance(SHARE, AT_ONCE_S, self._clock)
        self._clients: dict[bytes, None] = {}
        self._last = -1
        self._broken_off_total = 0
        self._asked = anyio.Event()

    def ask(self, client: bytes, last: int) -> None:
        """A reader wants the state.

        Args:
            client: its name on the socket.
            last: number of the stream's latest batch; -1: there was none.
        """
        # An earlier number does for all of them: what comes twice ends in the same state.
        self._last = last if not self._clients else min(last, self._last)
        self._clients[client] = None
        self._asked.set()

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            await self._asked.wait()
            await self._clock.sleep(self._allowance.rest_s())
            clients, self._clients, self._asked = dict(self._clients), {}, anyio.Event()
            began_s = self._clock.monotonic_s()
            try:
                await self._answer(clients, self._last)
            except Exception:
                # Without its end no reader takes the answer for whole.
                _log.exception("the state of the merged stream could not be told")
            self._allowance.spend(self._clock.monotonic_s() - began_s)

    async def _answer(self, clients: dict[bytes, None], last: int) -> None:
        if last >= 0:
            async with aclosing(self._told_again()) as told:
                async for feed, batch in told:
                    topic, payload = self._encode(feed, batch)
                    self._send(clients, [topic, last.to_bytes(8, "big"), payload])
                    await anyio.lowlevel.checkpoint()
        self._send(clients, [b"", END_SEQUENCE.to_bytes(8, "big"), b""])

    def _send(self, clients: dict[bytes, None], frames: list[bytes]) -> None:
        for client in list(clients):
            try:
                self._socket.send_multipart([client, b"", *frames], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                del clients[client]
                self._broken_off_total += 1
                if self._broken_off_total & (self._broken_off_total - 1) == 0:
                    _log.warning(
                        "the state of the merged stream broken off: a reader does not read, or has gone",
                        so_far=self._broken_off_total,
                        error=str(error),
                    )
