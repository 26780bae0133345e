"""What the engine tells about itself between steps: KV events, ledger entries, statistics and integrity checks."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvmesh.cache.base import CacheManager
from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.stats import CacheStats
from kvmesh.engine.cache_report import Pin, counters_of, flows_of, page_bytes_of, pages_by_age, tiers_of, uses_of
from kvmesh.engine.executor import Executor
from kvmesh.engine.iterations import IterationLog
from kvmesh.engine.transfers import TransferDesk
from kvmesh.events.source import EventSource, EventStatistics
from kvmesh.net.clock import Clock
from kvmesh.protocol.cache_report import CacheReport, TierReport
from kvmesh.protocol.engine import (
    DrainKvEvents,
    EngineStats,
    FromEngine,
    IterationRecords,
    KvEventsDrained,
    LedgerUpdate,
)
from kvmesh.telemetry import get_logger

__all__ = ["EngineReporter"]

STATS_INTERVAL_S = 0.25
"""At most four statistics messages a second."""

TIERS_INTERVAL_S = 1.0
"""At most one walk over all pages a second for the tiers' figures, and only after something has changed."""

INTEGRITY_QUIET_S = 5.0
"""An integrity check waits until nothing has happened for so long: the next request must not have to wait for it."""

INTEGRITY_INTERVAL_S = 1.0
"""At most one integrity check a second, and only after something has happened since the last."""

INTEGRITY_SHARE = 0.01
"""Most of the wall time that integrity checks may take: a long one makes the next one later."""

_log = get_logger("engine.report")


