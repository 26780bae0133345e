"""Collects what one engine step changed in the cache, as the events that others will read.

Only full blocks are told. A block is announced once and its removal is told exactly once; removals are never dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from kvmesh.hashing import ReuseScope, signed_wire_hash, wire_hash
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

__all__ = ["EventSink", "SinkStatistics", "StoredBlockLike"]

DEFAULT_MAX_STORED_BLOCKS = 50_000
"""Blocks announced per step at most: one step must not build a message of gigabytes."""

_MEDIA = ("GPU", "CPU", "DISK")
"""Names of the cache levels, warmest first."""


class StoredBlockLike(Protocol):
    """What the sink reads of a stored block."""

    @property
    def key(self) -> bytes:
        """32-byte V2 block key."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 ``[n]``, n at most tokens_per_block."""

    @property
    def level(self) -> int:
        """Cache level: 0 device, 1 host, 2 disk."""


class SinkStatistics(msgspec.Struct):
    """What the sink has told and left out."""

    blocks_stored_total: int = 0
    blocks_removed_total: int = 0
    partial_blocks_suppressed_total: int = 0
    non_target_blocks_total: int = 0
    stores_dropped_total: int = 0


class EventSink:
    """The cache manager's event sink; used on the executor thread only.

    Args:
        tokens_per_block: length of a full block.
        signed: send hashes as two's complement.
        target_group: the only layer group whose blocks are told (the one with the largest window).
        max_stored_blocks: per step.
        kind: ``kv_cache_spec_kind`` of the target group, when it is true of it.
    """

    def __init__(
        self,
        tokens_per_block: int,
        *,
        signed: bool = False,
        target_group: int = 0,
        max_stored_blocks: int = DEFAULT_MAX_STORED_BLOCKS,
        kind: str | None = "full_attention",
    ) -> None:
        self._tokens_per_block = tokens_per_block
        self._hash = signed_wire_hash if signed else wire_hash
        self._target_group = target_group
        self._max_stored_blocks = max_stored_blocks
        self._kind: str | msgspec.UnsetType = msgspec.UNSET if kind is None else kind
        self._announced: dict[bytes, int] = {}
        self._events: list[KvEvent] = []
        self._stored_this_step = 0
        self.statistics = SinkStatistics()

    def on_stored(
        self, scope: ReuseScope, parent_key: bytes | None, blocks: Sequence[StoredBlockLike], group: int = 0
    ) -> None:
        """Consecutive blocks became reusable, the first one below ``parent_key`` (None: at the root)."""
        if group != self._target_group:
            self.statistics.non_target_blocks_total += len(blocks)
            return
        for block in blocks:
            if len(block.token_ids) < self._tokens_per_block:
                self.statistics.partial_blocks_suppressed_total += 1
            elif block.key not in self._announced:
                self._store(scope, parent_key, block)
            parent_key = block.key

    def on_removed(self, keys: Iterable[bytes], group: int = 0) -> None:
        """Blocks left the cache; those that were never told are not told now."""
        if group != self._target_group:
            return
        by_level: dict[int, list[int]] = {}
        for key in keys:
            level = self._announced.pop(key, None)
            if level is not None:
                by_level.setdefault(level, []).append(self._hash(key))
        for level, hashes in by_level.items():
            self._remove(hashes, level)

    def on_cleared(self) -> None:
        """The whole cache is gone."""
        self.statistics.blocks_removed_total += len(self._announced)
        self._announced.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        self._stored_this_step = 0
        return events

    @property
    def announced_blocks(self) -> int:
        """Blocks that readers believe to be here."""
        return len(self._announced)

    def _store(self, scope: ReuseScope, parent_key: bytes | None, block: StoredBlockLike) -> None:
        if self._stored_this_step >= self._max_stored_blocks:
            self.statistics.stores_dropped_total += 1
            return
        self._stored_this_step += 1
        self.statistics.blocks_stored_total += 1
        self._announced[block.key] = block.level
        hash_ = self._hash(block.key)
        parent = None if parent_key is None else self._hash(parent_key)
        token_ids = block.token_ids.tolist()
        last = self._events[-1] if self._events else None
        medium = _MEDIA[block.level]
        if (
            isinstance(last, BlockStored)
            and parent is not None
            and last.block_hashes[-1] == parent
            and last.medium == medium
        ):
            last.block_hashes.append(hash_)
            last.token_ids.extend(token_ids)
            if last.extra_keys is not msgspec.UNSET and last.extra_keys is not None:
                last.extra_keys.append(None)
            return
        # As in vLLM, the salt travels with the first block of a chain only: the parents say the rest.
        salted = scope.salt is not None and parent is None
        self._events.append(
            BlockStored(
                block_hashes=[hash_],
                parent_block_hash=parent,
                token_ids=token_ids,
                block_size=self._tokens_per_block,
                lora_id=scope.lora_id,
                medium=medium,
                extra_keys=[[str(scope.salt)]] if salted else msgspec.UNSET,
                group_idx=self._target_group,
                kv_cache_spec_kind=self._kind,
            )
        )

    def _remove(self, hashes: list[int], level: int) -> None:
        self.statistics.blocks_removed_total += len(hashes)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == _MEDIA[level]:
            last.block_hashes.extend(hashes)
        else:
            self._events.append(BlockRemoved(block_hashes=hashes, medium=_MEDIA[level], group_idx=self._target_group))
