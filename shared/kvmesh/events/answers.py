"""A publisher's answers to readers: kept batches, everything that is held, digests.

They are made beside the engine, under Python's lock, so all readers together get a share of a processor and not more,
however often they ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq

from kvmesh.events.allowance import Allowance
from kvmesh.events.digests import DIGEST_REQUEST, answer_frames
from kvmesh.events.encoding import END_SEQUENCE, STATE_REQUEST
from kvmesh.events.published import PublishedSet
from kvmesh.telemetry import get_logger

__all__ = ["Answers", "PublisherStatistics"]

SHARE = 0.2
"""Of a processor, for all answers together."""

AT_ONCE_S = 5.0
"""Of a processor's time, after a rest: readers that begin at the same time are answered at once."""

MAX_WAITING = 1024
"""Requests that wait here; more of them wait at the readers."""

_Numbered = tuple[int, bytes]
"""A batch's number and payload."""

_log = get_logger("events")


class PublisherStatistics(msgspec.Struct):
    """What was sent and lost, in batches unless said otherwise."""

    published_total: int = 0
    dropped_total: int = 0
    """Not queued, because the queue was full."""
    send_failures_total: int = 0
    """Queued and not sent."""
    replays_total: int = 0
    digests_total: int = 0
    """Requests for digests that were answered."""
    malformed_requests_total: int = 0
    queued: int = 0
    events_total: int = 0


class Answers:
    """Used on the publisher's thread.

    Args:
        replay: ROUTER that requests come to: ``["", start]``, ``["", "state"]``, ``["", "digest"]``.
        topic: of the batches.
        kept: batches that can be replayed, oldest first.
        state: makes what answers "state".
        published: what digests are answered from; None: they are not.
        statistics: the fields about requests are counted.
        allowance: processor time of answers; None: :data:`SHARE`.
    """

    def __init__(
        self,
        replay: zmq.Socket[bytes],
        topic: bytes,
        *,
        kept: Iterable[_Numbered],
        state: Callable[[], Sequence[_Numbered]],
        published: PublishedSet | None,
        statistics: PublisherStatistics,
        allowance: Allowance | None = None,
    ) -> None:
        self._replay = replay
        self._topic = topic
        self._kept = kept
        self._state = state
        self._published = published
        self._statistics = statistics
        self._asked: dict[tuple[bytes, bytes], None] = {}
        """Clients and what each has asked, in order; who asks the same again before it is answered is answered once."""
        self._allowance = allowance or Allowance(SHARE, AT_ONCE_S)
        self._rests_total = 0
        self._broken_off_total = 0
        self._unanswered_total = 0

    @property
    def waiting(self) -> bool:
        """Whether requests have been taken in and not answered."""
        return bool(self._asked)

    def rest_s(self) -> float:
        """For how long nobody is answered now."""
        rest_s = self._allowance.rest_s()
        if rest_s:
            self._rests_total += 1
            if self._rests_total & (self._rests_total - 1) == 0:
                _log.warning("readers ask for more than they get; answers come late", rest_s=round(rest_s, 3))
        return rest_s

    def answer_next(self) -> None:
        """Take in what is asked, and answer one question; that for the state to all who have asked it.

        What a request makes go wrong costs its reader an answer, and nobody the thread.
        """
        began_s = time.thread_time()
        try:
            self._take_requests()
            if self._asked:
                client, question = next(iter(self._asked))
                alike = [one for one, asked in self._asked if asked == STATE_REQUEST]
                clients = alike if question == STATE_REQUEST else [client]
                for one in clients:
                    del self._asked[one, question]
                self._answer(clients, question)
        except Exception as error:
            self._unanswered_total += 1
            if self._unanswered_total & (self._unanswered_total - 1) == 0:
                _log.error("a request could not be answered", so_far=self._unanswered_total, exc_info=error)
        self._allowance.spend(time.thread_time() - began_s)

    def _take_requests(self) -> None:
        for _ in range(MAX_WAITING - len(self._asked)):
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3 and not frames[1] and self._understands(frames[2]):
                self._asked[frames[0], frames[2]] = None
                continue
            self._statistics.malformed_requests_total += 1
            malformed = self._statistics.malformed_requests_total
            if malformed & (malformed - 1) == 0:
                _log.warning("malformed replay requests ignored", frames=len(frames), so_far=malformed)

    def _understands(self, question: bytes) -> bool:
        if question == DIGEST_REQUEST:
            return self._published is not None
        return question == STATE_REQUEST or len(question) == 8

    def _answer(self, clients: Sequence[bytes], question: bytes) -> None:
        if question == DIGEST_REQUEST and self._published is not None:
            self._tell_digests(clients[0], self._published)
            return
        if question == STATE_REQUEST:
            batches = self._state()
        else:
            first = int.from_bytes(question, "big")
            batches = [kept for kept in self._kept if kept[0] >= first]
        for client in clients:
            self._send_batches(client, batches)

    def _send_batches(self, client: bytes, batches: Sequence[_Numbered]) -> None:
        self._statistics.replays_total += 1
        try:
            for sequence, payload in batches:
                frames = [client, b"", self._topic, sequence.to_bytes(8, "big"), payload]
                self._replay.send_multipart(frames, zmq.NOBLOCK)
            self._replay.send_multipart([client, b"", b"", END_SEQUENCE.to_bytes(8, "big"), b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._broken_off(error)

    def _tell_digests(self, client: bytes, published: PublishedSet) -> None:
        self._statistics.digests_total += 1
        try:
            self._replay.send_multipart([client, *answer_frames(*published.answer())], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._broken_off(error)

    def _broken_off(self, error: zmq.ZMQError) -> None:
        self._broken_off_total += 1
        if self._broken_off_total & (self._broken_off_total - 1) == 0:
            _log.warning(
                "answers broken off: the reader does not read, or has gone",
                so_far=self._broken_off_total,
                error=str(error),
            )
