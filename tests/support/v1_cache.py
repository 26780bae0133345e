"""Small V1 caches whose pages hold fingerprints of the tokens that they stand for, and a sink that checks events."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.errors import TierFailedError
from kvmesh.cache.events import StoredBlocks
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.storage import Storage
from kvmesh.cache.storage.memory import HostPool
from kvmesh.cache.v1 import V1CacheManager, V1Settings
from kvmesh.cache.v1.sequence import V1Sequence
from kvmesh.hashing import ReuseScope, as_token_ids
from kvmesh.net.clock import ManualClock
from kvmesh.protocol.retention import RetentionConfig

WORDS_PER_TOKEN = 4
"""A token has 8 float32 values in K: four 64-bit words; the fingerprint goes into the first."""

UNSCOPED = ReuseScope()

Slots = NDArray[np.int32]


def fingerprint(scope: ReuseScope, prefix: Sequence[int], group: int) -> int:
    return zlib.crc32(repr((scope, list(prefix), group)).encode()) + 1


class FaultyStorage(Storage):
    """The real levels, whose host pages can be damaged, and which can refuse pages."""

    refuses = False
    num_closed = 0

    def damage(self, pool: int, slot: int) -> None:
        """Flip a bit of a host page."""
        host = self._cold[0][pool]
        assert isinstance(host, HostPool)
        host.array[slot * host.page_bytes] ^= 1

    def move(self, pool: int, src_level: int, src_slots: Slots, dst_level: int, dst_slots: Slots) -> NDArray[np.bool_]:
        if self.refuses and dst_level:
            raise TierFailedError(dst_level, "full")
        return super().move(pool, src_level, src_slots, dst_level, dst_slots)

    def close(self) -> None:
        self.num_closed += 1
        super().close()


class RecordingSink:
    """Keeps what is reusable by group, as an indexer would; fails on a key stored or removed twice."""

    def __init__(self, windowed: Sequence[bool]) -> None:
        self.windowed = windowed
        """By group; a group without a window must have been told of every parent itself."""
        self.log: list[tuple[object, ...]] = []
        self.prefixes: list[dict[bytes, tuple[ReuseScope, tuple[int, ...]]]] = []
        """By group and key: scope and all tokens from the start."""
        self.known: list[dict[bytes, tuple[ReuseScope, tuple[int, ...]]]] = []
        """The same for every block ever stored."""
        self.computed: dict[bytes, tuple[ReuseScope, tuple[int, ...]]] = {}
        """The same for every full block that :meth:`SmallCache.write` has computed, stored or not."""
        self.levels: list[dict[bytes, int]] = []
        self.priorities: list[dict[bytes, int]] = []

    def on_created(self, tiers: Sequence[str], num_pages: Sequence[Sequence[int]]) -> None:
        assert all(len(counts) == len(tiers) for counts in num_pages)
        self.log.append(("created", tuple(tiers), [list(counts) for counts in num_pages]))
        for state in (self.prefixes, self.known, self.levels, self.priorities):
            state.extend({} for _ in num_pages)

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        assert len(blocks.keys) == len(blocks.token_ids) == len(blocks.priorities) > 0
        assert blocks.level == 0
        assert blocks.covered_tokens is None
        assert blocks.priorities.dtype == np.uint8
        prefix: tuple[int, ...] = ()
        if blocks.parent_key is not None:
            assert self.windowed[group] or blocks.parent_key in self.prefixes[group], "stored after an unknown block"
            # A group with a window may continue a block that it never had, and that another group is told of later.
            parents = next((known for known in self.known if blocks.parent_key in known), self.computed)
            scope, prefix = parents[blocks.parent_key]
            assert scope == blocks.scope
        stored = zip(blocks.keys, blocks.token_ids.tolist(), blocks.priorities.tolist(), strict=True)
        for key, tokens, priority in stored:
            assert len(key) == 8
            assert key not in self.prefixes[group], "stored twice"
            prefix = (*prefix, *tokens)
            self.prefixes[group][key] = self.known[group][key] = (blocks.scope, prefix)
            self.levels[group][key] = 0
            self.priorities[group][key] = priority
        self.log.append(("stored", group, blocks.token_ids.tolist()))

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:
        assert keys
        for key in keys:
            del self.prefixes[group][key]
            assert self.levels[group].pop(key) == level
            del self.priorities[group][key]
        self.log.append(("removed", group, [self.tail(group, key) for key in keys], level))

    def on_moved(self, group: int, keys: Sequence[bytes], old_level: int, new_level: int) -> None:
        assert keys
        assert old_level != new_level
        for key in keys:
            assert self.levels[group][key] == old_level
            self.levels[group][key] = new_level
        self.log.append(("moved", group, [self.tail(group, key) for key in keys], old_level, new_level))

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        assert keys
        assert old != new
        for key in keys:
            assert self.priorities[group][key] == old
            self.priorities[group][key] = new
        self.log.append(("priority", group, [self.tail(group, key) for key in keys], old, new))

    def tail(self, group: int, key: bytes) -> int:
        """The last token of a block, by which the tests name it."""
        return self.known[group][key][1][-1]

    def take(self, kind: str) -> list[tuple[object, ...]]:
        """Remove and return everything told, of one kind."""
        events, self.log = [event for event in self.log if event[0] == kind], []
        return events


class SmallCache:
    """A manager with its memory, clock and events, and shorthands for what the tests do."""

    def __init__(
        self,
        pages: int = 16,
        *,
        host: int = 0,
        tokens_per_block: int = 4,
        windows: tuple[int | None, ...] = (None,),
        heads: tuple[int, ...] | None = None,
        **settings: object,
    ) -> None:
        layers = tuple(
            LayerCacheSpec(
                layer_index=i, num_kv_heads=heads[i] if heads else 1, head_dim=8, dtype="float32", window=window
            )
            for i, window in enumerate(windows)
        )
        self.layout = PageLayout.build(CacheRequirements(layers), tokens_per_block)
        counts = [[pages * len(pool.groups) for pool in self.layout.pools]]
        if host:
            counts.append([host * len(pool.groups) for pool in self.layout.pools])
        self.size = tokens_per_block
        self.sink = RecordingSink([group.window is not None for group in self.layout.groups])
        self.clock = ManualClock()
        self.device = CpuDevice(1 << 24)
        tiers = ("gpu", "host")[: len(counts)]
        self.memory = FaultyStorage(self.layout, counts, tiers, self.device)
        self.manager = V1CacheManager(
            self.layout,
            self.memory,
            counts,
            tiers,
            V1Settings(**settings),  # type: ignore[arg-type]
            event_sink=self.sink,
            clock=self.clock,
        )

    def match(self, prompt: Sequence[int], scope: ReuseScope = UNSCOPED) -> int:
        return self.manager.match(scope, as_token_ids(list(prompt))).num_tokens

    def open(
        self,
        prompt: Sequence[int],
        scope: ReuseScope = UNSCOPED,
        retention: RetentionConfig | None = None,
        reuse: bool = True,
    ) -> V1Sequence:
        """Create and resume; the content of what was found is checked."""
        tokens = as_token_ids(list(prompt))
        sequence = self.manager.create(scope, tokens, "r", retention=retention, reuse=reuse)
        assert sequence.resume()
        self.check(sequence, prompt[: sequence.num_cached_tokens])
        return sequence

    def compute(self, sequence: V1Sequence, tokens: Sequence[int], prefix: Sequence[int]) -> None:
        """Make room for ``tokens`` after ``prefix``, write and commit them."""
        done = len(prefix)
        assert sequence.committed == done
        assert sequence.resize(done + len(tokens), done)
        self.write(sequence, tokens, prefix)
        sequence.commit(as_token_ids(list(tokens)))

    def serve(self, prompt: Sequence[int], generated: Sequence[int] = (), **options: object) -> None:
        """A whole request: the prompt in one chunk, then token by token, then closed."""
        prompt = list(prompt)
        sequence = self.open(prompt, **options)  # type: ignore[arg-type]
        done = sequence.num_cached_tokens
        self.compute(sequence, prompt[done:], prompt[:done])
        for i, token in enumerate(generated):
            self.compute(sequence, [token], [*prompt, *generated[:i]])
        self.check(sequence, [*prompt, *generated])
        sequence.close()

    def words(self, group: int) -> NDArray[np.int64]:
        """``[slots, tokens of a block]``: the place of each fingerprint on the device."""
        group_layout = self.layout.groups[group]
        pages = self.memory.pools[group_layout.pool].array.reshape(-1, group_layout.page_bytes)
        return pages.view(np.int64)[:, : self.size * WORDS_PER_TOKEN : WORDS_PER_TOKEN]

    def write(self, sequence: V1Sequence, tokens: Sequence[int], prefix: Sequence[int]) -> None:
        """What a forward pass does."""
        whole = [*prefix, *tokens]
        for number, key in enumerate(self.manager.block_keys(sequence.scope, as_token_ids(whole)), start=1):
            self.sink.computed[key] = sequence.scope, tuple(whole[: number * self.size])
        for group in range(len(self.layout.groups)):
            words, slots = self.words(group), sequence.page_ids(group)
            for i in range(len(tokens)):
                position = len(prefix) + i
                if slots[position // self.size] >= 0:
                    mark = fingerprint(sequence.scope, [*prefix, *tokens[: i + 1]], group)
                    words[slots[position // self.size], position % self.size] = mark

    def check(self, sequence: V1Sequence, tokens: Sequence[int]) -> None:
        """The blocks of ``sequence`` inside the windows hold ``tokens``."""
        slots = [sequence.page_ids(group) for group in range(len(self.layout.groups))]
        self.check_slots(slots, sequence.scope, tokens)

    def check_slots(self, slots: Sequence[Slots], scope: ReuseScope, tokens: Sequence[int]) -> None:
        for group, group_slots in enumerate(slots):
            words, window = self.words(group), self.layout.groups[group].window
            begin = 0 if window is None else max(0, (len(tokens) + 1 - window) // self.size * self.size)
            for position in range(begin, len(tokens)):
                slot = group_slots[position // self.size]
                assert slot >= 0
                found = words[slot, position % self.size]
                assert found == fingerprint(scope, tokens[: position + 1], group), (group, position)

    def finish(self) -> None:
        """Nothing is missing at the end, and every stored key was removed."""
        self.manager.check_integrity()
        self.manager.close()
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.free == stats.total
        assert not any(self.sink.prefixes), "every stored key is removed"
        assert self.memory.num_closed == 1
        assert self.device.free_bytes == 1 << 24
