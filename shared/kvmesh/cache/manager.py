"""The KV cache manager (V2): makes sequences, finds reusable prefixes, and knows the state of every page.

One thread drives a manager and everything made by it; no call waits for anybody. Running out of pages is a result
(``resume`` and ``resize`` return False), and then nothing has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvmesh.cache.adjust import adjust_level, level_ratios
from kvmesh.cache.base import MatchInfo
from kvmesh.cache.conversation import Conversation, Conversations
from kvmesh.cache.device import DeviceBuffer
from kvmesh.cache.errors import CacheBusyError
from kvmesh.cache.events import EventSink
from kvmesh.cache.integrity import check_store
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.lease import PageLease
from kvmesh.cache.pages import DEVICE_LEVEL, NO_PAGE, Pages
from kvmesh.cache.prefetch import HOST_LEVEL, fetch_ahead
from kvmesh.cache.priorities import PagePriorities
from kvmesh.cache.rebalance import RebalanceTuner
from kvmesh.cache.sequence import KvCache, SequenceState
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.snapshots import branch_point, snapshot_points
from kvmesh.cache.stats import CacheStats, GroupPages, LevelStats
from kvmesh.cache.storage import Storage
from kvmesh.cache.storage.memory import HostPool
from kvmesh.cache.store import NO_MATCH, BlockMatch, BlockStore
from kvmesh.cache.tallies import SequenceTally
from kvmesh.cache.windows import blocks_needed
from kvmesh.hashing import ReuseScope, TokenIds, v2_block_keys, v2_root
from kvmesh.protocol.retention import RetentionConfig
from kvmesh.telemetry import get_logger

__all__ = ["CacheSettings", "KvCache", "KvCacheManager", "MatchInfo"]

_log = get_logger("cache.manager")


class KvCacheManager:
    """The cache of one engine; implements :class:`kvmesh.cache.base.CacheManager`.

    Args:
        layout: layer groups, pools and page sizes.
        storage: the bytes of all levels; the manager closes it.
        num_pages: ``num_pages[level][pool]``: slots of ``storage``.
        settings: how it behaves.
        event_sink: told of every change of what is reusable.
        max_pages: by pool, the most slots that it may have on all levels together, for :meth:`rebalance`.
        tuner: decides when memory should move between pools, None to leave it where it is.
    """

    def __init__(
        self,
        layout: PageLayout,
        storage: Storage,
        num_pages: Sequence[Sequence[int]],
        settings: CacheSettings | None = None,
        event_sink: EventSink | None = None,
        *,
        max_pages: Sequence[int] | None = None,
        tuner: RebalanceTuner | None = None,
    ) -> None:
        if any(len(counts) != len(layout.pools) for counts in num_pages):
            raise ValueError(f"{len(layout.pools)} pools need as many page counts on every level")
        self.layout = layout
        self.settings = settings or CacheSettings()
        self.store = BlockStore(
            layout,
            storage,
            num_pages,
            max_pages=max_pages,
            partial_reuse=self.settings.enable_partial_reuse,
            offload_min_priority=self.settings.cold_tier_offload_min_priority,
            sink=event_sink,
        )
        self.tiers = tuple(storage.tiers)
        self.storage = storage
        self.tuner = tuner
        self._sequences: set[KvCache] = set()
        self._leases: set[PageLease] = set()
        self._has_states = any(group.kind == "state" for group in layout.groups)
        self._conversations = Conversations(self.store, self.settings.max_num_turns)
        self._closed = False
        if event_sink is not None:
            event_sink.on_created(self.tiers, [[counts[group.pool] for counts in num_pages] for group in layout.groups])

    @property
    def pools(self) -> Sequence[DeviceBuffer]:
        """Device memory of each pool: slot ``i`` begins at ``address + i * page_bytes``. It never moves."""
        return self.storage.pools

    @property
    def host_pools(self) -> Sequence[HostPool]:
        """Memory of the host tier by pool; empty without such a tier. It never moves where it was made to be shared."""
        return self.storage.host_pools

    @property
    def can_suspend(self) -> bool:
        """Whether suspended pages can leave the device: there is a colder level that takes them."""
        return any(self.store.placement.usable[1:])

    @property
    def utilisation(self) -> float:
        """The largest share, over pools, of device pages that are neither free nor could leave."""
        return max(self._unavailable(pool) / self.store.tables[pool].num_slots[DEVICE_LEVEL] for pool in self._pools)

    def _bring_up(self, group: int, pages: Pages) -> bool:
        """Bring pinned pages of a disk tier to a tier above it; whether there was room for all."""
        table = self.store.group_tables[group]
        if "disk" not in self.tiers:
            return True
        disk = self.tiers.index("disk")
        below = pages[table.level[pages] == disk]
        if not len(below) or self._bring_pinned(group, below, disk - 1):
            return True
        # More than the host tier takes, or no room for all at once: each one that comes up leaves room for another
        # to go down.
        levels = range(disk - 1, DEVICE_LEVEL - 1, -1)
        return all(any(self._bring_pinned(group, page, level) for level in levels) for page in below[:, None])

    def _bring_pinned(self, group: int, pages: Pages, level: int) -> bool:
        table, pool = self.store.group_tables[group], self.store.layout.groups[group].pool
        table.release_place(pages)
        table.lock(pages)  # As :meth:`Placement.bring` wants them: in no queue, and needed.
        brought = self.store.placement.bring(pool, pages, level)
        table.keep_place(pages)
        table.unlock(pages)
        return brought is not None

    @property
    def sequences(self) -> frozenset[KvCache]:
        """The open ones."""
        return frozenset(self._sequences)

    def block_keys(self, scope: ReuseScope, token_ids: TokenIds) -> list[bytes]:
        """V2 keys of the full blocks of a prompt; give them to :meth:`match` and :meth:`create` to hash only once."""
        return v2_block_keys(token_ids, self.layout.tokens_per_block, v2_root(scope))

    def match(self, scope: ReuseScope, token_ids: TokenIds, *, block_keys: list[bytes] | None = None) -> MatchInfo:
        """How much of ``token_ids`` (int32) a sequence created now would find. Changes nothing."""
        keys = self.block_keys(scope, token_ids) if block_keys is None else block_keys
        found = self.find(scope, token_ids, keys)
        full = len(found.nodes)
        return MatchInfo(
            full * self.layout.tokens_per_block + found.partial_tokens, full, self._coldest(self._chain(found))
        )

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
    ) -> KvCache:
        """A new suspended sequence: see :class:`~kvmesh.cache.base.CacheManager`.

        Raises:
            ValueError: the prompt is empty.
        """
        if not len(token_ids):
            raise ValueError(f"{request_id}: a prompt has at least one token")
        keys = self.block_keys(scope, token_ids) if block_keys is None else block_keys
        match = self.find(scope, token_ids, keys, reuse_limit) if reuse else NO_MATCH
        prompt_length = len(token_ids) if prompt_length is None else prompt_length
        settings = self.settings
        storing = settings.enable_block_reuse and reuse
        fork = self._fork(keys, len(token_ids)) if reuse else None
        points = self._snapshot_points(len(token_ids), fork) if reuse else ()
        sequence = KvCache(
            self,
            scope,
            token_ids,
            request_id,
            prompt_length=prompt_length,
            match=match,
            block_keys=keys,
            priorities=PagePriorities(
                retention, prompt_length, self.layout.tokens_per_block, settings.swa_endpoint_rewind_tokens
            ),
            storing=storing,
            boundaries=self._boundaries(points, fork),
            snapshot_points=points,
            conversation_id=self._conversation_of(scope, conversation_id, request_id),
            tally=SequenceTally(counted=counted, again=again),
        )
        self._sequences.add(sequence)
        self._note_creation(sequence, len(token_ids), looked_up=storing)
        return sequence

    def find(
        self, scope: ReuseScope, token_ids: TokenIds, block_keys: list[bytes], limit: int | None = None
    ) -> BlockMatch:
        """The blocks behind :meth:`match`, of ``limit`` tokens at most; nothing where reuse is off."""
        if not self.settings.enable_block_reuse:
            return NO_MATCH
        longest = len(token_ids) - 1
        return self.store.match(scope, block_keys, token_ids, longest if limit is None else min(limit, longest))

    def prefetch(
        self,
        scope: ReuseScope,
        token_ids: TokenIds,
        *,
        block_keys: list[bytes] | None = None,
        keep: Sequence[list[bytes]] = (),
    ) -> int:
        """Bring disk-tier pages of a prompt's cached prefix up to the host tier, best effort; returns their number.

        A full host tier pushes down as many pages that nobody needs, but none of the blocks ``keep``.
        """
        if len(self.tiers) <= HOST_LEVEL + 1:
            return 0
        keys = self.block_keys(scope, token_ids) if block_keys is None else block_keys
        found = self.find(scope, token_ids, keys)
        return fetch_ahead(self.store, found, [self.store.tree.walk(other) for other in keep])

    def tick(self, now_s: float) -> None:
        """Let retention durations that have run out by ``now_s`` (monotonic) expire. Call it once a step."""
        for table in self.store.tables:
            for page, old in table.expire(now_s):
                self.store.announcer.priority(table, page, old)

    def pages_needed(self, *, history: int, capacity: int) -> list[int]:
        """Device pages by pool of a sequence with ``history`` computed tokens and pages for ``capacity``."""
        size = self.layout.tokens_per_block
        return self.store.by_pool(
            [blocks_needed(group, size, history=history, capacity=capacity) for group in self.layout.groups]
        )

    def available_pages(self) -> list[int]:
        """By pool, device pages that can be had now: free ones and those that eviction or offload can free."""
        return [self.store.placement.available(pool) for pool in self._pools]

    def reservable_pages(self) -> list[int]:
        """By pool, device pages that sequences can own in all: the pool without what only leases pin."""
        return [
            counts.total - counts.pinned - counts.quarantined
            for counts in (table.counts() for table in self.store.tables)
        ]

    def lease(self, num_tokens: int, pages: list[Pages]) -> PageLease:
        """Pin ``pages`` of each layer group; :meth:`KvCache.hold` is the way to call this."""
        lease = PageLease(num_tokens, self.store.group_tables, pages, self._leases.discard, self._bring_up)
        self._leases.add(lease)
        return lease

    def forget(self, sequence: KvCache) -> None:
        """A sequence was closed; :meth:`KvCache.close` calls this."""
        self._sequences.discard(sequence)
        if sequence.conversation_id is not None:
            self._conversations.finish((sequence.scope, sequence.conversation_id))
        if self.tuner is not None and sequence.tally.counted:
            self.tuner.on_close(sequence.mean_capacity**2, sequence.mean_history**2)

    def end_turn(self, conversation: Conversation, keys: list[bytes], length: int) -> None:
        """A conversation's turn is over; :meth:`KvCache.close` calls this."""
        self._conversations.end_turn(conversation, keys, length)

    def wants_rebalance(self, now_s: float) -> bool:
        """Whether :meth:`rebalance` would do something if every sequence were suspended."""
        if self.tuner is None:
            return False
        levels = range(len(self.tiers))
        current = [
            level_ratios(self.layout, [table.num_slots[level] for table in self.store.tables]) for level in levels
        ]
        return self.tuner.need_adjustment(now_s, current)

    def rebalance(self, now_s: float) -> bool:
        """Move memory between pools when the auto-tuner wants it and every sequence is suspended; whether it did."""
        active = any(sequence.state is SequenceState.ACTIVE for sequence in self._sequences)
        if self.tuner is None or active or not self.wants_rebalance(now_s):
            return False
        targets = self.tuner.target_pages()
        assert targets is not None
        for level, (target, level_bytes) in enumerate(zip(targets, self.tuner.level_bytes, strict=True)):
            adjust_level(self.store, self.storage, level, target, level_bytes)
        self.tuner.adjusted(now_s)
        self.store.counters.rebalances += 1
        return True

    def stats(self) -> CacheStats:
        """Pages by state and counters."""
        pools = tuple(table.counts() for table in self.store.tables)
        total, free, evictable, held, locked, pinned, quarantined = np.sum(pools, axis=0).tolist()
        return CacheStats(
            total=total,
            free=free,
            evictable=evictable,
            held=held,
            locked=locked,
            pinned=pinned,
            quarantined=quarantined,
            open_sequences=len(self._sequences),
            open_leases=len(self._leases),
            cached_blocks=self.store.num_blocks,
            pools=pools,
            counters=replace(self.store.counters, **self.store.tallies.totals()._asdict()),
            flows=self.store.flows.snapshot(),
            tallies=self.store.tallies.snapshot(),
        )

    def level_stats(self) -> list[LevelStats]:
        """Pages by level and layer group; linear in pages, for reports at a human pace."""
        return [
            LevelStats(
                level=level,
                tier=tier,
                total=tuple(table.num_slots[level] for table in self.store.tables),
                free=tuple(len(table.free_slots[level]) for table in self.store.tables),
                groups=tuple(
                    GroupPages(index, group.window, *self.store.group_tables[index].group_counts(level, index))
                    for index, group in enumerate(self.layout.groups)
                ),
                usable=self.store.placement.usable[level],
            )
            for level, tier in enumerate(self.tiers)
        ]

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
        """Forget every block and give memory and files back. Closing twice is harmless.

        Raises:
            CacheBusyError: a sequence or a lease is open: somebody may still read or write the memory.
        """
        if self._closed:
            return
        if self._leases:
            raise CacheBusyError(f"cannot close the cache: {len(self._leases)} page leases are open")
        self.clear_reusable_blocks()
        self._closed = True
        self.storage.close()

    @property
    def _pools(self) -> range:
        return range(len(self.layout.pools))

    def _conversation_of(self, scope: ReuseScope, conversation_id: str | None, request_id: str) -> str | None:
        if conversation_id is None or self.settings.policy != "per_conversation":
            return None
        if self._conversations.begin((scope, conversation_id)):
            return conversation_id
        _log.warning("a turn of this conversation is running; this request is not one", request=request_id)
        return None

    def _unavailable(self, pool: int) -> int:
        table = self.store.tables[pool]
        free = len(table.free_slots[DEVICE_LEVEL])
        if not table.last_level:
            return table.num_slots[DEVICE_LEVEL] - free - table.num_queued(DEVICE_LEVEL)
        counts = table.counts()
        return counts.total - free - counts.evictable - (counts.held if self.can_suspend else 0)

    def _chain(self, found: BlockMatch) -> list[int]:
        chain: list[int] = found.nodes.tolist()
        return chain if found.partial_node is None else [*chain, found.partial_node]

    def _coldest(self, chain: list[int]) -> int:
        if len(self.tiers) == 1 or not chain:
            return DEVICE_LEVEL
        pages = self.store.pages_of(chain)
        return max(
            int(table.level[own[own != NO_PAGE]].max(initial=DEVICE_LEVEL))
            for table, own in zip(self.store.group_tables, pages, strict=True)
        )

    def _fork(self, keys: list[bytes], prompt_length: int) -> int | None:
        """Where the prompt leaves the tree, when there should be reusable state at that point."""
        if not self.settings.enable_branch_snapshot:
            return None
        return branch_point(len(self.store.tree.walk(keys)), self.layout.tokens_per_block, prompt_length)

    def _snapshot_points(self, prompt_length: int, fork: int | None) -> tuple[int, ...]:
        if not self._has_states:
            return ()
        settings = self.settings
        return snapshot_points(
            prompt_length,
            interval=settings.snapshot_interval,
            offsets_from_start=settings.snapshot_offsets_from_start,
            offsets_from_end=settings.snapshot_offsets_from_end,
            fork=fork,
            branch_snapshots=settings.enable_branch_snapshot,
        )

    @staticmethod
    def _boundaries(points: tuple[int, ...], fork: int | None) -> tuple[int, ...]:
        """Where prefill chunks must end: a state can be copied, and a window is whole, only between two steps."""
        return points if fork is None else tuple(sorted({*points, fork}))

    def _note_creation(self, sequence: KvCache, prompt_tokens: int, *, looked_up: bool) -> None:
        """Tell a new sequence's tally what was found for it."""
        tally, totals, cached = sequence.tally, self.store.tallies, sequence.num_cached_tokens
        if tally.again:
            tally.tell(totals.created_again, prompt_tokens, cached)
            return
        if self.tuner is not None:
            tally.tell(self.tuner.on_create, cached)
        tally.tell(totals.created, prompt_tokens, cached)
        if looked_up and self._has_states:
            for group in self.layout.groups:
                if group.kind == "state":
                    tally.tell(totals.looked_up, group.group_id, prompt_tokens, cached, self.layout.tokens_per_block)
        if not cached:
            return
        for group, (whole, partial) in zip(self.layout.groups, sequence.matched_pages(), strict=True):
            table = self.store.tables[group.pool]
            if group.kind == "state":
                continue
            if not table.last_level:
                tally.tell(totals.found, group.group_id, DEVICE_LEVEL, len(whole), len(partial))
                continue
            full, part = (np.bincount(table.level[pages], minlength=len(self.tiers)) for pages in (whole, partial))
            for level in np.flatnonzero(full + part).tolist():
                tally.tell(totals.found, group.group_id, level, int(full[level]), int(part[level]))
