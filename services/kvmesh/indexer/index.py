"""Who holds which prefix: block chains re-hashed from their tokens, so that workers with different hashes meet.

For each scope (model, LoRA, salt, block size) a table maps the hash of a whole prefix to a bit mask of the workers that
hold its last block. A worker's blocks are closed under "parent of", so a prompt is matched by walking down its prefixes
until nobody is left: O(blocks of the prompt), independent of the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from kvmesh.hashing import TokenIds, local_hashes, sequence_hashes
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvmesh.protocol.match import WorkerMatch

__all__ = ["BYTES_PER_RESIDENCY", "IndexStatistics", "PrefixIndex", "Scope", "Source"]

BYTES_PER_RESIDENCY = 256
"""Memory of one block at one worker: a record, its key, and its share of the scope's table (232 by tracemalloc)."""

ADMITTED_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Groups whose blocks mean that a prefix can be reused; a sliding window's do not."""

_TIERS = {
    None: 0,
    "GPU": 0,
    "CPU": 1,
    "CPU_PINNED": 1,
    "CPU_TIER1": 1,
    "CPU_TIER2": 2,
    "DISK": 2,
    "NVME": 2,
    "STORAGE": 2,
}
"""Tier of each medium; blocks in an unknown one are not taken in."""
_NUM_TIERS = 3


class Source(NamedTuple):
    """One stream of events: a worker's rank."""

    instance_id: str
    dp_rank: int = 0


class Scope(NamedTuple):
    """What must be equal for two prompts to share blocks."""

    model: str
    lora: int | str | None
    salt: int | None
    block_size: int


class IndexStatistics(msgspec.Struct):
    """Sizes now and counters since start."""

    sources: int = 0
    scopes: int = 0
    residencies: int = 0
    stored_blocks_total: int = 0
    removed_blocks_total: int = 0
    unknown_removals_total: int = 0
    orphan_blocks_total: int = 0
    malformed_events_total: int = 0
    foreign_group_blocks_total: int = 0
    refused_blocks_total: int = 0
    matches_total: int = 0
    matched_tokens_total: int = 0


class _Block(msgspec.Struct):
    """One block at one source."""

    scope: Scope
    prefix_hash: int
    tiers: int
    """Bit mask of tiers that hold it."""


class _Holder:
    """What one source holds."""

    def __init__(self, model: str, bit: int) -> None:
        self.model = model
        self.mask = 1 << bit
        self.bit = bit
        self.blocks: dict[int, _Block] = {}
        """By the engine's own hash."""
        self.foreign_groups: set[int] = set()


class _Table:
    """The residencies of one scope: per tier, prefix hash to mask of sources."""

    def __init__(self) -> None:
        self.tiers: tuple[dict[int, int], ...] = tuple({} for _ in range(_NUM_TIERS))

    def __bool__(self) -> bool:
        return any(self.tiers)


