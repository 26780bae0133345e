"""The prefix index: sources, their records, and the answer to "who holds how much of this prompt"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmesh.events.digests import Digest
from kvmesh.events.index.identities import identities, stored_identities
from kvmesh.events.index.scope import DEFAULT_TENANT, Scope, Source, salts_on_the_wire
from kvmesh.events.index.snapshot import SnapshotReader, SourceHeader, snapshot_chunks
from kvmesh.events.index.statistics import IndexStatistics
from kvmesh.events.records import Cleared, EventRecord, LoraKey, Removed, Stored, Tier
from kvmesh.hashing import TokenIds, sequence_hashes
from kvmesh.kernels import _native
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.protocol.match import WorkerMatch

__all__ = ["DumpedBlock", "PrefixIndex"]

DISSOLVED_AT_ONCE = 4096
"""Blocks that a departing worker gives back on the spot; a larger one has the rest taken out by :meth:`reclaim`."""

DUMPED_AT_ONCE = 1024
TICKS_PER_S = 100
"""How finely the end of predicted blocks is kept."""

_PREDICTED = len(Tier)
"""The native table of predicted blocks."""


class DumpedBlock(NamedTuple):
    """One block of one source."""

    scope: Scope
    block_size: int
    prefix_hash: int
    parent_hash: int | None
    tier: Tier
    predicted: bool = False
    """It is only expected to be there, see :meth:`PrefixIndex.predict`."""


class _Known(NamedTuple):
    stream: int
    base: Scope
    single_group: bool


class PrefixIndex:
    """Used from one thread; no call waits. The work is native (``csrc/ext/index_*``), under the GIL.

    A source's blocks stop counting the moment it is cleared, removed or hidden; taking them out of the trees may come
    later.

    Args:
        max_memory_bytes: bound of the index's memory. Blocks that were not asked for longest are forgotten first: the
            index then claims less than there is, never more.
        clock: of predicted blocks.
    """

    def __init__(self, max_memory_bytes: int = 1 << 30, clock: Clock | None = None) -> None:
        self._max_memory_bytes = max_memory_bytes
        self._clock = clock or SystemClock()
        self._core = self._new_core()
        self._known: dict[Source, _Known] = {}
        self._hidden: set[Source] = set()
        self._predicts = False
        self._began_s = self._clock.monotonic_s()

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
        known = self._known.get(source)
        if known is not None:
            if (known.base, known.single_group) == (base, single_group):
                return
            self._core.remove(known.stream)
        stream = self._core.admit(*source, model, tenant, lora, salt, single_group)
        self._known[source] = _Known(stream, base, single_group)
        if source in self._hidden:
            self._core.set_hidden(stream, True)

    def remove(self, source: Source) -> None:
        """Forget a source and all its blocks; unknown ones are passed over."""
        self._hidden.discard(source)
        if (known := self._known.pop(source, None)) is not None:
            self._core.remove(known.stream)

    def clear(self, source: Source) -> None:
        """Forget a source's blocks; it goes on."""
        if (known := self._known.get(source)) is not None:
            self._core.clear(known.stream)

    def hide(self, source: Source) -> None:
        """Leave a source out of matches, keeping its blocks: it may be gone."""
        if (known := self._known.get(source)) is not None:
            self._hidden.add(source)
            self._core.set_hidden(known.stream, True)

    def show(self, source: Source) -> None:
        """Undo :meth:`hide`."""
        if (known := self._known.get(source)) is not None:
            self._hidden.discard(source)
            self._core.set_hidden(known.stream, False)

    def apply(self, source: Source, records: Iterable[EventRecord]) -> None:
        """Take in records of a known source, in order; those of unknown sources are passed over.

        Raises:
            ValueError: a record's tokens do not fill its blocks, it has no such tier or block size, or two of a stored
                record's hashes, its parent's included, are equal.
        """
        if (known := self._known.get(source)) is not None:
            self._core.apply(known.stream, records)

    def writer(self, source: Source) -> _native.SourceWriter:
        """For callers that have arrays of hashes and make no records.

        Once the source is removed, or added as something else, a writer does nothing; after :meth:`restore` its methods
        raise RuntimeError.

        ``store(hashes, local_hashes, parent, block_size, tier=0)`` does what :meth:`apply` does with a
        :class:`Stored` in the source's own scope, ``discard(hashes, tier=0)`` what it does with a :class:`Removed`.
        ``hashes`` are uint64 ``[n]``, the engine's own, no two equal, ``local_hashes`` the XXH3 of each block's own
        tokens (:func:`kvmesh.hashing.local_hashes`), ``parent`` is an engine hash that is not among them, or None at
        the start of a sequence. Arrays of another type raise TypeError, what does not fit ValueError; then nothing has
        changed.

        Raises:
            KeyError: the source is not known.
        """
        return _native.SourceWriter(self._core, self._known[source].stream)

    def predict(
        self,
        source: Source,
        token_ids: TokenIds,
        *,
        model: str,
        tenant: str = DEFAULT_TENANT,
        lora: LoraKey = None,
        cache_salt: str | None = None,
        block_size: int,
        ttl_s: float,
    ) -> None:
        """Take a prompt's full blocks for held by a source, on the device, for some time: it was just sent there.

        Blocks that the source tells of meanwhile are really there, and stay. A source that tells nothing has predicted
        blocks only. Unknown sources are passed over.

        Args:
            source: where the prompt went.
            token_ids: int32 ``[n]``, the whole prompt.
            model: as in :meth:`match`.
            tenant: as in :meth:`match`.
            lora: as in :meth:`match`.
            cache_salt: as in :meth:`match`.
            block_size: of the source.
            ttl_s: for how long, in seconds from now; predicting again prolongs it.
        """
        if (known := self._known.get(source)) is None:
            return
        self._predicts = True
        self.expire()
        due = math.ceil((self._clock.monotonic_s() + ttl_s - self._began_s) * TICKS_PER_S)
        salt = salts_on_the_wire(cache_salt)[0]
        self._core.predict(known.stream, token_ids, model, tenant, lora, salt, block_size, due)

    def expire(self) -> int:
        """Let go of predicted blocks whose time is over; returns how many. Matches do it themselves."""
        if not self._predicts:
            return 0
        return self._core.expire(int((self._clock.monotonic_s() - self._began_s) * TICKS_PER_S))

    @property
    def memory_bytes(self) -> int:
        """Memory of the index: all that it has allocated."""
        return self._core.memory_bytes()

    def sources(self, instance_id: str | None = None) -> list[Source]:
        """The known sources, of one worker or of all."""
        return [source for source in self._known if instance_id in (None, source.instance_id)]

    def num_held(self, source: Source) -> int:
        """Blocks that a source holds, counted in each tier, predicted ones included."""
        known = self._known.get(source)
        return 0 if known is None else self._core.num_held(known.stream)

    def match(
        self,
        token_ids: TokenIds | list[int],
        *,
        model: str,
        tenant: str = DEFAULT_TENANT,
        lora: LoraKey = None,
        cache_salt: str | None = None,
        block_size: int | None = None,
        extra_keys: Sequence[Any] | None = None,
    ) -> list[WorkerMatch]:
        """How many leading tokens each source holds, for sources that hold any.

        Args:
            token_ids: int32 ``[n]``, the whole prompt; its last partial block is never counted.
            model: as the sources were added.
            tenant: as the sources were added.
            lora: adapter of the prompt.
            cache_salt: salt of the request.
            block_size: only sources with blocks of so many tokens.
            extra_keys: what else identifies each block, as in the events; needs ``block_size``.

        Raises:
            OverflowError: a token id of a list does not fit 32 bits.
            ValueError: extra keys without a block size.
        """
        if self._predicts:
            self.expire()
        salts = salts_on_the_wire(cache_salt)
        if extra_keys is None:
            return self._core.match(token_ids, model, tenant, lora, salts, block_size)
        if block_size is None:
            raise ValueError("extra keys are of blocks: their size must be given")
        prefixes = sequence_hashes(identities(token_ids, block_size, extra_keys))
        return self._core.match_hashes(prefixes, model, tenant, lora, salts, block_size)

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
        """As :meth:`match`, for a prompt given by the rolling XXH3 hashes of its blocks: uint64 ``[n]``."""
        if self._predicts:
            self.expire()
        salts = salts_on_the_wire(cache_salt)
        return self._core.match_hashes(prefix_hashes, model, tenant, lora, salts, block_size)

    def dump(self, source: Source) -> Iterator[DumpedBlock]:
        """Every block of a source, parents not necessarily first."""
        known = self._known.get(source)
        for table in range(_PREDICTED + 1):
            position = 0
            while known is not None and self._known.get(source) is known:
                position, rows = self._core.dump(known.stream, table, position, DUMPED_AT_ONCE)
                if not rows:
                    break
                tier = Tier.DEVICE if table == _PREDICTED else Tier(table)
                for scope, block_size, prefix_hash, parent_hash in rows:
                    yield DumpedBlock(
                        Scope(*scope), block_size, prefix_hash, parent_hash, tier, predicted=table == _PREDICTED
                    )

    def digests(self, source: Source) -> dict[tuple[Tier, Scope], Digest] | None:
        """Digests of the hashes that a source has told and not taken back, parked orphans included.

        None when some of them are not here: the memory bound has forgotten them, or nothing is known of the source.
        """
        known = self._known.get(source)
        rows = None if known is None else self._core.digests(known.stream)
        if rows is None:
            return None
        return {(Tier(tier), Scope(*scope)): Digest(num_blocks, total) for tier, scope, num_blocks, total in rows}

    @property
    def reclaimable(self) -> bool:
        """Whether :meth:`reclaim` has anything to do."""
        return self._core.reclaimable()

    def reclaim(self, limit: int = DISSOLVED_AT_ONCE) -> bool:
        """Take departed sources out of at most ``limit`` blocks; True when there is more to do."""
        return self._core.reclaim(limit)

    def statistics(self) -> IndexStatistics:
        """See :class:`IndexStatistics`."""
        return IndexStatistics(sources=len(self._known), **self._core.statistics())

    def snapshot(self, watermarks: Mapping[Source, bytes] | None = None) -> Iterator[bytes]:
        """Everything that is known, in chunks of some hundred kilobytes, to be written one after the other.

        Args:
            watermarks: anything to keep with a source, such as how far its stream has been read.

        Raises:
            RuntimeError: the index was changed between two chunks.
        """
        given = watermarks or {}
        headers = [
            SourceHeader(*source, known.base, known.single_group, source in self._hidden, given.get(source, b""))
            for source, known in self._known.items()
        ]
        streams = [known.stream for known in self._known.values()]
        return snapshot_chunks(self._core, headers, streams, self._now_tick())

    def restore(self, chunks: Iterable[bytes], watermarks: dict[Source, bytes] | None = None) -> int:
        """Replace everything by what a snapshot holds; returns how many blocks that is, over all sources and tiers.

        Args:
            chunks: the snapshot's bytes, cut in any way.
            watermarks: filled with what was given to :meth:`snapshot`.

        Raises:
            SnapshotError: the bytes are damaged, incomplete or of a newer version; the index is as it was.
        """
        core, known, hidden, marks = self._new_core(), {}, set(), {}
        reader = SnapshotReader(chunks)
        streams = []
        for header in reader.sources:
            source = Source(header.instance_id, header.dp_rank)
            model, tenant, lora, salt = header.base
            stream = core.admit(*source, model, tenant, lora, salt, header.single_group)
            streams.append(stream)
            known[source] = _Known(stream, header.base, header.single_group)
            if header.hidden:
                hidden.add(source)
                core.set_hidden(stream, True)
            if header.watermark:
                marks[source] = header.watermark
        held = reader.restore(core, streams, self._now_tick())
        self._core.replace()
        self._core, self._known, self._hidden, self._predicts = core, known, hidden, True
        if watermarks is not None:
            watermarks.update(marks)
        return held

    def _now_tick(self) -> int:
        return int((self._clock.monotonic_s() - self._began_s) * TICKS_PER_S)

    def _new_core(self) -> _native.PrefixCore:
        return _native.PrefixCore(self._max_memory_bytes, WorkerMatch, Stored, Removed, Cleared, stored_identities)
