"""The front's handle on its engine process: starts it, talks to it, and knows at once when it is dead."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import msgspec
import zmq
import zmq.asyncio

from kvmesh.config import WorkerSettings
from kvmesh.engine.exits import how_it_ended
from kvmesh.engine.inbox import Answer, EngineInbox
from kvmesh.engine.launching import Launch, plan_launch
from kvmesh.engine.rendezvous import rendezvous
from kvmesh.engine.stream import EngineDeadError, TokenStream
from kvmesh.protocol.cache_report import IterationRecord
from kvmesh.protocol.engine import (
    Abort,
    DrainKvEvents,
    EngineReady,
    EngineStats,
    FromEngine,
    Generate,
    KvEventsDrained,
    PeerDead,
    Ping,
    Pong,
    Shutdown,
    ToEngine,
)
from kvmesh.protocol.ranks import ALONE, DpSeat
from kvmesh.protocol.transfer import LedgerEvent
from kvmesh.telemetry import get_logger

__all__ = ["EngineClient", "EngineDeadError", "EngineRefusedError", "EngineStartError", "TokenStream", "new_epoch"]

STARTUP_TIMEOUT_S = 300.0
"""Bound of loading a model; a download happens before, in the front."""

STOP_GRACE_S = 5.0
"""Time for an engine to leave by itself before it is killed."""

_log = get_logger("engine.client")


def new_epoch() -> int:
    """An epoch above those of all earlier lives: the Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


class EngineStartError(RuntimeError):
    """The engine process could not start; the message says why."""


class EngineRefusedError(EngineStartError):
    """The engine itself said why it cannot start: with the same settings on this machine it never will."""


