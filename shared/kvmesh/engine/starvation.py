"""Notices that requests wait for pages and nothing can move any more, and says so with the numbers that were seen.

That takes a mistake, in settings or in here: whoever is served first can take the pages of all others. It must then end
as an answer to the requests concerned, not as a hang, and not as the end of the process.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from kvmesh.cache.base import CacheManager
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.stats import LevelStats
from kvmesh.engine.plan import StepPlan
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.sequence import Phase, Sequence
from kvmesh.protocol.errors import ApiError

__all__ = ["MAX_IDLE_PASSES", "StarvationWatch", "no_progress"]

MAX_IDLE_PASSES = 1000
"""Consecutive scheduling passes in which requests wait and nothing is scheduled or evicted, as in TensorRT-LLM."""


class StarvationWatch:
    """Counts passes in which nothing moves.

    Args:
        manager: the cache.
        scheduler: whose passes they are.
    """

    def __init__(self, manager: CacheManager, scheduler: Scheduler) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._passes = 0

    def check(self, plan: StepPlan, *, in_transfer: bool) -> list[tuple[Sequence, ApiError]]:
        """The requests that must fail after this pass, and why; seldom any.

        Args:
            plan: of this pass.
            in_transfer: a transfer is open in either direction; such passes are not counted, for what is waited for may
                be its pages.
        """
        if not (plan.is_idle and plan.refused):
            self._passes = 0
        elif not in_transfer:
            self._passes += 1
        if self._passes < MAX_IDLE_PASSES:
            return []
        self._passes = 0
        # Only those that were tried and got nothing; those behind them in the queue may fare better.
        return [(seq, self._failure(seq)) for seq in dict.fromkeys(plan.refused)]

    def _failure(self, seq: Sequence) -> ApiError:
        suspended = sum(one.phase is Phase.SUSPENDED for one in self._scheduler.waiting)
        return no_progress(
            seq,
            needs=self._manager.pages_needed(history=seq.num_computed, capacity=seq.history.length),
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) - suspended,
            suspended=suspended,
            layout=self._manager.layout,
            levels=self._manager.level_stats(),
        )


def no_progress(
    seq: Sequence,
    *,
    needs: list[int],
    running: int,
    waiting: int,
    suspended: int,
    layout: PageLayout,
    levels: Many[LevelStats],
) -> ApiError:
    """The failure of a request for which there never were pages.

    Args:
        seq: the request.
        needs: pages by pool that its next step needs.
        running: requests that hold pages, among them those that are receiving.
        waiting: requests in the queue that hold none.
        suspended: requests in the queue that have a cache.
        layout: of the pages.
        levels: of the cache, as they are now.
    """
    tiers = {level.tier for level in levels}
    advice = ["kv_cache_config.max_tokens, max_gpu_total_bytes or free_gpu_memory_fraction"]
    if "host" not in tiers:
        advice.append("host_cache_size (there is no host tier)")
    wants = ", ".join(f"{count} of pool {pool}" for pool, count in enumerate(needs))
    return ApiError(
        503,
        f"No pages for this request in {MAX_IDLE_PASSES} scheduling passes in which nothing else could go on either. "
        f"It has {seq.history.length} tokens, {seq.num_computed} of them computed, and needs {wants} pages. "
        f"Requests: {running} running, {waiting} waiting, {suspended} suspended. "
        f"Pages: {'; '.join(_describe(level, layout) for level in levels)}. "
        f"Raise {' or '.join(advice)}, or lower max_batch_size.",
        type="service_unavailable_error",
        code="kv_cache_exhausted",
    )


def _describe(level: LevelStats, layout: PageLayout) -> str:
    parts = []
    for pool, (total, free) in enumerate(zip(level.total, level.free, strict=True)):
        groups = [group for group in level.groups if layout.groups[group.group].pool == pool]
        evictable, held, pinned, locked = (
            sum(getattr(group, state) for group in groups) for state in ("evictable", "held", "pinned", "locked")
        )
        parts.append(
            f"{level.tier} pool {pool} ({layout.pools[pool].page_bytes} bytes a page): {total} in all, {free} free, "
            f"{evictable} evictable, {held} held, {pinned} pinned, {locked} locked"
        )
    return "; ".join(parts)
