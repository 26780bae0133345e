"""What the front hears from its engine, brought to whoever waits for it: outputs to streams, answers to questions."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from kvmesh.engine.stream import EngineDeadError, StreamItem
from kvmesh.protocol.cache_report import IterationRecord
from kvmesh.protocol.engine import (
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    IterationRecords,
    KvEventsDrained,
    LedgerUpdate,
    Pong,
    RequestFailed,
    TokenBatch,
)
from kvmesh.protocol.errors import ApiError, unavailable
from kvmesh.protocol.transfer import LedgerEvent

__all__ = ["Answer", "EngineInbox"]

MAX_ITERATION_RECORDS = 1000
"""Kept until somebody drains them; the oldest go first."""

Answer = Pong | KvEventsDrained
"""Of the engine, to one question."""


class EngineInbox:
    """Takes every message of one engine; on the event loop's thread.

    Attributes:
        started: set once the engine serves, has refused to, or is gone.
        ready: facts about the engine; None until it serves.
        failure: why the engine refused to start.
        stats: the latest statistics.
        iterations: what iterations did, oldest first; whoever tells it takes it out.
    """

    def __init__(self) -> None:
        self.started = anyio.Event()
        self.ready: EngineReady | None = None
        self.failure: str | None = None
        self.stats = EngineStats()
        self.iterations: deque[IterationRecord] = deque(maxlen=MAX_ITERATION_RECORDS)
        self._streams: dict[str, MemoryObjectSendStream[StreamItem]] = {}
        self._answers: dict[int, MemoryObjectSendStream[Answer | EngineDeadError]] = {}
        self._sequence = itertools.count(1)
        self._ledger_callbacks: list[Callable[[list[LedgerEvent]], None]] = []

    @property
    def open_streams(self) -> int:
        """Sequences whose outputs somebody waits for."""
        return len(self._streams)

    def open(self, request_id: str) -> MemoryObjectReceiveStream[StreamItem]:
        """Where the outputs of a sequence will come out.

        Raises:
            ApiError: 400, a sequence with this id is under way.
        """
        if request_id in self._streams:
            raise ApiError(400, f"Request id {request_id!r} is already in use.", code="duplicate_request_id")
        sender, receiver = anyio.create_memory_object_stream[StreamItem](math.inf)
        self._streams[request_id] = sender
        return receiver

    def drop(self, request_id: str) -> None:
        """Nobody waits for the outputs of a sequence any more. Unknown ids are ignored."""
        if (stream := self._streams.pop(request_id, None)) is not None:
            stream.close()

    def on_ledger(self, callback: Callable[[list[LedgerEvent]], None]) -> None:
        """Call ``callback`` with every batch of ledger entries; it must not block."""
        self._ledger_callbacks.append(callback)

    async def ask(self, send: Callable[[int], None], timeout_s: float) -> Answer:
        """Ask a question and wait for its answer.

        Args:
            send: sends the question with the sequence number that the answer will bear.
            timeout_s: longest wait.

        Raises:
            ApiError: 503, no answer in time, or the process is gone (:class:`EngineDeadError`).
        """
        sequence = next(self._sequence)
        sender, receiver = anyio.create_memory_object_stream[Answer | EngineDeadError](1)
        self._answers[sequence] = sender
        send(sequence)
        try:
            with anyio.fail_after(timeout_s):
                answer = await receiver.receive()
        except TimeoutError:
            raise unavailable(f"The engine has not answered for {timeout_s:g} s.", code="engine_stalled") from None
        finally:
            self._answers.pop(sequence, None)
            sender.close()
            receiver.close()
        if isinstance(answer, EngineDeadError):
            raise answer
        return answer

    def take(self, message: FromEngine) -> None:
        """Bring one message to whoever waits for it."""
        match message:
            case TokenBatch():
                for output in message.outputs:
                    self._deliver(output.request_id, output, last=output.finish_reason is not None)
            case RequestFailed():
                self._deliver(message.request_id, _error_of(message), last=True)
            case EngineStats():
                self.stats = message
            case IterationRecords():
                self.iterations.extend(message.records)
            case LedgerUpdate():
                for callback in self._ledger_callbacks:
                    callback(message.events)
            case Pong() | KvEventsDrained():
                if (answer := self._answers.pop(message.sequence, None)) is not None:
                    answer.send_nowait(message)
            case EngineReady():
                self.ready = message
                self.started.set()
            case EngineFailed():
                self.failure = message.message
                self.started.set()

    def fail_all(self, reason: str) -> None:
        """The engine is gone, and with it whatever anybody waits for."""
        for stream in self._streams.values():
            stream.send_nowait(EngineDeadError(reason))
            stream.close()
        self._streams.clear()
        for answer in self._answers.values():
            answer.send_nowait(EngineDeadError(reason))
        self._answers.clear()
        self.started.set()

    def _deliver(self, request_id: str, item: StreamItem, *, last: bool) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return  # Its reader has left.
        if last:
            del self._streams[request_id]
        stream.send_nowait(item)
        if last:
            stream.close()


def _error_of(message: RequestFailed) -> ApiError:
    return ApiError(
        message.status, message.message, type=message.error_type, code=message.code, retry_after_s=message.retry_after_s
    )