class EngineClient:
    """One engine process. Create it with :meth:`launch`; all methods belong to the event loop's thread.

    Attributes:
        epoch: of this life of the engine: later ones have larger numbers.
    """

    def __init__(self, socket: zmq.asyncio.Socket, process: anyio.abc.Process, epoch: int, launch: Launch) -> None:
        self.epoch = epoch
        self._launch = launch
        self._socket = socket
        self._process = process
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._inbox = EngineInbox()
        self._died = anyio.Event()
        self._leaving = False
        self._dead_reason: str | None = None

    @classmethod
    @asynccontextmanager
    async def launch(
        cls,
        settings: WorkerSettings,
        *,
        seat: DpSeat = ALONE,
        epoch: int | None = None,
        startup_timeout_s: float = STARTUP_TIMEOUT_S,
    ) -> AsyncIterator[EngineClient]:
        """Start an engine process and wait until it serves; it is stopped when the block is left.

        Args:
            settings: this engine's.
            seat: among the attention data-parallel ranks of its server.
            epoch: of this life; None: a new one.
            startup_timeout_s: longest wait until it serves.

        Raises:
            EngineRefusedError: it cannot work with these settings on this machine.
            EngineStartError: the process ended, or was not ready in time.
        """
        context = zmq.asyncio.Context()
        with rendezvous() as endpoint:
            socket = context.socket(zmq.PAIR)
            socket.set_hwm(0)
            socket.linger = 0
            try:
                socket.bind(endpoint)
                epoch = new_epoch() if epoch is None else epoch
                numbers = (epoch, os.getpid(), *seat)
                try:
                    launch = plan_launch(settings, (endpoint, *map(str, numbers)))
                except FileNotFoundError as error:
                    raise EngineRefusedError(str(error)) from error
                process = await anyio.open_process(launch.command, stdout=None, stderr=None)
                client = cls(socket, process, epoch, launch)
                body_error: BaseException | None = None
                try:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(client._receive)
                        tasks.start_soon(client._watch)
                        try:
                            await client._start(settings, startup_timeout_s)
                            yield client
                        except BaseException as error:
                            # Raised again outside the group, which would wrap it in an exception group.
                            body_error = error
                        with anyio.CancelScope(shield=True):
                            await client.drain(0.0)
                        tasks.cancel_scope.cancel()
                finally:
                    with anyio.CancelScope(shield=True):
                        await client._reap()
                if body_error is not None:
                    raise body_error
            finally:
                socket.close()
                context.term()

    @property
    def ready(self) -> EngineReady:
        """Facts about the engine."""
        assert self._inbox.ready is not None, "launch() yields only after the engine is ready"
        return self._inbox.ready

    @property
    def stats(self) -> EngineStats:
        """The latest statistics."""
        return self._inbox.stats

    @property
    def iterations(self) -> deque[IterationRecord]:
        """What iterations did, oldest first; whoever tells it takes it out."""
        return self._inbox.iterations

    @property
    def under_way(self) -> int:
        """Sequences whose outputs somebody waits for."""
        return self._inbox.open_streams

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._dead_reason is None

    async def wait_dead(self) -> str:
        """Wait until the process has ended without being asked to; returns why, in words."""
        await self._died.wait()
        return self._dead_reason or "the engine ended"

    def generate(self, request: Generate) -> TokenStream:
        """Start a sequence.

        Raises:
            EngineDeadError: the process is gone.
            ApiError: 400, a sequence with this id is under way.
        """
        self._check_alive()
        receiver = self._inbox.open(request.request_id)
        self._send(request)
        return TokenStream(self.abort, request.request_id, receiver)

    def abort(self, request_id: str) -> None:
        """Stop a sequence, or the transfer that a finished context request left behind. Unknown ids are ignored."""
        self._inbox.drop(request_id)
        if self.alive:
            self._send(Abort(request_id))

    async def ping(self, timeout_s: float = 5.0) -> Pong:
        """Ask the executor's loop whether it still turns.

        Raises:
            ApiError: 503, no answer in time, or the process is gone (:class:`EngineDeadError`).
        """
        answer = await self._ask(Ping, timeout_s)
        assert isinstance(answer, Pong)
        return answer

    async def drain_kv_events(self, confirmed: int = 0, timeout_s: float = 5.0) -> KvEventsDrained:
        """The buffered KV events: all that were not confirmed.

        Args:
            confirmed: ``position`` of the last answer that has reached a client; what it brought is forgotten.
            timeout_s: longest wait.

        Raises:
            ApiError: 503, no answer in time, or the process is gone (:class:`EngineDeadError`).
        """
        answer = await self._ask(lambda sequence: DrainKvEvents(sequence, confirmed), timeout_s)
        assert isinstance(answer, KvEventsDrained)
        return answer

    def peer_dead(self, instance_id: str, epoch: int) -> None:
        """Tell the engine that a member of the mesh is gone."""
        if self.alive:
            self._send(PeerDead(instance_id, epoch))

    def on_ledger(self, callback: Callable[[list[LedgerEvent]], None]) -> None:
        """Call ``callback`` with every batch of ledger entries; it must not block."""
        self._inbox.on_ledger(callback)

    async def drain(self, drain_s: float) -> None:
        """Let the engine finish what runs, refuse what is new, and leave; waits at most ``drain_s`` and a grace."""
        self._leaving = True
        if self.alive:
            self._send(Shutdown(drain_s))
        with anyio.move_on_after(drain_s + STOP_GRACE_S):
            await self._process.wait()  # Not for the watcher, which is gone where the whole server was cancelled.

    async def _ask(self, question: Callable[[int], Ping | DrainKvEvents], timeout_s: float) -> Answer:
        self._check_alive()
        return await self._inbox.ask(lambda sequence: self._send(question(sequence)), timeout_s)

    def _check_alive(self) -> None:
        if self._dead_reason is not None:
            raise EngineDeadError(self._dead_reason)

    def _send(self, message: ToEngine) -> None:
        # There is no high-water mark, so the message is queued at once; the future that comes back is already done.
        self._socket.send(self._encoder.encode(message))

    async def _start(self, settings: WorkerSettings, timeout_s: float) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            await stdin.send(settings.model_dump_json().encode())
            await stdin.aclose()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # It died before reading; the watcher says so.
        with anyio.move_on_after(timeout_s):
            await self._inbox.started.wait()
        if self._inbox.failure is not None:
            raise EngineRefusedError(self._inbox.failure)
        if self._dead_reason is not None:
            raise EngineStartError(self._dead_reason)
        if self._inbox.ready is None:
            raise EngineStartError(f"the engine was not ready within {timeout_s:g} s")

    async def _watch(self) -> None:
        code = self._launch.exit_code(await self._process.wait())
        self._bury(how_it_ended(code))
        if not self._leaving:
            self._died.set()

    def _bury(self, reason: str) -> None:
        """The process has ended: nobody waits for it any more, and nothing is sent to it."""
        if self._dead_reason is not None:
            return
        self._dead_reason = f"The engine process has ended ({reason})."
        if self._inbox.open_streams:
            _log.error("engine died", reason=reason, requests=self._inbox.open_streams)
        self._inbox.fail_all(self._dead_reason)

    async def _receive(self) -> None:
        while True:
            self._inbox.take(self._decoder.decode(await self._socket.recv()))

    async def _reap(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        self._bury(how_it_ended(self._launch.exit_code(await self._process.wait())))
        await self._process.aclose()
