"""What the cache needs between two steps: the passing of time, and now and then all its pages for itself."""

from __future__ import annotations

from kvmesh.cache.base import CacheManager
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.sequence import Phase

__all__ = ["CacheUpkeep"]


class CacheUpkeep:
    """Called once an iteration, before it is scheduled.

    Args:
        manager: the cache.
        scheduler: of the sequences that use it.
        rebalance_interval: iterations between two attempts to move memory between pools
            (``kv_pool_rebalance_config.check_interval``); None: never (``enable_kv_pool_rebalance`` is off).
    """

    def __init__(self, manager: CacheManager, scheduler: Scheduler, rebalance_interval: int | None = None) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._rebalance_interval = rebalance_interval

    def before_step(self, iteration: int, now_s: float) -> None:
        """Let retention durations expire, and pools exchange memory.

        Args:
            iteration: of the executor.
            now_s: monotonic.
        """
        self._manager.tick(now_s)
        if self._rebalance_interval is not None and iteration % self._rebalance_interval == 0:
            self._rebalance(now_s)

    def _rebalance(self, now_s: float) -> None:
        """Suspend every sequence for the move; not while a transfer uses pages, whose peer knows where they are."""
        if not self._manager.wants_rebalance(now_s) or self._manager.stats().open_leases:
            return
        if any(seq.phase is Phase.RECEIVING for seq in self._scheduler.running):
            return
        paused = self._scheduler.pause()
        self._manager.rebalance(now_s)
        self._scheduler.go_on(paused)