class PrefixIndex:
    """The index; used from one thread.

    Args:
        max_bytes: bound of its memory. Blocks beyond it are not taken in and counted: the index then claims less than
            there is, never more.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self._max_residencies = max(1, max_bytes // BYTES_PER_RESIDENCY)
        self._holders: dict[Source, _Holder] = {}
        self._by_bit: dict[int, Source] = {}
        self._tables: dict[Scope, _Table] = {}
        self._statistics = IndexStatistics()

    def add_source(self, source: Source, model: str) -> None:
        """Make a source known; again with another model clears it."""
        holder = self._holders.get(source)
        if holder is not None and holder.model == model:
            return
        self.remove_source(source)
        bit = next(bit for bit in range(len(self._by_bit) + 1) if bit not in self._by_bit)
        self._by_bit[bit] = source
        self._holders[source] = _Holder(model, bit)

    def remove_source(self, source: Source) -> None:
        """Forget a source and all its blocks; unknown ones are ignored."""
        self.clear(source)
        holder = self._holders.pop(source, None)
        if holder is not None:
            del self._by_bit[holder.bit]

    def remove_instance(self, instance_id: str) -> None:
        """Forget all ranks of a worker."""
        for source in self.sources(instance_id):
            self.remove_source(source)

    def clear(self, source: Source) -> None:
        """Forget a source's blocks; it may store anew."""
        holder = self._holders.get(source)
        if holder is None:
            return
        for block in holder.blocks.values():
            for tier in range(_NUM_TIERS):
                if block.tiers >> tier & 1:
                    self._release(block, tier, holder.mask)
        holder.blocks.clear()

    def sources(self, instance_id: str | None = None) -> list[Source]:
        """The known sources, of one worker or of all."""
        return [source for source in self._holders if instance_id in (None, source.instance_id)]

    def apply(self, source: Source, event: KvEvent) -> None:
        """Take in one event of a known source; events of unknown sources are ignored."""
        holder = self._holders.get(source)
        if holder is None:
            return
        match event:
            case BlockStored():
                self._store(holder, event)
            case BlockRemoved():
                self._remove(holder, event)
            case AllBlocksCleared():
                self.clear(source)

    def match(
        self, token_ids: TokenIds, *, model: str, lora: int | str | None = None, salt: int | None = None
    ) -> list[WorkerMatch]:
        """How many leading tokens each source holds, for sources that hold any.

        Args:
            token_ids: int32 ``[n]``.
            model: as the workers serve it.
            lora: LoRA id or name of the prompt.
            salt: :func:`kvmesh.hashing.salt_id` of its cache salt.
        """
        found: dict[int, list[int]] = {}
        sizes = {scope.block_size for scope in self._tables if scope[:3] == (model, lora, salt)}
        for size in sizes:
            table = self._tables[Scope(model, lora, salt, size)]
            prefixes = sequence_hashes(local_hashes(token_ids, size)).tolist()
            for tier in range(_NUM_TIERS):
                if tier and not table.tiers[tier]:
                    continue
                for bit, depth in _depths(table.tiers[: tier + 1], prefixes).items():
                    tokens = found.setdefault(bit, [0] * _NUM_TIERS)
                    tokens[tier] = max(tokens[tier], depth * size)
        self._statistics.matches_total += 1
        matches = []
        for bit, (device, host, disk) in found.items():
            source = self._by_bit[bit]
            # A colder tier's count includes the warmer ones', also when nothing new lies there.
            host = max(host, device)
            matches.append(WorkerMatch(source.instance_id, source.dp_rank, device, host, max(disk, host)))
        if matches:
            self._statistics.matched_tokens_total += max(match.disk_tokens for match in matches)
        return matches

    def match_prefixes(self, prefix_hashes: Iterable[int], *, model: str) -> dict[Source, int]:
        """Leading blocks each source holds, for a prompt given by its rolling hashes, over all unsalted block sizes."""
        prefixes = list(prefix_hashes)
        best: Counter[Source] = Counter()
        for scope, table in self._tables.items():
            if scope.model == model and scope.salt is None:
                for bit, depth in _depths(table.tiers, prefixes).items():
                    best[self._by_bit[bit]] = max(best[self._by_bit[bit]], depth)
        return dict(best)

    def dump(self, source: Source) -> list[tuple[Scope, int, int]]:
        """``(scope, prefix hash, tier mask)`` of every block of a source."""
        holder = self._holders.get(source)
        if holder is None:
            return []
        return [(block.scope, block.prefix_hash, block.tiers) for block in holder.blocks.values()]

    def held_blocks(self, source: Source) -> int:
        """Blocks that a source holds, in any tier."""
        holder = self._holders.get(source)
        return 0 if holder is None else len(holder.blocks)

    def statistics(self) -> IndexStatistics:
        """See :class:`IndexStatistics`."""
        return msgspec.structs.replace(self._statistics, sources=len(self._holders), scopes=len(self._tables))

    def _store(self, holder: _Holder, event: BlockStored) -> None:
        statistics = self._statistics
        kind = event.kv_cache_spec_kind
        if isinstance(kind, str) and kind not in ADMITTED_KINDS:
            if isinstance(event.group_idx, int):
                holder.foreign_groups.add(event.group_idx)
            statistics.foreign_group_blocks_total += len(event.block_hashes)
            return
        hashes = event.block_hashes
        tier = _TIERS.get(event.medium, -1)
        dense = len(event.token_ids) == event.block_size * len(hashes) and event.block_size > 0
        chain = hashes if event.parent_block_hash is None else [event.parent_block_hash, *hashes]
        if not dense or tier < 0 or len(set(chain)) != len(chain):
            statistics.malformed_events_total += 1
            return
        parent = None
        if event.parent_block_hash is not None:
            parent = holder.blocks.get(event.parent_block_hash)
            if parent is None or parent.scope.block_size != event.block_size:
                # Its place is not known; to guess the root would claim a prefix that is not there.
                statistics.orphan_blocks_total += len(hashes)
                return
        lora = event.lora_name if event.lora_name is not None else event.lora_id
        scope = Scope(holder.model, lora, _salt(event), event.block_size) if parent is None else parent.scope
        tokens = np.asarray(event.token_ids, dtype=np.int32)
        above = None if parent is None else parent.prefix_hash
        prefixes = sequence_hashes(local_hashes(tokens, event.block_size), above).tolist()
        for hash_, prefix in zip(hashes, prefixes, strict=True):
            if not self._hold(holder, hash_, scope, prefix, tier):
                statistics.refused_blocks_total += len(hashes) - hashes.index(hash_)
                return

    def _hold(self, holder: _Holder, hash_: int, scope: Scope, prefix: int, tier: int) -> bool:
        """Record one residency; False when the memory bound does not allow it."""
        block = holder.blocks.get(hash_)
        if block is not None and (block.scope, block.prefix_hash) != (scope, prefix):
            self._drop(holder, hash_, block)  # the engine reuses a hash for other tokens: the later word counts
            block = None
        if block is not None and block.tiers >> tier & 1:
            return True
        if self._statistics.residencies >= self._max_residencies:
            return False
        if block is None:
            block = holder.blocks[hash_] = _Block(scope, prefix, 0)
        block.tiers |= 1 << tier
        table = self._tables.get(scope)
        if table is None:
            table = self._tables[scope] = _Table()
        masks = table.tiers[tier]
        masks[prefix] = masks.get(prefix, 0) | holder.mask
        self._statistics.residencies += 1
        self._statistics.stored_blocks_total += 1
        return True

    def _remove(self, holder: _Holder, event: BlockRemoved) -> None:
        if isinstance(event.group_idx, int) and event.group_idx in holder.foreign_groups:
            return
        tier = _TIERS.get(event.medium, -1)
        for hash_ in event.block_hashes:
            block = holder.blocks.get(hash_)
            if block is None or tier < 0 or not block.tiers >> tier & 1:
                self._statistics.unknown_removals_total += 1
                continue
            self._release(block, tier, holder.mask)
            if not block.tiers:
                del holder.blocks[hash_]

    def _drop(self, holder: _Holder, hash_: int, block: _Block) -> None:
        for tier in range(_NUM_TIERS):
            if block.tiers >> tier & 1:
                self._release(block, tier, holder.mask)
        del holder.blocks[hash_]

    def _release(self, block: _Block, tier: int, mask: int) -> None:
        table = self._tables[block.scope]
        masks = table.tiers[tier]
        left = masks[block.prefix_hash] & ~mask
        if left:
            masks[block.prefix_hash] = left
        else:
            del masks[block.prefix_hash]
            if not table:
                del self._tables[block.scope]
        block.tiers &= ~(1 << tier)
        self._statistics.residencies -= 1
        self._statistics.removed_blocks_total += 1


def _salt(event: BlockStored) -> int | None:
    """The salt id of a chain: the first extra key of its first block, as KVMesh's workers send it."""
    if isinstance(event.extra_keys, list) and event.extra_keys and event.extra_keys[0]:
        key = event.extra_keys[0][0]
        return int(key) if key.isdecimal() else None
    return None


def _depths(tiers: tuple[dict[int, int], ...], prefixes: list[int]) -> dict[int, int]:
    """Source bit to number of leading blocks held in any of ``tiers``, for sources that hold the first."""
    depths: dict[int, int] = {}
    alive = -1  # everybody
    depth = 0
    for prefix in prefixes:
        holding = 0
        for tier in tiers:
            holding |= tier.get(prefix, 0)
        holding &= alive
        if holding != alive:
            if depth:
                _note(depths, alive & ~holding, depth)
            alive = holding
            if not alive:
                return depths
        depth += 1
    if depth:
        _note(depths, alive, depth)
    return depths


def _note(depths: dict[int, int], mask: int, depth: int) -> None:
    while mask:
        low = mask & -mask
        depths[low.bit_length() - 1] = depth
        mask ^= low
