"""The engines of one server: one, or one for each attention data-parallel rank, started and ended together."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import msgspec

from kvmesh.config import WorkerSettings
from kvmesh.config.attention_dp import rank_settings
from kvmesh.engine.client import EngineClient, EngineStartError, TokenStream, new_epoch
from kvmesh.protocol.engine import EngineReady, EngineStats, Generate, KvEventsDrained
from kvmesh.protocol.errors import ApiError
from kvmesh.protocol.ranks import DpSeat
from kvmesh.protocol.transfer import LedgerEvent
from kvmesh.worker.placement import RankPlacer
from kvmesh.worker.rank_stats import summed

__all__ = ["EngineGroup"]

T = TypeVar("T")


class EngineGroup:
    """The running engines of a server, by rank. Create it with :meth:`launch`.

    They share one epoch and one fate: a rank that dies takes its server with it, whose next life starts all of them.

    Attributes:
        engines: by rank.
        epoch: of this life of all of them.
    """

    def __init__(self, engines: Sequence[EngineClient], placer: RankPlacer, epoch: int) -> None:
        self.engines = tuple(engines)
        self.epoch = epoch
        self._placer = placer

    @classmethod
    @asynccontextmanager
    async def launch(cls, settings: WorkerSettings) -> AsyncIterator[EngineGroup]:
        """Start all engines at once and wait until every one serves; they are stopped when the block is left.

        Raises:
            EngineStartError: one of them did not start, for its reason; the others have been stopped.
        """
        launch = _Launch(settings)
        body_error: BaseException | None = None
        async with anyio.create_task_group() as tasks:
            for rank in range(settings.dp_size):
                tasks.start_soon(launch.host, rank)
            await launch.settled.wait()
            if launch.failure is None:
                try:
                    yield cls(launch.engines, _placer(settings, launch.engines), launch.epoch)
                except BaseException as error:
                    body_error = error  # raised again outside the group, which would wrap it
                launch.leave.set()
            else:
                tasks.cancel_scope.cancel()
        if body_error is not None:
            raise body_error
        if launch.failure is not None:
            raise launch.failure

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.engines)

    @property
    def ranks(self) -> list[EngineReady]:
        """Facts about the engines, by rank."""
        return [engine.ready for engine in self.engines]

    @property
    def stats(self) -> EngineStats:
        """The latest statistics, summed over the ranks."""
        return summed([engine.stats for engine in self.engines])

    def drain_iterations(self) -> list[Any]:
        """What iterations did since the last call, oldest first, each told once; of several ranks each says which."""
        if self.size == 1:
            records = self.engines[0].iterations
            return [records.popleft() for _ in range(len(records))]
        drained = [
            {"attention_dp_rank": rank, **msgspec.structs.asdict(engine.iterations.popleft())}
            for rank, engine in enumerate(self.engines)
            for _ in range(len(engine.iterations))
        ]
        return sorted(drained, key=lambda record: record["unix_ns"])

    def generate(self, request: Generate) -> TokenStream:
        """Start a sequence on the rank that suits it; ``request.dp_rank`` says afterwards which one that is.

        Raises:
            EngineDeadError: the rank's process is gone.
            ApiError: 400, a sequence with this id is under way, or there is no such rank.
        """
        rank = self._placer.place(request, [engine.under_way for engine in self.engines])
        request.dp_rank = rank
        return self.engines[rank].generate(request)

    def abort(self, request_id: str) -> None:
        """Stop a sequence, or the transfer that a finished context request left behind, on whichever rank it is."""
        for engine in self.engines:
            engine.abort(request_id)

    async def ping(self, timeout_s: float) -> None:
        """Ask every rank's loop whether it still turns.

        Raises:
            ApiError: 503, one of them has not answered in time, or is gone.
        """
        await self.of_all(lambda engine: engine.ping(timeout_s))

    async def drain_kv_events(self, confirmed: Sequence[int]) -> list[KvEventsDrained]:
        """The buffered KV events of every rank: all that were not confirmed.

        Args:
            confirmed: by rank, the ``position`` of its last answer that has reached a client; none yet: empty.

        Raises:
            ApiError: 503, one of them has not answered in time, or is gone.
        """
        positions = dict(zip(self.engines, confirmed, strict=False))
        return await self.of_all(lambda engine: engine.drain_kv_events(positions.get(engine, 0)))

    def peer_dead(self, instance_id: str, epoch: int) -> None:
        """Tell every rank that an engine of the mesh is gone."""
        for engine in self.engines:
            engine.peer_dead(instance_id, epoch)

    def on_ledger(self, callback: Callable[[list[LedgerEvent]], None]) -> None:
        """Call ``callback`` with every batch of ledger entries of any rank; it must not block."""
        for engine in self.engines:
            engine.on_ledger(callback)

    async def wait_dead(self) -> str:
        """Wait until one of the processes has ended without being asked to; returns why, in words."""
        reasons: list[str] = []

        async def watch(rank: int, engine: EngineClient) -> None:
            reasons.append(self._named(rank, await engine.wait_dead()))
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for rank, engine in enumerate(self.engines):
                tasks.start_soon(watch, rank, engine)
        return reasons[0]

    async def of_all(self, ask: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """What ``ask`` gives for each rank, all asked at once.

        Raises:
            ApiError: the first that was raised, naming its rank where there are several; the others are given up.
        """
        answers: dict[int, T] = {}
        failures: list[ApiError] = []

        async def one(rank: int, engine: EngineClient) -> None:
            try:
                answers[rank] = await ask(engine)
            except ApiError as error:
                error.message = self._named(rank, error.message)
                failures.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for rank, engine in enumerate(self.engines):
                tasks.start_soon(one, rank, engine)
        if failures:
            raise failures[0]
        return [answers[rank] for rank in range(self.size)]

    def _named(self, rank: int, text: str) -> str:
        return f"attention data-parallel rank {rank}: {text}" if self.size > 1 else text


class _Launch:
    """The start of a group: each engine is hosted by one task from launch to end, as its task group demands."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.epoch = new_epoch()
        self.leave = anyio.Event()
        self.settled = anyio.Event()
        """All ranks serve, or one of them has failed."""
        self.failure: EngineStartError | None = None
        self._settings = settings
        self._running: dict[int, EngineClient] = {}
        self._cpu_count = len(os.sched_getaffinity(0))

    @property
    def engines(self) -> list[EngineClient]:
        return [self._running[rank] for rank in range(self._settings.dp_size)]

    async def host(self, rank: int) -> None:
        seat = DpSeat(rank, self._settings.dp_size)
        settings = rank_settings(self._settings, seat, cpu_count=self._cpu_count)
        try:
            async with EngineClient.launch(settings, seat=seat, epoch=self.epoch) as engine:
                self._running[rank] = engine
                if len(self._running) == seat.size:
                    self.settled.set()
                await self.leave.wait()
        except EngineStartError as error:
            if self.failure is None:
                self.failure = error if seat.size == 1 else type(error)(f"attention data-parallel rank {rank}: {error}")
            self.settled.set()


def _placer(settings: WorkerSettings, engines: Sequence[EngineClient]) -> RankPlacer:
    reuses = settings.kv_cache_config.enable_block_reuse
    return RankPlacer(
        len(engines),
        tokens_per_block=engines[0].ready.tokens_per_block,
        capacity_blocks=min(engine.ready.num_pages for engine in engines) if reuses else 0,
    )
