"""A fake cache manager with cold tiers: pages are objects, everything is looked up the slow way, bytes do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvmesh.cache.base import MatchInfo
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.pages import PageCounts
from kvmesh.cache.stats import CacheCounters, CacheStats, GroupPages, LevelStats
from kvmesh.cache.windows import blocks_needed, stale_range
from kvmesh.hashing import ReuseScope, TokenIds, v2_block_keys, v2_root
from kvmesh.protocol.retention import RetentionConfig

COLD = 1


class FakePage:
    """One page: on a level, used or not, known to the tree or not."""

    def __init__(self, group: int, pool: int) -> None:
        self.group, self.pool = group, pool
        self.level = 0
        self.locks = self.holds = self.pins = 0
        self.key: bytes | None = None
        self.damaged = False

    @property
    def droppable(self) -> bool:
        return not (self.locks or self.holds or self.pins)

    @property
    def movable(self) -> bool:
        return self.holds > 0 and not (self.locks or self.pins)


class FakeLease(NamedTuple):
    """Pinned pages."""

    manager: FakeCacheManager
    pages: list[FakePage]

    def release(self) -> None:
        self.manager.leases.remove(self)
        for page in self.pages:
            page.pins -= 1
            self.manager.settle(page)


class FakeCache:
    """One sequence's pages by group and block."""

    def __init__(self, manager: FakeCacheManager, scope: ReuseScope, prompt: TokenIds, request_id: str) -> None:
        self.request_id = request_id
        self.manager, self.scope = manager, scope
        self.pages: list[list[FakePage | None]] = [[] for _ in manager.layout.groups]
        self.tokens = np.array(prompt, dtype=np.int32)
        self.capacity = self.history = self.committed = self.num_cached_tokens = 0
        self.reuse = True
        self.lost = False
        self.state = "suspended"

    @property
    def num_blocks(self) -> int:
        return len(self.pages[0])

    def live(self) -> list[FakePage]:
        return [page for pages in self.pages for page in pages if page is not None]

    def chunk_end(self, start: int, end: int) -> int:
        """Snapshot points are the multiples of ``manager.snapshot_every``."""
        every = self.manager.snapshot_every
        return end if not every else min(end, (start // every + 1) * every)

    def resume(self) -> bool:
        assert self.state == "suspended"
        manager = self.manager
        assert not self.lost, "a lost cache was resumed"
        if manager.utilisation > manager.max_util_for_resume:
            return False
        pages = self.live()
        for page in pages:
            page.locks += 1
            page.holds -= 1
        cold = [page for page in pages if page.level == COLD]
        if any(page.damaged for page in cold):
            self.lost = True
        wanted = [sum(page.pool == pool for page in cold) for pool in range(len(manager.totals))]
        if self.lost or any(want > have for want, have in zip(wanted, manager.available_pages(), strict=True)):
            for page in pages:
                page.locks -= 1
                page.holds += 1
            return False
        for page in cold:
            manager.make_room(page.pool, 1)
            page.level = 0
        self.state = "active"
        return True

    def suspend(self) -> None:
        assert self.state == "active"
        for page in self.live():
            page.locks -= 1
            page.holds += 1
        self.state = "suspended"

    def resize(self, capacity: int, history: int | None = None) -> bool:
        assert self.state == "active"
        history = self.history if history is None else history
        assert self.history <= history <= capacity
        manager, size = self.manager, self.manager.block
        blocks = -(-capacity // size)
        layout = manager.layout
        wanted = [0] * len(manager.totals)
        stale = [stale_range(history, size, group.window) for group in layout.groups]
        for group, gone in zip(layout.groups, stale, strict=True):
            wanted[group.pool] += sum(
                not gone.begin <= block < gone.end for block in range(len(self.pages[group.group_id]), blocks)
            )
        # What becomes stale makes room for what is new.
        given = [0] * len(manager.totals)
        for group, gone in zip(layout.groups, stale, strict=True):
            for page in self.pages[group.group_id][gone.begin : gone.end]:
                given[group.pool] += page is not None and page.locks == 1 and not (page.holds or page.pins)
        room = [have + more for have, more in zip(manager.available_pages(), given, strict=True)]
        if any(want > have for want, have in zip(wanted, room, strict=True)):
            return False
        for group, gone in zip(layout.groups, stale, strict=True):
            pages = self.pages[group.group_id]
            for block in range(gone.begin, min(gone.end, len(pages))):
                self._let_go(pages, block)
        for pool, count in enumerate(wanted):
            manager.make_room(pool, count)
        for group, gone in zip(layout.groups, stale, strict=True):
            pages = self.pages[group.group_id]
            for block in range(len(pages), blocks):
                pages.append(None if gone.begin <= block < gone.end else manager.new_page(group.group_id, group.pool))
            while len(pages) > blocks:
                self._let_go(pages, len(pages) - 1)
                pages.pop()
        self.capacity, self.history = capacity, history
        return True

    def commit(self, token_ids: TokenIds) -> None:
        assert self.state == "active"
        self.tokens = np.concatenate((self.tokens[: self.committed], token_ids))
        self.committed += len(token_ids)
        assert self.committed <= self.capacity
        self.history = max(self.history, self.committed)
        if self.reuse and self.manager.reuse:
            keys = v2_block_keys(self.tokens[: self.committed], self.manager.block, v2_root(self.scope))
            for group, pages in enumerate(self.pages):
                for key, page in zip(keys, pages, strict=False):
                    if page is not None and page.key is None and (group, key) not in self.manager.tree:
                        page.key = key
                        self.manager.tree[group, key] = page

    def note_step(self) -> None:
        assert self.state == "active"

    def stop_committing(self) -> None:
        pass

    def close(self) -> None:
        if self.state == "closed":
            return
        for pages in self.pages:
            for block in reversed(range(len(pages))):
                self._let_go(pages, block)
        self.pages = [[] for _ in self.pages]
        self.state = "closed"
        self.manager.caches.remove(self)

    def hold(self, num_tokens: int) -> FakeLease:
        blocks = -(-num_tokens // self.manager.block)
        lease = FakeLease(self.manager, [page for pages in self.pages for page in pages[:blocks] if page is not None])
        for page in lease.pages:
            page.pins += 1
        self.manager.leases.append(lease)
        return lease

    def _let_go(self, pages: list[FakePage | None], block: int) -> None:
        page = pages[block]
        if page is None:
            return
        pages[block] = None
        if self.state == "active":
            page.locks -= 1
        else:
            page.holds -= 1
        self.manager.settle(page)


class FakeCacheManager:
    """Full-attention and windowed groups over one pool each.

    Args:
        device: device pages by group.
        cold: cold pages by group, none without a cold tier.
        windows: attention window of each group.
        block: tokens per block.
    """

    def __init__(
        self,
        device: Sequence[int],
        cold: Sequence[int] = (),
        *,
        windows: Sequence[int | None] = (None,),
        block: int = 4,
        max_util_for_resume: float = 1.0,
        reuse: bool = True,
    ) -> None:
        # Heads differ, so that every group has pages of its own size, and with it a pool of its own.
        layers = tuple(
            LayerCacheSpec(
                layer_index=index, kind="attention", num_kv_heads=index + 1, head_dim=8, dtype="float32", window=window
            )
            for index, window in enumerate(windows)
        )
        self.layout = PageLayout.build(CacheRequirements(layers), block)
        self.block = block
        self.totals, self.cold = list(device), list(cold)
        self.max_util_for_resume = max_util_for_resume
        self.reuse = reuse
        self.snapshot_every = 0
        self.pages: dict[FakePage, None] = {}
        """In order of last use."""
        self.tree: dict[tuple[int, bytes], FakePage] = {}
        self.caches: list[FakeCache] = []
        self.leases: list[FakeLease] = []
        self.prefetched: list[str] = []
        self.kept_meanwhile: list[int] = []
        """By prefetch, of how many other prompts no page was to go."""
        self.hashed_tokens = 0
        self.ticks: list[float] = []
        self.rebalances = 0
        self.wants = False

    @property
    def tiers(self) -> tuple[str, ...]:
        return ("gpu", "host") if self.cold else ("gpu",)

    @property
    def can_suspend(self) -> bool:
        return bool(self.cold)

    @property
    def utilisation(self) -> float:
        return max((total - have) / total for total, have in zip(self.totals, self.available_pages(), strict=True))

    def new_page(self, group: int, pool: int) -> FakePage:
        page = FakePage(group, pool)
        page.locks = 1
        self.pages[page] = None
        return page

    def settle(self, page: FakePage) -> None:
        """A page lost a user."""
        if not page.droppable:
            return
        if page.key is None:
            del self.pages[page]
        else:
            del self.pages[page]
            self.pages[page] = None

    def free(self, pool: int, level: int = 0) -> int:
        total = self.totals[pool] if level == 0 else (self.cold[pool] if self.cold else 0)
        return total - sum(page.pool == pool and page.level == level for page in self.pages)

    def cold_room(self, pool: int) -> int:
        if not self.cold:
            return 0
        return self.free(pool, COLD) + sum(
            page.pool == pool and page.level == COLD and page.droppable for page in self.pages
        )

    def available_pages(self) -> list[int]:
        found = []
        for pool in range(len(self.totals)):
            mine = [page for page in self.pages if page.pool == pool and page.level == 0]
            droppable = sum(page.droppable for page in mine)
            movable = sum(page.movable for page in mine)
            found.append(self.free(pool) + droppable + min(movable, self.cold_room(pool)))
        return found

    def reservable_pages(self) -> list[int]:
        return [
            total - sum(page.pool == pool and page.pins > 0 and not page.locks for page in self.pages)
            for pool, total in enumerate(self.totals)
        ]

    def pages_needed(self, *, history: int, capacity: int) -> list[int]:
        return [blocks_needed(group, self.block, history=history, capacity=capacity) for group in self.layout.groups]

    def make_room(self, pool: int, count: int) -> None:
        while self.free(pool) < count:
            mine = [page for page in self.pages if page.pool == pool and page.level == 0]
            droppable = [page for page in mine if page.droppable]
            if droppable:
                if self.cold and self.free(pool, COLD):
                    droppable[0].level = COLD
                else:
                    self._drop(droppable[0])
                continue
            if not self.free(pool, COLD):
                self._drop(next(p for p in self.pages if p.pool == pool and p.level == COLD and p.droppable))
            next(page for page in mine if page.movable).level = COLD

    def _drop(self, page: FakePage) -> None:
        assert page.droppable
        assert page.key is not None
        del self.tree[page.group, page.key]
        del self.pages[page]

    def block_keys(self, scope: ReuseScope, token_ids: TokenIds) -> list[bytes]:
        self.hashed_tokens += len(token_ids)
        return v2_block_keys(token_ids, self.block, v2_root(scope))

    def match(self, scope: ReuseScope, token_ids: TokenIds, *, block_keys: list[bytes] | None = None) -> MatchInfo:
        keys = self.block_keys(scope, token_ids) if block_keys is None else block_keys
        blocks = len(self._found(keys, len(token_ids)))
        return MatchInfo(blocks * self.block, blocks)

    def _found(self, keys: list[bytes], length: int) -> list[bytes]:
        """Keys of the longest reusable prefix: every block that is live at its end must be there."""
        if not self.reuse:
            return []
        assert len(keys) == length // self.block, "keys of another prompt"
        for blocks in range((length - 1) // self.block, 0, -1):
            if all(
                (group.group_id, keys[block]) in self.tree
                for group in self.layout.groups
                for block in range(stale_range(blocks * self.block, self.block, group.window).end, blocks)
            ):
                return keys[:blocks]
        return []

    def create(
        self,
        scope: ReuseScope,
        token_ids: TokenIds,
        request_id: str,
        *,
        block_keys: list[bytes] | None = None,
        retention: RetentionConfig | None = None,
        conversation_id: str | None = None,
        reuse: bool = True,
        prompt_length: int | None = None,
        reuse_limit: int | None = None,
        counted: bool = True,
        again: bool = False,
    ) -> FakeCache:
        del retention, conversation_id, prompt_length, counted, again
        keys = self.block_keys(scope, token_ids) if block_keys is None else block_keys
        cache = FakeCache(self, scope, token_ids, request_id)
        cache.reuse = reuse
        found = self._found(keys, len(token_ids)) if reuse else []
        if reuse_limit is not None:
            assert not any(group.window for group in self.layout.groups) or len(found) * self.block <= reuse_limit
            found = found[: reuse_limit // self.block]
        history = len(found) * self.block
        for group in self.layout.groups:
            first = stale_range(history, self.block, group.window).end
            for block, key in enumerate(found):
                page = self.tree[group.group_id, key] if block >= first else None
                if page is not None:
                    page.holds += 1
                cache.pages[group.group_id].append(page)
        cache.capacity = cache.history = cache.committed = cache.num_cached_tokens = history
        self.caches.append(cache)
        return cache

    def prefetch(
        self,
        scope: ReuseScope,
        token_ids: TokenIds,
        *,
        block_keys: list[bytes] | None = None,
        keep: Sequence[list[bytes]] = (),
    ) -> int:
        assert block_keys == v2_block_keys(token_ids, self.block, v2_root(scope))
        self.prefetched.append(bytes(token_ids[:1]).hex())
        self.kept_meanwhile.append(len(keep))
        return 0

    def damage(self, page: FakePage) -> None:
        """The page's bytes in the cold tier are not what was written: a miss for everybody from now on."""
        assert page.level == COLD
        page.damaged = True
        if page.key is not None:
            del self.tree[page.group, page.key]
            page.key = None
            self.settle(page)

    def tick(self, now_s: float) -> None:
        self.ticks.append(now_s)

    def wants_rebalance(self, now_s: float) -> bool:
        del now_s
        return self.wants

    def rebalance(self, now_s: float) -> bool:
        del now_s
        assert all(cache.state == "suspended" for cache in self.caches)
        assert not self.leases
        self.rebalances += 1
        return True

    def stats(self) -> CacheStats:
        pools = tuple(
            PageCounts(
                total,
                self.free(pool),
                self._count(pool, "droppable"),
                total - self.free(pool) - self._count(pool, "droppable") - self._count(pool, "locks"),
                self._count(pool, "locks"),
                0,
                0,
            )
            for pool, total in enumerate(self.totals)
        )
        sums = np.sum(pools, axis=0).tolist()
        return CacheStats(*sums, len(self.caches), len(self.leases), len(self.tree), pools, CacheCounters())

    def level_stats(self) -> list[LevelStats]:
        levels = [LevelStats(0, "gpu", tuple(self.totals), tuple(map(self.free, range(len(self.totals)))), ())]
        if self.cold:
            free = tuple(self.free(pool, COLD) for pool in range(len(self.cold)))
            levels.append(LevelStats(1, "host", tuple(self.cold), free, ()))
        return [
            level._replace(
                groups=tuple(
                    GroupPages(
                        group.group_id,
                        group.window,
                        locked=self._count(group.pool, "locks", level.level),
                        pinned=self._count(group.pool, "pins", level.level),
                        held=self._count(group.pool, "movable", level.level),
                        evictable=self._count(group.pool, "droppable", level.level),
                    )
                    for group in self.layout.groups
                )
            )
            for level in levels
        ]

    def _count(self, pool: int, state: str, level: int = 0) -> int:
        return sum(page.pool == pool and page.level == level and bool(getattr(page, state)) for page in self.pages)

    def check(self) -> None:
        """No level holds more than it has, and every used page has a user."""
        for pool in range(len(self.totals)):
            assert self.free(pool) >= 0
            assert self.free(pool, COLD) >= 0
        users = sum(page.locks + page.holds for page in self.pages)
        assert users == sum(len(cache.live()) for cache in self.caches)
        assert sum(page.pins for page in self.pages) == sum(len(lease.pages) for lease in self.leases)
        assert all(page.level == 0 for page in self.pages if page.locks or page.pins)
