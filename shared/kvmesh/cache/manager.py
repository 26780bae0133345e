"""The KV cache manager (V2): makes sequences, finds reusable prefixes, and knows the state of every page.

One thread drives a manager and everything made by it; no call waits. Running out of pages is a result
(``resume`` and ``resize`` return False), and then nothing has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvmesh.cache.device import Device, DeviceBuffer
from kvmesh.cache.errors import CacheBusyError
from kvmesh.cache.events import EventSink
from kvmesh.cache.integrity import check_store
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.lease import PageLease
from kvmesh.cache.pages import DEFAULT_PRIORITY, Pages
from kvmesh.cache.sequence import KvCache
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.stats import CacheStats
from kvmesh.cache.store import BlockMatch, BlockStore
from kvmesh.hashing import ReuseScope, TokenIds, v2_block_keys, v2_root

__all__ = ["CacheSettings", "KvCache", "KvCacheManager", "MatchInfo"]


class MatchInfo(NamedTuple):
    """How much of a prompt is cached now."""

    num_tokens: int
    """Reusable tokens; always less than the prompt's length, since the last token must be computed."""
    num_full_blocks: int
    """Blocks that would be shared; a remainder of ``num_tokens`` would be copied from a further one."""


class KvCacheManager:
    """The cache of one engine.

    Args:
        layout: layer groups, pools and page sizes.
        num_pages: pages of each pool of ``layout`` (:func:`kvmesh.cache.sizing.plan_pages`).
        device: where the pools are allocated.
        settings: how it behaves.
        event_sink: told of every change of what is reusable.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: Sequence[int],
        device: Device,
        settings: CacheSettings | None = None,
        event_sink: EventSink | None = None,
    ) -> None:
        if len(num_pages) != len(layout.pools):
            raise ValueError(f"{len(layout.pools)} pools need as many page counts, not {len(num_pages)}")
        self.layout = layout
        self.settings = settings or CacheSettings()
        self.store = BlockStore(
            layout, list(num_pages), partial_reuse=self.settings.enable_partial_reuse, sink=event_sink
        )
        self.pools: list[DeviceBuffer] = []
        """Memory of each pool: slot ``i`` begins at ``address + i * page_bytes``."""
        self._device = device
        self._sequences: set[KvCache] = set()
        self._leases: set[PageLease] = set()
        for pool, count in zip(layout.pools, num_pages, strict=True):
            self.pools.append(device.allocate(count * pool.page_bytes))
        if event_sink is not None:
            event_sink.on_created(("gpu",), [(num_pages[group.pool],) for group in layout.groups])

    @property
    def utilisation(self) -> float:
        """The largest share, over pools, of pages that an allocation cannot get."""
        return max((table.num_pages - table.num_available) / table.num_pages for table in self.store.tables)

    def block_keys(self, scope: ReuseScope, token_ids: TokenIds) -> list[bytes]:
        """V2 keys of the full blocks of a prompt; give them to :meth:`match` and :meth:`create` to hash only once."""
        return v2_block_keys(token_ids, self.layout.tokens_per_block, v2_root(scope))

    def match(self, scope: ReuseScope, token_ids: TokenIds, *, block_keys: list[bytes] | None = None) -> MatchInfo:
        """How much of ``token_ids`` (int32) a sequence created now would find. Changes nothing."""
        keys = self.block_keys(scope, token_ids) if block_keys is None else block_keys
        found = self.find(scope, token_ids, keys)
        full = len(found.nodes)
        return MatchInfo(full * self.layout.tokens_per_block + found.partial_tokens, full)

    def create(
        self,
        scope: ReuseScope,
        token_ids: TokenIds,
        request_id: str,
        *,
        block_keys: list[bytes] | None = None,
        priority: int = DEFAULT_PRIORITY,
    ) -> KvCache:
        """A new suspended sequence that holds the cached prefix of its prompt.

        Args:
            scope: with whom blocks may be shared.
            token_ids: the prompt, int32, at least one token.
            request_id: for messages.
            block_keys: from :meth:`block_keys` of the same scope and tokens.
            priority: 0 (evicted first) to 100, of the pages that it allocates.

        Raises:
            ValueError: the prompt is empty, or the priority is out of range.
        """
        if not len(token_ids):
            raise ValueError(f"{request_id}: a prompt has at least one token")
        if not 0 <= priority <= 100:
            raise ValueError(f"{request_id}: priority {priority} is not in 0..100")
        keys = self.block_keys(scope, token_ids) if block_keys is None else block_keys
        sequence = KvCache(self, scope, token_ids, request_id, block_keys=keys, priority=priority)
        self._sequences.add(sequence)
        self._count_creation(sequence, len(token_ids))
        return sequence

    def find(self, scope: ReuseScope, token_ids: TokenIds, block_keys: list[bytes]) -> BlockMatch:
        """The blocks behind :meth:`match`; nothing where reuse is off."""
        if not self.settings.enable_block_reuse:
            return BlockMatch([], None, 0)
        return self.store.match(scope, block_keys, token_ids, len(token_ids) - 1)

    def lease(self, num_tokens: int, pages: list[Pages]) -> PageLease:
        """Pin ``pages`` of each layer group; :meth:`KvCache.hold` is the way to call this."""
        lease = PageLease(num_tokens, self.store.group_tables, pages, self._leases.discard)
        self._leases.add(lease)
        return lease

    def copy_pages(self, sources: list[Pages], targets: list[Pages]) -> None:
        """Copy page contents, ``sources[group]`` to ``targets[group]``."""
        for group, source, target in zip(self.layout.groups, sources, targets, strict=True):
            buffer = self.pools[group.pool]
            table = self.store.tables[group.pool]
            self._device.copy_pages(buffer, table.slots(target), buffer, table.slots(source), group.page_bytes)
            self.store.counters.copied_pages += len(target)

    def forget(self, sequence: KvCache) -> None:
        """A sequence was closed; :meth:`KvCache.close` calls this."""
        self._sequences.discard(sequence)

    def stats(self) -> CacheStats:
        """Pages by state and counters."""
        pools = tuple(table.counts for table in self.store.tables)
        sums = np.sum(pools, axis=0).tolist()
        total, free, evictable, held, locked, quarantined = sums
        return CacheStats(
            total=total,
            free=free,
            evictable=evictable,
            held=held,
            locked=locked,
            quarantined=quarantined,
            open_sequences=len(self._sequences),
            open_leases=len(self._leases),
            cached_blocks=self.store.num_blocks,
            pools=pools,
            counters=replace(self.store.counters),
        )

    def check_integrity(self) -> None:
        """Check the bookkeeping of every page against the tree, the sequences and the leases. Linear in pages.

        Raises:
            CacheIntegrityError: something contradicts itself; the message says what.
        """
        check_store(self.store, self._sequences, self._leases)

    def clear_reusable_blocks(self) -> None:
        """Forget every reusable block.

        Raises:
            CacheBusyError: a sequence is open.
        """
        if self._sequences:
            raise CacheBusyError(f"cannot clear the cache: {len(self._sequences)} sequences are open")
        self.store.clear()

    def close(self) -> None:
        """Forget every block and give the memory back. Closing twice is harmless.

        Raises:
            CacheBusyError: a sequence or a lease is open: somebody may still read or write the memory.
        """
        if self._leases:
            raise CacheBusyError(f"cannot close the cache: {len(self._leases)} page leases are open")
        self.clear_reusable_blocks()
        while self.pools:
            self._device.free(self.pools.pop())

    def _count_creation(self, sequence: KvCache, prompt_length: int) -> None:
        counters = self.store.counters
        cached = sequence.num_cached_tokens
        full, partial = divmod(cached, self.layout.tokens_per_block)
        counters.prompt_tokens += prompt_length
        counters.cached_tokens += cached
        counters.reused_full_blocks += full
        counters.reused_partial_blocks += partial > 0
        counters.missed_blocks += self.layout.num_blocks(prompt_length) - full - (partial > 0)
