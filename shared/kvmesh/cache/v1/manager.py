"""The KV cache manager V1: TensorRT-LLM's block manager with one window pool per layer group.

Implements :class:`kvmesh.cache.base.CacheManager`, so that the engine drives either manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvmesh.cache.base import MatchInfo
from kvmesh.cache.device import DeviceBuffer
from kvmesh.cache.errors import CacheBusyError
from kvmesh.cache.events import EventSink
from kvmesh.cache.layout import PageLayout
from kvmesh.cache.pages import PageCounts
from kvmesh.cache.retention import validate
from kvmesh.cache.stats import CacheCounters, CacheStats, LevelStats
from kvmesh.cache.storage.memory import HostPool
from kvmesh.cache.tallies import SequenceTally
from kvmesh.cache.v1.block import DEVICE, Block
from kvmesh.cache.v1.index import BlockIndex
from kvmesh.cache.v1.integrity import check_blocks
from kvmesh.cache.v1.lease import BlockLease
from kvmesh.cache.v1.match import Match, Prompt, find_match
from kvmesh.cache.v1.opening import Opening
from kvmesh.cache.v1.report import level_stats, page_counts, reservable_pages
from kvmesh.cache.v1.sequence import V1Sequence
from kvmesh.cache.v1.settings import V1Settings
from kvmesh.cache.v1.tiers import BlockTiers, PageMemory
from kvmesh.cache.v1.tokens import block_keys
from kvmesh.cache.v1.usage import BlockUsage
from kvmesh.cache.windows import blocks_needed, first_live_block
from kvmesh.hashing import ReuseScope, TokenIds
from kvmesh.net.clock import Clock
from kvmesh.protocol.retention import RetentionConfig

__all__ = ["V1CacheManager"]

_MAX_TIERS = ("gpu", "host")


class V1CacheManager:
    """The cache of one engine.

    Args:
        layout: layer groups and pools; groups whose pages have the same size share the slots of one pool.
        memory: the bytes; closed with the manager.
        num_pages: ``num_pages[level][pool]``, fixed for the manager's life.
        tiers: ``("gpu",)`` or ``("gpu", "host")``.
        settings: how it behaves.
        event_sink: told of every change of what is reusable.
        clock: retention durations are measured with it.

    Raises:
        ValueError: other tiers, or page counts that do not fit them and the layout.
    """

    def __init__(
        self,
        layout: PageLayout,
        memory: PageMemory,
        num_pages: Sequence[Sequence[int]],
        tiers: Sequence[str],
        settings: V1Settings,
        *,
        event_sink: EventSink | None,
        clock: Clock,
    ) -> None:
        if tuple(tiers) != _MAX_TIERS[: len(tiers)] or not tiers:
            raise ValueError(f"KV cache manager V1 has a gpu tier and perhaps a host tier, not {list(tiers)}")
        if len(num_pages) != len(tiers) or any(len(counts) != len(layout.pools) for counts in num_pages):
            raise ValueError(f"{len(tiers)} tiers of {len(layout.pools)} pools need as many page counts")
        self.layout = layout
        self.settings = settings
        self.usage = BlockUsage(layout, num_pages, clock.monotonic_s)
        self.counters = CacheCounters()
        self.index = BlockIndex(self.usage, layout.tokens_per_block, self.counters, event_sink)
        self.tiering = BlockTiers(
            layout, self.usage, self.index, memory, self.counters, settings.cold_tier_offload_min_priority
        )
        self.opening = Opening(
            self.usage, self.index, self.tiering, copy_on_partial_reuse=settings.copy_on_partial_reuse
        )
        self._memory = memory
        self._tiers = tuple(tiers)
        self._sequences: set[V1Sequence] = set()
        self._leases: set[BlockLease] = set()
        self._closed = False
        if event_sink is not None:
            by_group = [[counts[group.pool] for counts in num_pages] for group in layout.groups]
            event_sink.on_created(self._tiers, by_group)

    @property
    def host_pools(self) -> Sequence[HostPool]:
        """None that a peer could read from: what is waited for stays on the device."""
        return ()

    @property
    def pools(self) -> Sequence[DeviceBuffer]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return self._memory.pools

    @property
    def tiers(self) -> Sequence[str]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return self._tiers

    @property
    def can_suspend(self) -> bool:
        """False: V1 sequences run until they are closed."""
        return False

    def block_keys(self, scope: ReuseScope, token_ids: TokenIds) -> list[bytes]:
        """V1 keys of the full blocks of a prompt, 8 bytes big-endian each."""
        return block_keys(scope, token_ids, self.layout.tokens_per_block)

    def match(self, scope: ReuseScope, token_ids: TokenIds, *, block_keys: list[bytes] | None = None) -> MatchInfo:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        if not self.settings.enable_block_reuse:
            return MatchInfo(0, 0)
        found = self._find(scope, token_ids, self.block_keys(scope, token_ids) if block_keys is None else block_keys)
        size = self.layout.tokens_per_block
        coldest = DEVICE
        for group, path in zip(self.layout.groups, found.paths, strict=True):
            for node in path[first_live_block(found.num_tokens, size, group.window) :]:
                assert node.block is not None
                coldest = max(coldest, node.block.level)
        coldest = max([coldest, *(tail.level for tail in found.tails)])
        return MatchInfo(found.num_tokens, found.num_tokens // size, coldest)

    def create(
        self,
        scope: ReuseScope,
        token_ids: TokenIds,
        request_id: str,
        *,
        block_keys: list[bytes] | None = None,
        retention: RetentionConfig | None = None,
        conversation_id: str | None = None,  # noqa: ARG002 - of the protocol
        reuse: bool = True,
        prompt_length: int | None = None,
        reuse_limit: int | None = None,
        counted: bool = True,
        again: bool = False,
    ) -> V1Sequence:
        """See :class:`~kvmesh.cache.base.CacheManager`; ``conversation_id`` has no effect, for V1 has one policy.

        Raises:
            ValueError: the prompt is empty, or the retention settings are invalid.
        """
        if not len(token_ids):
            raise ValueError(f"{request_id}: a prompt has at least one token")
        if retention is not None:
            validate(retention)
        reuse = reuse and self.settings.enable_block_reuse
        keys: list[bytes] = []
        found = Match(0, [[] for _ in self.layout.groups], [])
        if reuse:
            keys = self.block_keys(scope, token_ids) if block_keys is None else block_keys
            found = self._find(scope, token_ids, keys, reuse_limit)
        sequence = V1Sequence(
            self,
            scope,
            token_ids,
            request_id,
            prompt_length=len(token_ids) if prompt_length is None else prompt_length,
            keys=keys,
            match=found,
            retention=retention,
            storing=reuse,
            tally=SequenceTally(counted=counted, again=again),
        )
        self._sequences.add(sequence)
        self._note_creation(sequence, len(token_ids))
        return sequence

    def prefetch(
        self,
        scope: ReuseScope,  # noqa: ARG002 - of the protocol
        token_ids: TokenIds,  # noqa: ARG002 - of the protocol
        *,
        block_keys: list[bytes] | None = None,  # noqa: ARG002 - of the protocol
        keep: Sequence[list[bytes]] = (),  # noqa: ARG002 - of the protocol
    ) -> int:
        """0: V1 has no disk tier."""
        return 0

    def tick(self, now_s: float) -> None:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        self.index.expire(now_s)

    def pages_needed(self, *, history: int, capacity: int) -> list[int]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        needs = [0] * len(self.layout.pools)
        for group in self.layout.groups:
            needs[group.pool] += blocks_needed(group, self.layout.tokens_per_block, history=history, capacity=capacity)
        return needs

    def available_pages(self) -> list[int]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return self.tiering.available()

    def reservable_pages(self) -> list[int]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return [reservable_pages(levels[DEVICE]) for levels in self.usage.pools]

    def rebalance(self, now_s: float) -> bool:  # noqa: ARG002 - of the protocol
        """False: V1 splits the memory once, at construction."""
        return False

    def wants_rebalance(self, now_s: float) -> bool:  # noqa: ARG002 - of the protocol
        """False, as :meth:`rebalance`."""
        return False

    def lease(self, num_tokens: int, blocks: Sequence[Sequence[Block | None]]) -> BlockLease:
        """Pin blocks; :meth:`V1Sequence.hold` is the way to call this."""
        lease = BlockLease(num_tokens, self.usage, blocks, self._leases.discard)
        self._leases.add(lease)
        return lease

    def forget(self, sequence: V1Sequence) -> None:
        """A sequence was closed; :meth:`V1Sequence.close` calls this."""
        self._sequences.discard(sequence)

    def stats(self) -> CacheStats:
        """See :class:`~kvmesh.cache.base.CacheManager`; the states are those of device pages."""
        pools = tuple(page_counts(levels[DEVICE]) for levels in self.usage.pools)
        sums = PageCounts(*np.sum(pools, axis=0).tolist())
        return CacheStats(
            **sums._asdict(),
            open_sequences=len(self._sequences),
            open_leases=len(self._leases),
            cached_blocks=max(self.index.num_offered),
            pools=pools,
            counters=replace(self.counters, **self.usage.tallies.totals()._asdict()),
            flows=self.usage.flows.snapshot(),
            tallies=self.usage.tallies.snapshot(),
        )

    def level_stats(self) -> list[LevelStats]:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        return level_stats(self.layout, self.usage, self._tiers)

    def check_integrity(self) -> None:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        check_blocks(self.usage, self.index, self._sequences, self._leases)

    def clear_reusable_blocks(self) -> None:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        if self._sequences:
            raise CacheBusyError(f"cannot clear the cache: {len(self._sequences)} sequences are open")
        self.index.clear()

    def close(self) -> None:
        """See :class:`~kvmesh.cache.base.CacheManager`."""
        if self._leases:
            raise CacheBusyError(f"cannot close the cache: {len(self._leases)} page leases are open")
        self.clear_reusable_blocks()
        if not self._closed:
            self._closed = True
            self._memory.close()

    def _find(self, scope: ReuseScope, token_ids: TokenIds, keys: list[bytes], limit: int | None = None) -> Match:
        """The longest prefix, of ``limit`` tokens at most, that every layer group can serve."""
        return find_match(
            self.layout,
            self.index.trees,
            Prompt(scope, token_ids, keys, limit),
            usable=self.opening.may_take_part_of,
            partial=self.settings.enable_partial_reuse,
        )

    def _note_creation(self, sequence: V1Sequence, prompt_tokens: int) -> None:
        """Tell a new sequence's tally what was found for it."""
        tally, totals = sequence.tally, self.usage.tallies
        if tally.again:
            tally.tell(totals.created_again, prompt_tokens, sequence.num_cached_tokens)
            return
        tally.tell(totals.created, prompt_tokens, sequence.num_cached_tokens)
        for view in sequence.views:
            for level, full in Counter(block.level for block in view.live()).items():
                tally.tell(totals.found, view.group, level, full, 0)
            if view.tail is not None:
                tally.tell(totals.found, view.group, view.tail.level, 0, 1)
