"""Asks the indexer which server holds how much of a prompt. Never a reason to wait: no answer is an answer too.

A DEALER socket carries many questions at a time. A question that is not answered within ``timeout_s`` counts as "nobody
holds anything", and after a few of those in a row the indexer is left alone for a while, then tried with one question.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import anyio
import msgspec
import numpy as np
import zmq
import zmq.asyncio
from anyio.abc import TaskStatus

from kvmesh.net.clock import Clock
from kvmesh.protocol.match import MatchReply, MatchRequest, WorkerMatch
from kvmesh.router.policy.kv_cache_aware import tier_credit

__all__ = ["MatchClient", "MatchState", "Matcher", "Matches", "NoMatcher"]

MatchState = Literal["answered", "off", "timed_out", "unreachable", "resting"]
"""``off``: no indexer is configured; ``resting``: left alone after failures."""

FAILURES_TO_REST = 3
FIRST_REST_S = 0.5
MAX_REST_S = 5.0
"""A restarted indexer is used again within this."""
SEND_QUEUE = 64
"""Questions that may wait in the socket; a slower indexer is as good as none."""


class Matches(NamedTuple):
    """What is known of one prompt."""

    state: MatchState
    by_server: Mapping[str, WorkerMatch] = {}
    """By instance id; the best rank of each server."""


class Matcher:
    """Interface of what answers for prefixes."""

    async def match(
        self, model: str, token_ids: np.ndarray, *, lora_id: int | None = None, cache_salt: str | None = None
    ) -> Matches:
        """Matches of an int32 ``[n]`` prompt; returns within the bound, never raises for the indexer's sake."""
        raise NotImplementedError

    def statistics(self) -> dict[str, float]:
        """Counters by outcome."""
        return {}


class NoMatcher(Matcher):
    """No indexer: every prompt is new to everyone."""

    async def match(
        self, model: str, token_ids: np.ndarray, *, lora_id: int | None = None, cache_salt: str | None = None
    ) -> Matches:
        """See :class:`Matcher`."""
        del model, token_ids, lora_id, cache_salt
        return Matches("off")


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
    """

    def __init__(self, endpoint: str, *, timeout_s: float, clock: Clock) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._clock = clock
        self._socket: zmq.asyncio.Socket | None = None
        self._pending: dict[int, _Pending] = {}
        self._next_id = 0
        self._failures = 0
        self._rest_s = FIRST_REST_S
        self._resting_until_s = 0.0
        self._trying = False
        self._outcomes: dict[str, int] = {"answered": 0, "timed_out": 0, "unreachable": 0, "resting": 0}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(MatchReply)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Hold the socket and take in replies until cancelled."""
        context = zmq.asyncio.Context()
        socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        # Without a connection a send fails at once instead of piling up questions for an indexer yet to come.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            socket.connect(self._endpoint)
            self._socket = socket
            task_status.started()
            while True:
                self._receive(await socket.recv_multipart())
        finally:
            self._socket = None
            socket.close()
            context.term()

    async def match(
        self, model: str, token_ids: np.ndarray, *, lora_id: int | None = None, cache_salt: str | None = None
    ) -> Matches:
        """See :class:`Matcher`."""
        matches = await self._ask(model, token_ids, lora_id, cache_salt)
        self._outcomes[matches.state] += 1
        return matches

    def statistics(self) -> dict[str, float]:
        """Questions by outcome."""
        return {f"match_{outcome}_total": count for outcome, count in self._outcomes.items()}

    async def _ask(self, model: str, token_ids: np.ndarray, lora_id: int | None, cache_salt: str | None) -> Matches:
        if self._failures >= FAILURES_TO_REST and (self._trying or self._clock.monotonic_s() < self._resting_until_s):
            return Matches("resting")
        socket = self._socket
        if socket is None:
            return Matches("unreachable")
        self._next_id += 1
        question = MatchRequest(
            id=self._next_id,
            model=model,
            token_ids=token_ids.astype("<i4", copy=False).tobytes(),
            lora_id=lora_id,
            cache_salt=cache_salt,
        )
        self._trying = self._failures >= FAILURES_TO_REST
        pending = self._pending[question.id] = _Pending()
        try:
            with anyio.move_on_after(self._timeout_s):
                await socket.send(self._encoder.encode(question), zmq.NOBLOCK)
                await pending.arrived.wait()
        except zmq.Again:
            self._failed()
            return Matches("unreachable")
        finally:
            del self._pending[question.id]
            self._trying = False
        if pending.reply is None:
            self._failed()
            return Matches("timed_out")
        self._failures = 0
        self._rest_s = FIRST_REST_S
        return Matches("answered", _best_ranks(pending.reply.matches))

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


def _best_ranks(matches: list[WorkerMatch]) -> dict[str, WorkerMatch]:
    """The match of each server's best rank; of equal ones the first."""
    best: dict[str, WorkerMatch] = {}
    for match in matches:
        known = best.get(match.instance_id)
        if known is None or _worth(match) > _worth(known):
            best[match.instance_id] = match
    return best


def _worth(match: WorkerMatch) -> float:
    return tier_credit(match.device_tokens, match.host_tokens, match.disk_tokens)
