"""Collects what one engine step changed in the cache, as the streamed events that others will read.

Only full blocks of one layer group are told. What is told to be stored is told to be removed, exactly once; removals
are never dropped. Nothing is kept for a told block, apart from what the digests need of those with an adapter or a salt
(``published``): the cache itself removes each block once, and only those that were left out are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.events import StoredBlocks
from kvmesh.events.encoding import PackedTokens
from kvmesh.events.keyed import StreamKey
from kvmesh.events.published import PublishedSet
from kvmesh.events.records import Tier
from kvmesh.events.target import FULL_ATTENTION, TargetGroup
from kvmesh.hashing import ReuseScope, TokenIds, wire_numbers
from kvmesh.protocol.events import BlockRemoved, BlockStored, KeyedBlocksStored, KvEvent

__all__ = ["DEFAULT_MAX_STORED_BLOCKS", "SinkStatistics", "StreamSink", "TierMoves"]

DEFAULT_MAX_STORED_BLOCKS = 50_000
"""Blocks announced per step at most: one step must not build a message of gigabytes."""

TierMoves = Literal["publish", "device_only"]


class _Medium(NamedTuple):
    name: str
    tier: Tier


_NO_SCOPE = ReuseScope()
_DEVICE = _Medium("GPU", Tier.DEVICE)
_MEDIA = {"gpu": _DEVICE, "host": _Medium("CPU", Tier.HOST), "disk": _Medium("DISK", Tier.DISK)}


class SinkStatistics(msgspec.Struct):
    """What the sink has told and left out, in blocks."""

    stored_total: int = 0
    removed_total: int = 0
    moved_total: int = 0
    suppressed_total: int = 0
    """Partial blocks, full ones whose pages do not hold all their tokens, and with full attention those that continue
    one left out."""
    non_target_total: int = 0
    """Of other layer groups."""
    dropped_total: int = 0
    """Above the most that one step may tell, and those that continue them."""


class _Run(msgspec.Struct):
    """Consecutive blocks, told as one event."""

    scope: ReuseScope
    parent: int | None
    medium: str
    hashes: list[int]
    token_ids: list[TokenIds]


class StreamSink:
    """A :class:`kvmesh.cache.events.EventSink` that makes wire events; used on the executor thread only.

    Args:
        tokens_per_block: length of a full block.
        target: the only layer group whose blocks are told.
        signed: send hashes as two's complement.
        tier_moves: ``publish``: a block that moves is told to be stored in its new medium, then removed from the old
            one. ``device_only``: moves are silent, everything is told to be in device memory until it is gone.
        max_stored_blocks: per step.
        published: where the digests of what is told are kept, if anywhere.
        key: what blocks are named by instead of their tokens; needs the keys of the V2 manager.
    """

    def __init__(
        self,
        tokens_per_block: int,
        target: TargetGroup = FULL_ATTENTION,
        *,
        signed: bool = False,
        tier_moves: TierMoves = "publish",
        max_stored_blocks: int = DEFAULT_MAX_STORED_BLOCKS,
        published: PublishedSet | None = None,
        key: StreamKey | None = None,
    ) -> None:
        self._tokens_per_block = tokens_per_block
        self._target = target
        self._signed = signed
        self._publish_moves = tier_moves == "publish"
        self._max_stored_blocks = max_stored_blocks
        self._published = published
        self._key = key
        self._numbers = wire_numbers if key is None else key.names
        self._media = [_DEVICE]
        self._untold: set[bytes] = set()
        """Blocks of the target group that are in the cache and were left out."""
        self._pending: list[_Run | KvEvent] = []
        self._moves: tuple[BlockStored, BlockRemoved] | None = None
        """The last two pending events, when they are one move that may still grow."""
        self._stored_this_step = 0
        self.statistics = SinkStatistics()

    def on_created(self, tiers: Sequence[str], num_pages: Sequence[Sequence[int]]) -> None:  # noqa: ARG002 - of the protocol
        """See :class:`~kvmesh.cache.events.EventSink`; the stream tells nothing about it."""
        self._media = [_MEDIA[tier] if self._publish_moves else _DEVICE for tier in tiers]

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`."""
        keys, token_ids, size = blocks.keys, blocks.token_ids, self._tokens_per_block
        statistics = self.statistics
        if group != self._target.group_id:
            statistics.non_target_total += len(keys)
            return
        partial = token_ids.shape[1] < size or (blocks.covered_tokens is not None and blocks.covered_tokens < size)
        # A block after one that was left out could not be placed by any reader. Inside a window, though, a block may
        # outlive the one before it in any case, and that one may yet be told.
        if partial or (self._target.window is None and blocks.parent_key in self._untold):
            statistics.suppressed_total += len(keys)
            self._untold.update(keys)
            return
        room = self._max_stored_blocks - self._stored_this_step
        if len(keys) > room:
            statistics.dropped_total += len(keys) - room
            self._untold.update(keys[room:])
            keys, token_ids = keys[:room], token_ids[:room]
            if not keys:
                return
        self._stored_this_step += len(keys)
        statistics.stored_total += len(keys)
        self._tell_stored(blocks.scope, blocks.parent_key, keys, token_ids, self._media[blocks.level])

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`; blocks that were never told are not told now."""
        if group != self._target.group_id:
            return
        if self._untold and not self._untold.isdisjoint(keys):
            gone, keys = keys, self._told(keys)
            self._untold.difference_update(gone)
            if not keys:
                return
        self.statistics.removed_total += len(keys)
        numbers, medium = self._numbers(keys), self._media[level]
        if self._published is not None:
            self._published.removed(medium.tier, numbers)
        hashes = self._hashes(numbers)
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockRemoved) and last.medium == medium.name:
            last.block_hashes += hashes
        else:
            self._moves = None
            self._pending.append(self._removed(hashes, medium.name))

    def on_moved(self, group: int, keys: Sequence[bytes], old_level: int, new_level: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`."""
        if group != self._target.group_id or not self._publish_moves:
            return
        keys = self._told(keys)
        if not keys:
            return
        self.statistics.moved_total += len(keys)
        numbers, old, new = self._numbers(keys), self._media[old_level], self._media[new_level]
        if self._published is not None:
            self._published.moved(old.tier, new.tier, numbers)
        hashes = self._hashes(numbers)
        if self._moves is not None and (self._moves[0].medium, self._moves[1].medium) == (new.name, old.name):
            self._moves[0].block_hashes += hashes
            self._moves[1].block_hashes += hashes
            return
        # No tokens: the publisher, which knows where the blocks were told first, puts them in.
        self._moves = (self._stored(hashes, None, [], new.name), self._removed(list(hashes), old.name))
        self._pending += self._moves

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        """See :class:`~kvmesh.cache.events.EventSink`; the stream does not tell priorities."""

    def take(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        if not self._pending:
            return []
        pending, self._pending = self._pending, []
        self._moves = None
        self._stored_this_step = 0
        return [self._chain(item) if isinstance(item, _Run) else item for item in pending]

    def _told(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        if not self._untold or self._untold.isdisjoint(keys):
            return keys
        return [key for key in keys if key not in self._untold]

    def _hashes(self, numbers: NDArray[np.uint64]) -> list[int]:
        hashes: list[int] = (numbers.view(np.int64) if self._signed else numbers).tolist()
        return hashes

    def _tell_stored(
        self, scope: ReuseScope, parent_key: bytes | None, keys: Sequence[bytes], token_ids: TokenIds, medium: _Medium
    ) -> None:
        # A keyed name depends on the scope, and nothing else of it is told.
        scope = scope if self._key is None else _NO_SCOPE
        numbers = self._numbers(keys)
        if self._published is not None:
            self._published.stored(medium.tier, scope, numbers)
        hashes = self._hashes(numbers)
        parent = None if parent_key is None else self._hashes(self._numbers([parent_key]))[0]
        tokens = [token_ids.copy()] if self._key is None else []
        last = self._pending[-1] if self._pending else None
        if isinstance(last, _Run) and last.hashes[-1] == parent and last.medium == medium.name:
            last.hashes += hashes
            last.token_ids += tokens
            return
        self._moves = None
        self._pending.append(_Run(scope, parent, medium.name, hashes, tokens))

    def _chain(self, run: _Run) -> BlockStored | KeyedBlocksStored:
        if self._key is not None:
            return self._keyed(run, self._key)
        event = self._stored(run.hashes, run.parent, PackedTokens(run.token_ids), run.medium)
        event.lora_id = run.scope.lora_id
        # As in vLLM, the salt travels with the first block of a chain only: the parents say the rest.
        if run.scope.salt is not None and run.parent is None:
            event.extra_keys = [[str(run.scope.salt)], *[None] * (len(run.hashes) - 1)]
        return event

    def _keyed(self, run: _Run, key: StreamKey) -> KeyedBlocksStored:
        target = self._target
        return KeyedBlocksStored(
            key_id=key.key_id,
            block_hashes=run.hashes,
            parent_block_hash=run.parent,
            block_size=self._tokens_per_block,
            medium=run.medium,
            group_idx=target.group_id,
            kv_cache_spec_kind=msgspec.UNSET if target.kind is None else target.kind,
            kv_cache_spec_sliding_window=msgspec.UNSET if target.window is None else target.window,
        )

    def _stored(self, hashes: list[int], parent: int | None, token_ids: Sequence[int], medium: str) -> BlockStored:
        target = self._target
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=token_ids,
            block_size=self._tokens_per_block,
            medium=medium,
            group_idx=target.group_id,
            kv_cache_spec_kind=msgspec.UNSET if target.kind is None else target.kind,
            kv_cache_spec_sliding_window=msgspec.UNSET if target.window is None else target.window,
        )

    def _removed(self, hashes: list[int], medium: str) -> BlockRemoved:
        return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=self._target.group_id)
