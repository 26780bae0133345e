"""One worker's part of the index: its records become its bit in the trees."""

from __future__ import annotations

from hashlib import blake2b
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.events.index.orphans import Orphans
from kvmesh.events.index.scope import Scope, Source
from kvmesh.events.index.statistics import IndexStatistics
from kvmesh.events.index.tree import Forest, Node, Tree
from kvmesh.events.records import Removed, Stored, Tier
from kvmesh.hashing import TokenIds, local_hashes, sequence_hashes

__all__ = ["ADMITTED_KINDS", "Residency", "block_identities"]

ADMITTED_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Groups whose blocks mean that a prefix can be reused; those of windows and recurrent states do not."""

WINDOWED_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
"""Admitted, too, of a source that tells its widest group alone: then there is none that needs more blocks, and the
blocks of a whole leading run are a window of each."""

FORGET_AT_ONCE = 1024
"""Blocks looked at in one go when the memory bound is reached; a millisecond."""

FORGET_SHARE = 16
"""At most this part of what a worker holds is looked at in one go: recent blocks must not be taken for old ones."""

_ROOT_ZERO = 0
"""Some engines write 0 where others write nil: no parent."""


class Residency:
    """What one source holds. It is created empty and is emptied by being replaced.

    Args:
        source: whose blocks these are.
        number: of its bit.
        base: scope of blocks that name no adapter and no salt.
        single_group: it tells one layer group only, the widest.
        forest: the trees to put the bit into.
        statistics: counters shared by the whole index.
    """

    def __init__(
        self,
        source: Source,
        number: int,
        base: Scope,
        forest: Forest,
        statistics: IndexStatistics,
        *,
        single_group: bool = False,
    ) -> None:
        self.source = source
        self.number = number
        self.bit = 1 << number
        self.base = base
        self.single_group = single_group
        self._admitted = ADMITTED_KINDS | WINDOWED_KINDS if single_group else ADMITTED_KINDS
        self._forest = forest
        self._statistics = statistics
        self._held: dict[Tier, dict[int, Node]] = {tier: {} for tier in Tier}
        """Per tier, the engine's hash to the node."""
        self._twins: dict[tuple[Tier, Node], int] = {}
        """How many further hashes the engine has for the same prefix in the same tier."""
        self._ignored_groups: set[int] = set()
        self._orphans = Orphans()
        self._zero_is_root = False

    @property
    def num_held(self) -> int:
        """Blocks held, counted in each tier."""
        return sum(map(len, self._held.values()))

    @property
    def num_parked(self) -> int:
        """Stored events that wait for their parent."""
        return len(self._orphans)

    def blocks(self, tier: Tier) -> list[Node]:
        """The nodes held in a tier."""
        return list(self._held[tier].values())

    def apply(self, record: Stored | Removed) -> None:
        """Take in one record; ``Cleared`` is the index's business."""
        if isinstance(record, Removed):
            self._remove(record)
            return
        waiting: list[Stored | Removed] = [record]
        while waiting:
            current = waiting.pop()
            if isinstance(current, Removed):
                self._remove(current)
            elif self._store(current):
                waiting += self._adopted(current)

    def _store(self, record: Stored) -> bool:
        """Whether the blocks have found their place."""
        statistics = self._statistics
        if record.kind not in self._admitted:
            if record.group is not None:
                self._ignored_groups.add(record.group)
            statistics.ignored_group_blocks_total += len(record.hashes)
            return False
        if not len(record.token_ids):
            self._move(record)
            return False
        parent = None
        if record.parent is not None:
            parent = self._find(record.parent)
            if parent is None and not self._starts_a_sequence(record.parent):
                statistics.orphan_blocks_total += len(record.hashes)
                statistics.dropped_orphan_blocks_total += self._orphans.park(record.parent, record)
                return False
        if parent is None:
            tree = self._forest.grow(self._scope(record), record.block_size, record.lookahead)
        elif (parent.tree.block_size, parent.tree.lookahead) == (record.block_size, record.lookahead):
            tree = parent.tree
        else:
            statistics.block_size_changes_total += 1
            return False
        keys = sequence_hashes(_identities(record), None if parent is None else parent.key).tolist()
        self._hold_run(tree, parent, record, keys)
        return True

    def _hold_run(self, tree: Tree, parent: Node | None, record: Stored, keys: list[int]) -> None:
        nodes = tree.nodes
        before = len(nodes)
        bit, held, on_device = self.bit, self._held[record.tier], record.tier == Tier.DEVICE
        duplicates = 0
        for hash_, key in zip(record.hashes, keys, strict=True):
            node = nodes.get(key)
            if node is None:
                node = tree.add(key, parent)
            known = held.get(hash_)
            if known is node:
                duplicates += 1
            else:
                if known is not None:
                    self._release(hash_, record.tier)  # the engine gives the hash to other tokens
                held[hash_] = node
                if not on_device:
                    self._set_cold(node, record.tier)
                elif node.device & bit:
                    self._add_twin(record.tier, node)
                else:
                    node.device |= bit
                    if parent is None or parent.ready & bit:
                        node.extend(bit)
            parent = node
        added = len(keys) - duplicates
        self._forest.num_blocks += len(nodes) - before
        self._statistics.residencies += added
        self._statistics.stored_blocks_total += added
        self._statistics.duplicate_blocks_total += duplicates

    def _move(self, record: Stored) -> None:
        """Known blocks are now in another tier too."""
        held = self._held[record.tier]
        for hash_ in record.hashes:
            node = self._find(hash_)
            if node is None:
                self._statistics.unknown_moves_total += 1
            elif hash_ not in held:
                held[hash_] = node
                if record.tier != Tier.DEVICE:
                    self._set_cold(node, record.tier)
                elif node.device & self.bit:
                    self._add_twin(record.tier, node)
                else:
                    node.device |= self.bit
                    if node.parent is None or node.parent.ready & self.bit:
                        node.extend(self.bit)
                self._statistics.residencies += 1
                self._statistics.stored_blocks_total += 1

    def _adopted(self, record: Stored) -> list[Stored | Removed]:
        """What waited for blocks of ``record``, last first: to be popped in order."""
        if not len(self._orphans):
            return []
        records: list[Stored | Removed] = []
        for hash_ in record.hashes:
            for run in self._orphans.adopt(hash_):
                records.append(run.record)
                if run.removed:
                    records.append(self._orphans.removal(run))
        return records[::-1]

    def _remove(self, record: Removed) -> None:
        if record.group is not None and record.group in self._ignored_groups:
            return
        held = self._held[record.tier]
        for hash_ in record.hashes:
            if hash_ in held:
                self._release(hash_, record.tier)
                self._statistics.removed_blocks_total += 1
            elif not (len(self._orphans) and self._orphans.remove(hash_, record.tier)):
                self._statistics.unknown_removals_total += 1

    def _release(self, hash_: int, tier: Tier) -> None:
        node = self._held[tier].pop(hash_)
        self._statistics.residencies -= 1
        if self._twins and self._drop_twin(tier, node):
            return
        if tier != Tier.DEVICE:
            self._clear_cold(node, tier)
        else:
            node.device &= ~self.bit
            if node.ready & self.bit:
                node.retract(self.bit)
        if node.first_child is None and not node.held:
            self._forest.prune(node)

    def forget_oldest(self) -> int:
        """Look at the oldest blocks and forget those that nobody asked for; returns how many that were.

        Blocks with others below them are spared, those in use get another round; both become the newest.
        """
        held = max(self._held.values(), key=len)
        tier = next(tier for tier, blocks in self._held.items() if blocks is held)
        forgotten = 0
        count = max(1, min(FORGET_AT_ONCE, len(held) // FORGET_SHARE))
        for hash_ in reversed(list(islice(held, count))):  # children before their parents
            node = held[hash_]
            if node.asked or any(child.held & self.bit for child in node.children()):
                if node.asked and node.parent is not None:
                    node.parent.asked = True
                node.asked = False
                held[hash_] = held.pop(hash_)
            else:
                self._release(hash_, tier)
                forgotten += 1
        return forgotten

    def dissolve(self, limit: int) -> int:
        """Take this source's bit out of at most ``limit`` blocks; returns out of how many.

        For a residency that is no longer in use: nothing is kept exact on the way.
        """
        done = 0
        for tier, held in self._held.items():
            while held and done < limit:
                _, node = held.popitem()
                done += 1
                if self._twins and self._drop_twin(tier, node):
                    continue
                if tier == Tier.DEVICE:
                    node.device &= ~self.bit
                    node.ready &= ~self.bit
                else:
                    self._clear_cold(node, tier)
                if node.first_child is None and not node.held:
                    self._forest.prune(node)
        self._statistics.residencies -= done
        return done

    def _find(self, hash_: int) -> Node | None:
        return next((node for held in self._held.values() if (node := held.get(hash_)) is not None), None)

    def _starts_a_sequence(self, parent: int) -> bool:
        """Whether an unknown parent stands for none: 0 does for some engines, which show it with their first block."""
        if parent == _ROOT_ZERO and not self.num_held:
            self._zero_is_root = True
        return parent == _ROOT_ZERO and self._zero_is_root

    def _scope(self, record: Stored) -> Scope:
        base = self.base
        return Scope(
            base.model if record.model is None else record.model,
            base.tenant if record.tenant is None else record.tenant,
            base.lora if record.lora is None else record.lora,
            base.salt if record.salt is None else record.salt,
        )

    def _add_twin(self, tier: Tier, node: Node) -> None:
        self._twins[tier, node] = self._twins.get((tier, node), 0) + 1

    def _drop_twin(self, tier: Tier, node: Node) -> bool:
        """Whether the block is still held under another hash."""
        left = self._twins.pop((tier, node), 0) - 1
        if left > 0:
            self._twins[tier, node] = left
        return left >= 0

    def _set_cold(self, node: Node, tier: Tier) -> None:
        mask = node.host if tier == Tier.HOST else node.disk
        if mask & self.bit:
            self._add_twin(tier, node)
        elif tier == Tier.HOST:
            node.host |= self.bit
        else:
            node.disk |= self.bit

    def _clear_cold(self, node: Node, tier: Tier) -> None:
        if tier == Tier.HOST:
            node.host &= ~self.bit
        else:
            node.disk &= ~self.bit


def block_identities(token_ids: TokenIds, block_size: int, lookahead: int) -> NDArray[np.uint64]:
    """Local hashes of blocks whose identity includes ``lookahead`` tokens after them: uint64 ``[blocks]``.

    Args:
        token_ids: int32 ``[n]``; blocks that end less than ``lookahead`` before the end are left out.
        block_size: tokens per block.
        lookahead: 0: the blocks are their tokens alone.
    """
    if not lookahead:
        return local_hashes(token_ids, block_size)
    if len(token_ids) < block_size + lookahead:
        return np.empty(0, dtype=np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(token_ids, block_size + lookahead)[::block_size]
    return local_hashes(np.ascontiguousarray(windows).reshape(-1), block_size + lookahead)


def _identities(record: Stored) -> NDArray[np.uint64]:
    """The local hash of each block, with its extra keys mixed in: such blocks are equal only with equal keys."""
    local = block_identities(record.token_ids, record.block_size, record.lookahead)
    for i, keys in enumerate(record.extra_keys or ()):
        if keys is not None and i < len(local):
            local[i] = _mixed(int(local[i]), keys)
    return local


def _mixed(local: int, keys: Any) -> int:
    digest = blake2b(local.to_bytes(8, "little") + msgspec.msgpack.encode(keys), digest_size=8).digest()
    return int.from_bytes(digest, "little")
