"""Puts an engine together from a worker's settings: model, cache, transceiver, events, and the loop over them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import torch
import zmq

from kvmesh.cache.base import CacheManager
from kvmesh.cache.device import DeviceMemoryError
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.factory import create_manager
from kvmesh.cache.layout import LayoutError
from kvmesh.cache.sizing import SizingError
from kvmesh.config import ConfigError, WorkerSettings
from kvmesh.config.startup import refuse_impossible, refuse_unsupported, settings_without_effect
from kvmesh.engine.cache_setup import plan_cache
from kvmesh.engine.channel import MessageChannel
from kvmesh.engine.devices import cache_device, choose_device, with_share_of_device
from kvmesh.engine.executor import Executor
from kvmesh.engine.intake import Intake
from kvmesh.engine.limits import intake_limits, rebalance_interval, scheduler_limits
from kvmesh.engine.loading import load, take_threads
from kvmesh.engine.loop import EngineLoop
from kvmesh.engine.outbox import Outbox
from kvmesh.engine.pages import SequencePages
from kvmesh.engine.ranks.events import OneRankEvents, told_groups
from kvmesh.engine.ranks.leader import RankGroup, RankStartError
from kvmesh.engine.ranks.pools import split_groups_of
from kvmesh.engine.report import EngineReporter
from kvmesh.engine.runner import BatchRunner
from kvmesh.engine.sampler import Sampler
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.starvation import StarvationWatch
from kvmesh.engine.step import StepComputer
from kvmesh.engine.transfer_setup import context_credits, start_transceiver, transfer_desk
from kvmesh.engine.upkeep import CacheUpkeep
from kvmesh.engine.waiting import LoopWaiter
from kvmesh.events.endpoints import EndpointError
from kvmesh.events.factory import EventOrigin, create_event_source
from kvmesh.events.source import EventSource
from kvmesh.events.target import NoTargetGroupError
from kvmesh.models.base import CausalLM, KvPools
from kvmesh.models.checkpoint import fingerprint
from kvmesh.models.config import read_config
from kvmesh.models.errors import ModelError
from kvmesh.models.store import resolve_model
from kvmesh.net.clock import Clock
from kvmesh.protocol.engine import EngineReady
from kvmesh.protocol.ranks import ALONE, DpSeat
from kvmesh.telemetry import get_logger
from kvmesh.transceiver import Transceiver, TransceiverConfigError
from kvmesh.transceiver.planes.base import PlaneError

__all__ = ["Engine", "EngineBuildError"]

# What can be wrong with settings, files, memory or ports; anything else is a defect and shows as one.
_START_ERRORS = (
    SizingError,
    ConfigError,
    DeviceMemoryError,
    EndpointError,
    LayoutError,
    ModelError,
    NoTargetGroupError,
    OSError,
    PlaneError,
    RankStartError,
    TierFailedError,
    TransceiverConfigError,
    zmq.ZMQError,
)

FINGERPRINT_SHOWN = 12
"""Hex digits of a checkpoint's fingerprint in messages for people; compared is the whole."""

_log = get_logger("engine.build")


class EngineBuildError(RuntimeError):
    """The engine cannot start with these settings on this machine; the message says what to change."""