class EngineReporter:
    """Runs after every iteration, on the executor's thread.

    Args:
        send: delivers a message to the front; must not block.
        executor: whose work is reported.
        manager: the KV cache.
        desk: KV transfers, or None.
        events: KV events.
        stats_interval: iterations that compute between two collections of statistics, and those of one record of
            ``/iteration_stats`` (``iteration_stats_interval``).
        clock: paces the reports.
    """

    def __init__(
        self,
        send: Callable[[FromEngine], None],
        *,
        executor: Executor,
        manager: CacheManager,
        desk: TransferDesk | None,
        events: EventSource,
        stats_interval: int,
        clock: Clock,
    ) -> None:
        self._send = send
        self._executor = executor
        self._manager = manager
        self._desk = desk
        self._events = events
        self._stats_interval = stats_interval
        self._clock = clock
        self._uncollected = 0
        """Iterations that computed since statistics were last collected."""
        self._page_bytes = page_bytes_of(manager.layout)
        self._iterations = IterationLog(stats_interval, manager.tiers, self._page_bytes, clock)
        # What a sequence of one step had is given back at the step's end already.
        executor.on_planned = lambda: self._iterations.note_peaks(manager.stats())
        self._tiers: tuple[TierReport, ...] = ()
        self._tiers_of: CacheStats | None = None
        """The state of the cache that the tiers' figures are of."""
        self._next_tiers_s = 0.0
        self._sent: EngineStats | None = None
        self._next_stats_s = 0.0
        self._next_check_s = 0.0
        self._active_s = 0.0
        """When something last happened."""
        self._dirty = False
        """Whether anything happened since the last integrity check."""

    def after_step(self, *, computed: bool) -> None:
        """Report on the iteration that has just ended."""
        self._report(computed=computed, ending=False)

    def after_last_step(self) -> None:
        """The engine ends: report, with an integrity check of what has happened since the last, however recent."""
        self._report(computed=False, ending=True)

    def _report(self, *, computed: bool, ending: bool) -> None:
        happened = computed
        self._events.flush()
        if self._desk is not None and (entries := self._desk.transceiver.drain_ledger()):
            happened = True
            self._send(LedgerUpdate(entries))
        now_s = self._clock.monotonic_s()
        self._dirty = self._dirty or happened
        if happened or not self._is_idle:
            self._active_s = now_s
        if self._dirty and self._is_idle and (ending or now_s >= self._check_due_s):
            self._check_integrity()
        self._uncollected += computed
        if computed:
            executor = self._executor
            self._iterations.note(
                self._manager.stats(), executor.counters, running=self._running, waiting=executor.num_waiting
            )
        # Where nothing computes no iteration may follow for long, and what there is to tell is told.
        if (self._uncollected >= self._stats_interval or not computed) and now_s >= self._next_stats_s:
            self._send_stats(now_s)

    def drain_kv_events(self, message: DrainKvEvents) -> None:
        """Answer with the buffered KV events."""
        position, events = self._events.fetch(message.confirmed)
        self._send(KvEventsDrained(message.sequence, position, events))

    def due_in_s(self) -> float | None:
        """Seconds until there may be something to report without any new event, None when there is not."""
        now_s = self._clock.monotonic_s()
        times = [] if (gathering_s := self._events.due_in_s()) is None else [now_s + gathering_s]
        if self._dirty and self._is_idle:
            times.append(self._check_due_s)
        cache = self._manager.stats()
        if self._changed(self._statistics(cache)) or len(self._iterations):
            times.append(self._next_stats_s)
        if cache != self._tiers_of:
            times.append(max(self._next_stats_s, self._next_tiers_s))
        return max(0.0, min(times) - now_s) if times else None

    @property
    def _is_idle(self) -> bool:
        return self._executor.num_live == 0

    @property
    def _check_due_s(self) -> float:
        return max(self._active_s + INTEGRITY_QUIET_S, self._next_check_s)

    def _check_integrity(self) -> None:
        counters = self._executor.counters
        counters.integrity_checks += 1
        self._dirty = False
        began_s = self._clock.monotonic_s()
        try:
            self._manager.check_integrity()
        except CacheIntegrityError as error:
            counters.integrity_failures += 1
            _log.error("cache integrity check failed", problem=str(error))
        ended_s = self._clock.monotonic_s()
        self._next_check_s = ended_s + max(INTEGRITY_INTERVAL_S, (ended_s - began_s) / INTEGRITY_SHARE)

    def _send_stats(self, now_s: float) -> None:
        self._uncollected = 0
        cache = self._manager.stats()
        if cache != self._tiers_of and now_s >= self._next_tiers_s:
            self._tiers = tiers_of(self._manager.level_stats())
            self._tiers_of = cache
            self._next_tiers_s = now_s + TIERS_INTERVAL_S
        stats = self._statistics(cache)
        changed = self._changed(stats)
        if records := self._iterations.take():
            self._send(IterationRecords(records))
        if changed:
            self._sent = stats
            self._send(stats)
        if records or changed:
            self._next_stats_s = now_s + STATS_INTERVAL_S

    def _changed(self, stats: EngineStats) -> bool:
        # The iteration counter alone is no news: idle wake-ups move it too.
        return self._sent is None or msgspec.structs.replace(stats, iteration=self._sent.iteration) != self._sent

    @property
    def _running(self) -> int:
        executor = self._executor
        return executor.num_live - executor.num_waiting - executor.num_receiving

    def _statistics(self, cache: CacheStats) -> EngineStats:
        executor, counters = self._executor, self._executor.counters
        stats = EngineStats(
            iteration=counters.iteration,
            running=self._running,
            waiting=executor.num_waiting,
            suspended=executor.num_suspended,
            held_back=executor.num_held_back,
            in_transfer=executor.num_receiving,
            pages_total=cache.total,
            pages_free=cache.free,
            pages_evictable=cache.evictable,
            pages_held=cache.held,
            pages_pinned=cache.pinned,
            pages_locked=cache.locked,
            pages_quarantined=cache.quarantined,
            prompt_tokens_total=counters.prompt_tokens,
            cached_tokens_total=counters.cached_tokens,
            prefilled_tokens_total=counters.prefilled_tokens,
            generated_tokens_total=counters.generated_tokens,
            preemptions_total=counters.preemptions,
            suspensions_total=counters.suspended,
            resumptions_total=counters.resumed,
            recomputations_total=counters.recomputed,
            caches_lost_total=counters.lost,
            starved_total=counters.starved,
            evicted_pages_total=cache.counters.evicted_pages,
            integrity_checks_total=counters.integrity_checks,
            integrity_failures_total=counters.integrity_failures,
            cache=CacheReport(
                tiers=self._tiers,
                flows=flows_of(cache.flows, self._manager.tiers, self._page_bytes),
                uses=uses_of(cache.tallies),
                counters=counters_of(cache.counters),
            ),
        )
        if self._desk is not None:
            self._add_transfers(stats, self._desk)
            pins = (Pin(since_s, num_pages) for since_s, num_pages in self._desk.transceiver.pins())
            stats.cache.pinned_pages_by_age = pages_by_age(pins, self._clock.monotonic_s())
        self._add_events(stats, self._events.statistics())
        return stats

    @staticmethod
    def _add_events(stats: EngineStats, events: EventStatistics) -> None:
        stats.events_published_total = events.published_total
        stats.events_dropped_total = events.dropped_total
        stats.events_blocks_stored_total = events.blocks_stored_total
        stats.events_blocks_removed_total = events.blocks_removed_total
        stats.events_blocks_moved_total = events.blocks_moved_total
        stats.events_blocks_suppressed_total = events.blocks_suppressed_total
        stats.events_blocks_non_target_total = events.blocks_non_target_total
        stats.events_blocks_dropped_total = events.blocks_dropped_total
        stats.events_buffered = events.buffered
        stats.events_buffered_total = events.buffered_total
        stats.events_buffer_dropped_total = events.buffer_dropped_total

    @staticmethod
    def _add_transfers(stats: EngineStats, desk: TransferDesk) -> None:
        transfers = desk.transceiver.stats()
        stats.in_transfer += transfers.send_sessions
        stats.transfers_started_total = transfers.started_total
        stats.transfers_completed_total = transfers.completed_total
        stats.transfers_failed_total = transfers.failed_total
        stats.transfers_cancelled_total = transfers.cancelled_total
        stats.transfers_timed_out_total = transfers.timed_out_total
        stats.transfers_refused_total = transfers.refused_total
        stats.transfer_links = transfers.links
        stats.transfer_messages_dropped_total = transfers.dropped_messages_total
        stats.transfer_isolated_errors_total = transfers.isolated_errors_total
        stats.ledger_dropped_total = transfers.ledger_dropped_total
        stats.transfer_bytes_total = transfers.bytes_moved_total
        stats.transfer_pages_total = transfers.pages_moved_total
        stats.transfer_pages_reused_total = transfers.pages_reused_total
        stats.transfers_borrowed_total = transfers.borrowed_total
        stats.staging_bytes = transfers.staging_capacity_bytes
        stats.staging_send_used_bytes = transfers.staging_send_used_bytes
        stats.staging_receive_used_bytes = transfers.staging_receive_used_bytes
        stats.staging_send_waiting = transfers.staging_send_waiting
        stats.staging_receive_waiting = transfers.staging_receive_waiting
        stats.bounce_transfers_total = transfers.bounced_total
        stats.bounce_small_total = transfers.bounce_fallbacks.get("small", 0)
        stats.bounce_contiguous_total = transfers.bounce_fallbacks.get("contiguous", 0)
        stats.bounce_no_room_total = transfers.bounce_fallbacks.get("no_room", 0)
        stats.bounce_not_offered_total = transfers.bounce_fallbacks.get("not_offered", 0)
        stats.bounce_orphaned_bytes = transfers.bounce_orphaned_bytes
