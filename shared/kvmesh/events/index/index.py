"""The prefix index: sources, their records, and the answer to "who holds how much of this prompt"."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvmesh.events.index.residency import Residency, block_identities
from kvmesh.events.index.scope import DEFAULT_TENANT, Scope, Source, salts_on_the_wire
from kvmesh.events.index.search import bits, device_reach, tier_reach
from kvmesh.events.index.statistics import BLOCK_BYTES, RESIDENCY_BYTES, IndexStatistics
from kvmesh.events.index.tree import Forest, Tree
from kvmesh.events.records import Cleared, EventRecord, LoraKey, Tier
from kvmesh.hashing import TokenIds, sequence_hashes
from kvmesh.protocol.match import WorkerMatch

__all__ = ["DumpedBlock", "PrefixIndex"]

_Found = list[int]
"""Tokens by tier."""

DISSOLVED_AT_ONCE = 4096
"""Blocks that a departing worker gives back on the spot; a larger one has the rest taken out by :meth:`reclaim`."""


class DumpedBlock(NamedTuple):
    """One block of one source."""

    scope: Scope
    block_size: int
    prefix_hash: int
    parent_hash: int | None
    tier: Tier


class PrefixIndex:
    """Used from one thread; no call waits.

    A source's blocks stop counting the moment it is cleared, removed or hidden: its bit leaves the mask of those that
    are matched. Taking the bit out of the trees may come later.

    Args:
        max_memory_bytes: bound of the index's memory. Blocks that were not asked for longest are forgotten first: the
            index then claims less than there is, never more.
    """

    def __init__(self, max_memory_bytes: int = 1 << 30) -> None:
        self._max_memory_bytes = max_memory_bytes
        self._forest = Forest()
        self._counters = IndexStatistics()
        self._residencies: dict[Source, Residency] = {}
        self._by_number: list[Residency | None] = []
        self._free_numbers: list[int] = []
        self._hidden: set[Source] = set()
        self._visible = 0
        """Bits of the sources that are matched."""
        self._cold = 0
        """Bits of the sources that have ever held blocks outside the device."""
        self._retired: deque[Residency] = deque()

    def add(
        self,
        source: Source,
        *,
        model: str,
        tenant: str = DEFAULT_TENANT,
        lora: LoraKey = None,
        salt: str | None = None,
        single_group: bool = False,
    ) -> None:
        """Make a source known; one that is known already stays as it is, unless it now serves something else.

        Args:
            source: whose records will come.
            model: as prompts name it.
            tenant: whose it is.
            lora: adapter of blocks that name none.
            salt: of blocks that name none.
            single_group: it tells one layer group only, the widest; then that group's blocks count even if the
                group has a window.
        """
        base = Scope(model, tenant, lora, salt)
        known = self._residencies.get(source)
        if known is None:
            self._admit(source, base, single_group)
        elif (known.base, known.single_group) != (base, single_group):
            self._retire(known)
            self._admit(source, base, single_group)

    def remove(self, source: Source) -> None:
        """Forget a source and all its blocks; unknown ones are passed over."""
        known = self._residencies.pop(source, None)
        self._hidden.discard(source)
        if known is not None:
            self._retire(known)

    def clear(self, source: Source) -> None:
        """Forget a source's blocks; it goes on."""
        known = self._residencies.get(source)
        if known is not None:
            self._retire(known)
            self._admit(source, known.base, known.single_group)

    def hide(self, source: Source) -> None:
        """Leave a source out of matches, keeping its blocks: it may be gone."""
        if (known := self._residencies.get(source)) is not None:
            self._hidden.add(source)
            self._visible &= ~known.bit

    def show(self, source: Source) -> None:
        """Undo :meth:`hide`."""
        if (known := self._residencies.get(source)) is not None:
            self._hidden.discard(source)
            self._visible |= known.bit

    def apply(self, source: Source, records: Iterable[EventRecord]) -> None:
        """Take in records of a known source, in order; those of unknown sources are passed over."""
        for record in records:
            known = self._residencies.get(source)
            if known is None:
                return
            if isinstance(record, Cleared):
                self.clear(source)
                continue
            if record.tier != Tier.DEVICE:
                self._cold |= known.bit
            known.apply(record)
        if self.memory_bytes > self._max_memory_bytes:
            self._shrink()

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of the index."""
        return self._forest.num_blocks * BLOCK_BYTES + self._counters.residencies * RESIDENCY_BYTES

    def sources(self, instance_id: str | None = None) -> list[Source]:
        """The known sources, of one worker or of all."""
        return [source for source in self._residencies if instance_id in (None, source.instance_id)]

    def num_held(self, source: Source) -> int:
        """Blocks that a source holds, counted in each tier."""
        known = self._residencies.get(source)
        return 0 if known is None else known.num_held

    def match(
        self,
        token_ids: TokenIds,
        *,
        model: str,
        tenant: str = DEFAULT_TENANT,
        lora: LoraKey = None,
        cache_salt: str | None = None,
        block_size: int | None = None,
    ) -> list[WorkerMatch]:
        """How many leading tokens each source holds, for sources that hold any.

        Args:
            token_ids: int32 ``[n]``, the whole prompt; its last partial block is never counted.
            model: as the sources were added.
            tenant: as the sources were added.
            lora: adapter of the prompt.
            cache_salt: salt of the request.
            block_size: only sources with blocks of so many tokens.
        """
        found: dict[int, _Found] = {}
        for tree in self._trees(Scope(model, tenant, lora), cache_salt, block_size):
            prefixes = sequence_hashes(block_identities(token_ids, tree.block_size, tree.lookahead))
            self._search(tree, prefixes, found)
        return self._answer(found)

    def match_hashes(
        self,
        prefix_hashes: NDArray[np.uint64],
        *,
        model: str,
        tenant: str = DEFAULT_TENANT,
        lora: LoraKey = None,
        cache_salt: str | None = None,
        block_size: int | None = None,
    ) -> list[WorkerMatch]:
        """As :meth:`match`, for a prompt given by the rolling XXH3 hashes of its blocks: uint64 ``[n]``.

        Workers that tell blocks apart by what follows them (:attr:`Stored.lookahead`) are not found this way.
        """
        found: dict[int, _Found] = {}
        for tree in self._trees(Scope(model, tenant, lora), cache_salt, block_size):
            if not tree.lookahead:
                self._search(tree, prefix_hashes, found)
        return self._answer(found)

    def dump(self, source: Source) -> Iterator[DumpedBlock]:
        """Every block of a source, parents not necessarily first."""
        known = self._residencies.get(source)
        if known is None:
            return
        for tier in Tier:
            for node in known.blocks(tier):
                parent = None if node.parent is None else node.parent.key
                yield DumpedBlock(node.tree.scope, node.tree.block_size, node.key, parent, tier)

    @property
    def reclaimable(self) -> bool:
        """Whether :meth:`reclaim` has anything to do."""
        return bool(self._retired)

    def reclaim(self, limit: int = DISSOLVED_AT_ONCE) -> bool:
        """Take departed sources out of at most ``limit`` blocks; True when there is more to do."""
        while self._retired and limit > 0:
            residency = self._retired[0]
            limit -= residency.dissolve(limit)
            if not residency.num_held:
                self._retired.popleft()
                self._by_number[residency.number] = None
                self._free_numbers.append(residency.number)
        return bool(self._retired)

    def statistics(self) -> IndexStatistics:
        """See :class:`IndexStatistics`."""
        return msgspec.structs.replace(
            self._counters,
            sources=len(self._residencies),
            scopes=self._forest.num_scopes,
            blocks=self._forest.num_blocks,
            parked_runs=sum(residency.num_parked for residency in self._residencies.values()),
        )

    def _admit(self, source: Source, base: Scope, single_group: bool) -> None:
        if self._free_numbers:
            number = self._free_numbers.pop()
        else:
            number = len(self._by_number)
            self._by_number.append(None)
        residency = Residency(source, number, base, self._forest, self._counters, single_group=single_group)
        self._by_number[number] = self._residencies[source] = residency
        if source not in self._hidden:
            self._visible |= residency.bit

    def _retire(self, residency: Residency) -> None:
        """The bit stays taken until it has been removed from every block."""
        self._visible &= ~residency.bit
        self._cold &= ~residency.bit
        self._retired.append(residency)
        self.reclaim()

    def _shrink(self) -> None:
        while self.memory_bytes > self._max_memory_bytes and self._counters.residencies:
            if self._retired:
                self.reclaim()
                continue
            largest = max(self._residencies.values(), key=lambda residency: residency.num_held)
            self._counters.forgotten_blocks_total += largest.forget_oldest()

    def _trees(self, scope: Scope, cache_salt: str | None, block_size: int | None) -> Iterator[Tree]:
        for salt in salts_on_the_wire(cache_salt):
            for tree in self._forest.of(scope._replace(salt=salt)):
                if block_size in (None, tree.block_size):
                    yield tree

    def _search(self, tree: Tree, prefixes: NDArray[np.uint64], found: dict[int, _Found]) -> None:
        key, count = prefixes.item, len(prefixes)
        for reach in device_reach(tree, key, count, self._visible):
            reach.last.asked = True
            self._note(found, reach.mask, Tier.DEVICE, reach.blocks * tree.block_size)
        cold = self._cold & self._visible
        if cold:
            for tier in (Tier.HOST, Tier.DISK):
                for reach in tier_reach(tree, key, count, cold, with_disk=tier == Tier.DISK):
                    reach.last.asked = True
                    self._note(found, reach.mask, tier, reach.blocks * tree.block_size)

    @staticmethod
    def _note(found: dict[int, _Found], mask: int, tier: Tier, tokens: int) -> None:
        for number in bits(mask):
            entry = found.get(number)
            if entry is None:
                entry = found[number] = [0, 0, 0]
            entry[tier] = max(entry[tier], tokens)

    def _answer(self, found: dict[int, _Found]) -> list[WorkerMatch]:
        matches = []
        for number, (device, host, disk) in found.items():
            residency = self._by_number[number]
            assert residency is not None, "a visible bit has an owner"
            # A colder tier's count includes what the warmer ones hold.
            host = max(host, device)
            matches.append(WorkerMatch(*residency.source, device, host, max(disk, host)))
        self._counters.matches_total += 1
        if matches:
            self._counters.matched_tokens_total += max(match.disk_tokens for match in matches)
        return matches