class Engine:
    """All parts of one engine. Made by :meth:`build`; :meth:`close` gives everything back."""

    def __init__(
        self,
        *,
        ready: EngineReady,
        executor: Executor,
        reporter: EngineReporter,
        manager: CacheManager,
        events: EventSource,
        transceiver: Transceiver | None,
        channel: MessageChannel,
        clock: Clock,
        ranks: RankGroup | None = None,
    ) -> None:
        self.ready = ready
        self.executor = executor
        self.reporter = reporter
        self.manager = manager
        self._events = events
        self._transceiver = transceiver
        self._channel = channel
        self._clock = clock
        self._ranks = ranks

    @classmethod
    def build(
        cls,
        settings: WorkerSettings,
        channel: MessageChannel,
        *,
        epoch: int,
        clock: Clock,
        seat: DpSeat = ALONE,
    ) -> Engine:
        """Load the model, take the memory, open the sockets.

        Args:
            settings: the worker's.
            channel: to the front.
            epoch: of this life of the engine; peers tell it from earlier lives by it.
            clock: for deadlines and time stamps.
            seat: among the attention data-parallel ranks of its server.

        Raises:
            EngineBuildError: a setting is not supported or cannot work here, or a file, memory or port is missing.
        """
        try:
            return _build(settings, channel, epoch, clock, seat)
        except _START_ERRORS as error:
            raise EngineBuildError(str(error)) from error

    def loop(self) -> EngineLoop:
        """The loop of this engine."""
        return EngineLoop(self._channel, self.executor, self.reporter, self._clock)

    def watch_ranks(self, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost`` with a reason, in a thread of its own, as soon as another rank of this engine has ended."""
        if self._ranks is not None:
            self._ranks.watch(on_lost)

    def close(self) -> None:
        """Stop threads, free ports and memory. The channel stays open; it is closed after this."""
        try:
            if self._transceiver is not None:
                self._transceiver.shutdown()
            if self._ranks is not None:
                self._ranks.close()
            self.manager.close()
        finally:
            # Last: the cache has just told that its blocks are gone.
            self._events.shutdown()


def _build(settings: WorkerSettings, channel: MessageChannel, epoch: int, clock: Clock, seat: DpSeat) -> Engine:
    with ExitStack() as undo:
        return _build_with(settings, channel, epoch, clock, seat, undo)


def _build_with(
    settings: WorkerSettings, channel: MessageChannel, epoch: int, clock: Clock, seat: DpSeat, undo: ExitStack
) -> Engine:
    num_ranks = settings.ranks_per_engine
    threads = take_threads(settings, num_ranks)
    device = choose_device(settings, seat)
    settings = with_share_of_device(settings, device, seat)
    source = resolve_model(settings.model)
    ranks = RankGroup(settings, read_config(source), device) if num_ranks > 1 else None
    if ranks is None:
        model = load(settings, source, device)
    else:
        undo.callback(ranks.close)
        model = load(settings, source, device, ranks.shard, ranks.links)
        ranks.await_loaded()
    _check(settings, model)

    memory = cache_device(settings, device)
    cache_config, whole, layout = plan_cache(settings, model)
    events = create_event_source(
        settings,
        EventOrigin(
            model_name=settings.served_model_name or source.name,
            layout=whole,
            manager_v2=cache_config.use_kv_cache_manager_v2 is True,
            max_seq_len=model.max_seq_len,
            vocab_size=model.config.vocab_size,
            rank=seat.rank,
            world_size=seat.size,
        ),
        clock,
    )
    manager = create_manager(
        cache_config,
        layout,
        memory,
        event_sink=events.sink
        if ranks is None or events.sink is None
        else OneRankEvents(events.sink, told_groups(whole, layout)),
        clock=clock,
        max_seq_len=model.max_seq_len,
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        ranks_per_host=seat.size,
        share_host_tier=settings.cache_transceiver_config.backend is not None,
    )
    if ranks is not None:
        ranks.share(layout, manager.pools, getattr(torch, layout.groups[0].buffers[0].dtype))
    # By content: the same file may have many names, and the same name many fine-tunes.
    content = fingerprint(source.path)
    digest = layout.digest(content)
    waiter = LoopWaiter(channel, clock)
    transceiver = start_transceiver(
        settings,
        manager,
        digest=digest,
        summary=f"model {source.name} with content {content[:FINGERPRINT_SHOWN]}, {layout.summary()}",
        epoch=epoch,
        waiter=waiter,
        clock=clock,
        max_seq_len=model.max_seq_len,
    )
    events.start()

    limits = intake_limits(settings, model, manager, transfers=transceiver is not None)
    sampler = Sampler(model.config.eos_token_ids)
    pages = SequencePages(manager)
    lending = None if transceiver is None else context_credits(settings, manager, pages, transceiver, clock)
    scheduler = Scheduler(scheduler_limits(settings, model, manager), pages, lending)
    addresses = [pool.address for pool in manager.pools]
    scratch_groups = split_groups_of(layout, swa_scratch_reuse=settings.kv_cache_config.enable_swa_scratch_reuse)
    desk = None if transceiver is None else transfer_desk(settings, transceiver, layout, device, waiter, clock)
    executor = Executor(
        intake=Intake(limits, sampler, clock),
        scheduler=scheduler,
        pages=pages,
        upkeep=CacheUpkeep(manager, scheduler, rebalance_interval(settings)),
        starvation=StarvationWatch(manager, scheduler),
        runner=BatchRunner(
            StepComputer(
                model,
                KvPools.build(layout, addresses),
                KvPools.build(layout, addresses, scratch_groups) if scratch_groups else None,
                max_num_tokens=settings.max_num_tokens,
                device=device,
            ),
            windows=[group.window for group in layout.groups],
            scratch_groups=scratch_groups,
            tokens_per_block=layout.tokens_per_block,
            max_batch_size=settings.max_batch_size,
            max_num_tokens=settings.max_num_tokens,
            max_seq_len=model.max_seq_len,
            ranks=ranks,
        ),
        sampler=sampler,
        outbox=Outbox(channel.send),
        clock=clock,
        desk=desk,
    )
    reporter = EngineReporter(
        channel.send,
        executor=executor,
        manager=manager,
        desk=desk,
        events=events,
        stats_interval=settings.kv_cache_config.iteration_stats_interval,
        clock=clock,
    )
    ready = EngineReady(
        num_pages=manager.stats().total,
        page_bytes=layout.pools[0].page_bytes,
        tokens_per_block=layout.tokens_per_block,
        max_batch_size=settings.max_batch_size,
        max_num_tokens=settings.max_num_tokens,
        max_seq_len=min(limits.max_seq_len, limits.max_cached_tokens),
        kv_cache_hash_algo=events.hash_algo,
        layout_digest=digest,
        device=memory.name,
        pid=os.getpid(),
        ctx_info_endpoint=None if transceiver is None else transceiver.control_endpoint,
        ctx_address=b"" if transceiver is None else transceiver.address,
        transfer_backend=None if transceiver is None else transceiver.backend_name,
        events_endpoint=events.endpoint,
        replay_endpoint=events.replay_endpoint,
    )
    _log.info("engine ready", model=source.name, pages=ready.num_pages, threads=threads, device=memory.name)
    undo.pop_all()
    return Engine(
        ready=ready,
        executor=executor,
        reporter=reporter,
        manager=manager,
        events=events,
        transceiver=transceiver,
        channel=channel,
        clock=clock,
        ranks=ranks,
    )


def _check(settings: WorkerSettings, model: CausalLM) -> None:
    dtypes = {layer.dtype for layer in model.cache_requirements().layers}
    refuse_unsupported(settings, cache_dtypes=dtypes)
    refuse_impossible(settings, max_seq_len=model.max_seq_len)
    for note in settings_without_effect(settings):
        _log.warning("setting has no effect here", setting=note)
