"""Asks the indexer which server holds how much of a prompt. Never a reason to wait: no answer is an answer too.

A DEALER socket carries many questions at a time. A question that is not answered within ``timeout_s`` counts as "nobody
holds anything", and after a few of those in a row the indexer is left alone for a while, then tried with one question.
Without a connection there is no wait either, and no rest: the first question after it is back is asked.
"""

from __future__ import annotations

import asyncio

import anyio
import msgspec
import numpy as np
import zmq
from anyio.abc import TaskStatus

from kvmesh.events.polling import receive
from kvmesh.net.address import choose_family
from kvmesh.net.clock import Clock
from kvmesh.net.curve import CurveSecurity
from kvmesh.protocol.match import ROUTED, MatchReply, MatchRequest, Routed
from kvmesh.router.match import Matcher, Matches, MatchState, Route, best_ranks

__all__ = ["MatchClient"]

FAILURES_TO_REST = 3
FIRST_REST_S = 0.5
MAX_REST_S = 5.0
"""A restarted indexer is used again within this."""
SEND_QUEUE = 64
"""Questions that may wait in the socket; a slower indexer is as good as none."""
RECONNECT_MS = 100
MAX_RECONNECT_MS = 1000
HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 3_000
"""An indexer that vanished without a word (power, network) has no connection after this."""


class _Pending:
    __slots__ = ("arrived", "reply")

    def __init__(self) -> None:
        self.arrived = anyio.Event()
        self.reply: MatchReply | None = None


class MatchClient(Matcher):
    """The indexer behind a ZMQ endpoint. Run :meth:`run` in a task group for as long as it is used.

    Args:
        endpoint: the indexer's match service, such as ``tcp://127.0.0.1:8301``.
        timeout_s: longest wait for an answer.
        clock: measures rests.
        predicted_ttl_s: how long a prompt counts as held by the server that it was sent to, unless its events come.
        security: keys, where the indexer asks for some.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float,
        clock: Clock,
        predicted_ttl_s: float = 0.0,
        security: CurveSecurity | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._clock = clock
        self._predicted_ttl_s = predicted_ttl_s
        self._security = security
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: dict[int, _Pending] = {}
        self._next_id = 0
        self._failures = 0
        self._rest_s = FIRST_REST_S
        self._resting_until_s = 0.0
        self._trying = False
        self._outcomes: dict[MatchState, int] = {"answered": 0, "timed_out": 0, "unreachable": 0, "resting": 0}
        self._routed = 0
        self._routed_lost = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(MatchReply)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Hold the socket and take in replies until cancelled."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = SEND_QUEUE
        # Without a connection a send fails at once instead of piling up questions for an indexer yet to come.
        socket.immediate = 1
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = MAX_RECONNECT_MS
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        loop = self._loop = asyncio.get_running_loop()
        descriptor = socket.FD
        try:
            if self._security is not None:
                self._security.apply_client(socket)
            choose_family(socket, self._endpoint)
            socket.connect(self._endpoint)
            self._socket = socket
            loop.add_reader(descriptor, self._receive_all)
            task_status.started()
            await anyio.sleep_forever()
        finally:
            self._socket = None
            loop.remove_reader(descriptor)
            socket.close()
            context.destroy(linger=0)  # term() would wait for a socket that a failure has left open

    async def match(
        self, model: str, token_ids: np.ndarray, *, lora_id: int | None = None, cache_salt: str | None = None
    ) -> Matches:
        """See :class:`Matcher`."""
        matches = await self._ask(model, token_ids, lora_id, cache_salt)
        self._outcomes[matches.state] += 1
        return matches

    def routed(self, route: Route) -> None:
        """See :class:`Matcher`; lost without a connection, or while the indexer is left alone."""
        if not self._predicted_ttl_s:
            return
        message = Routed(
            instance_id=route.instance_id,
            dp_rank=route.dp_rank,
            model=route.model,
            token_ids=_packed(route.token_ids),
            cache_salt=route.cache_salt,
            ttl_s=self._predicted_ttl_s,
        )
        if self._failures < FAILURES_TO_REST and self._send([ROUTED, self._encoder.encode(message)]):
            self._routed += 1
        else:
            self._routed_lost += 1

    def statistics(self) -> dict[str, float]:
        """Questions by outcome, and prompts that the indexer was told of."""
        return {
            **{f"match_{outcome}_total": float(count) for outcome, count in self._outcomes.items()},
            "routed_told_total": self._routed,
            "routed_lost_total": self._routed_lost,
        }

    async def _ask(self, model: str, token_ids: np.ndarray, lora_id: int | None, cache_salt: str | None) -> Matches:
        if self._failures >= FAILURES_TO_REST and (self._trying or self._clock.monotonic_s() < self._resting_until_s):
            return Matches("resting")
        if self._socket is None:
            return Matches("unreachable")
        self._next_id += 1
        question = MatchRequest(
            id=self._next_id,
            model=model,
            token_ids=_packed(token_ids),
            lora_id=lora_id,
            cache_salt=cache_salt,
        )
        if not self._send([self._encoder.encode(question)]):
            return Matches("unreachable")
        self._trying = self._failures >= FAILURES_TO_REST
        pending = self._pending[question.id] = _Pending()
        try:
            with anyio.move_on_after(self._timeout_s):
                await pending.arrived.wait()
        finally:
            del self._pending[question.id]
            self._trying = False
        if pending.reply is None:
            self._failed()
            return Matches("timed_out")
        self._failures = 0
        self._rest_s = FIRST_REST_S
        return Matches("answered", best_ranks(pending.reply.matches))

    def _send(self, frames: list[bytes]) -> bool:
        """Whether the message could be sent at once."""
        socket, loop = self._socket, self._loop
        if socket is None or loop is None:
            return False
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            # Sending may have used up the descriptor's sign that something has arrived meanwhile.
            loop.call_soon(self._receive_all)
        return True

    def _receive_all(self) -> None:
        while self._socket is not None and (frames := receive(self._socket)) is not None:
            self._receive(frames)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            reply = self._decoder.decode(frames[-1])
        except msgspec.DecodeError:
            return  # not from an indexer of ours; the question runs into its bound
        pending = self._pending.get(reply.id)
        if pending is not None:
            pending.reply = reply
            pending.arrived.set()

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= FAILURES_TO_REST:
            self._resting_until_s = self._clock.monotonic_s() + self._rest_s
            self._rest_s = min(self._rest_s * 2, MAX_REST_S)


def _packed(token_ids: np.ndarray) -> bytes:
    return token_ids.astype("<i4", copy=False).tobytes()
