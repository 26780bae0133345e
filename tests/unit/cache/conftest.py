"""Small caches for the tests, and sinks that check what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.events import StoredBlocks
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.storage import Storage
from kvmesh.hashing import v2_root

BUDGET = 1 << 24


class RecordingSink:
    """Keeps the reusable keys as an indexer would, and fails on a key stored twice or removed without being there."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        """Of layer group 0; the others must say the same."""
        self.parents: dict[bytes, bytes | None] = {}
        self.tokens: dict[bytes, list[int]] = {}
        self.others: dict[int, set[bytes]] = {}
        self.levels: dict[tuple[int, bytes], int] = {}
        self.moves: list[tuple[int, int]] = []

    def on_created(self, tiers: Sequence[str], num_pages: Sequence[Sequence[int]]) -> None:
        assert tiers[0] == "gpu"
        assert all(len(levels) == len(tiers) for levels in num_pages)

    def on_stored(self, group: int, blocks: StoredBlocks) -> None:
        assert len(blocks.keys) == len(blocks.token_ids) == len(blocks.priorities) > 0
        for key in blocks.keys:
            self.levels[group, key] = blocks.level
        if group:
            assert not self.others.setdefault(group, set()) & set(blocks.keys), "stored twice"
            self.others[group].update(blocks.keys)
            return
        parent_key = blocks.parent_key
        assert parent_key != v2_root(blocks.scope)
        tokens = blocks.token_ids.tolist()
        for key, row in zip(blocks.keys, tokens, strict=True):
            assert key not in self.parents, "stored twice"
            assert parent_key is None or parent_key in self.parents, "stored after an unknown block"
            self.parents[key] = parent_key
            self.tokens[key] = row
            parent_key = key
        self.log.append(("stored", tokens))

    def on_removed(self, group: int, keys: Sequence[bytes], level: int) -> None:
        assert keys
        for key in keys:
            assert self.levels.pop((group, key)) == level
        if group:
            for key in keys:
                self.others[group].remove(key)
            return
        for key in keys:
            del self.parents[key]
            assert key not in self.parents.values(), "removed before a block that continues it"
        self.log.append(("removed", [self.tokens[key] for key in keys]))

    def on_moved(self, group: int, keys: Sequence[bytes], old_level: int, new_level: int) -> None:
        for key in keys:
            assert self.levels[group, key] == old_level != new_level
            self.levels[group, key] = new_level
            self.moves.append((old_level, new_level))

    def on_priority(self, group: int, keys: Sequence[bytes], old: int, new: int) -> None:
        raise AssertionError("nothing changes a priority")


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


Factory = Callable[..., KvCacheManager]


def small_layout(tokens_per_block: int = 4, windows: tuple[int | None, ...] = (None,), heads: int = 1) -> PageLayout:
    layers = tuple(
        LayerCacheSpec(layer_index=i, num_kv_heads=heads, head_dim=8, dtype="float32", window=window)
        for i, window in enumerate(windows)
    )
    return PageLayout.build(CacheRequirements(layers), tokens_per_block)


@pytest.fixture
def make_layout() -> Callable[..., PageLayout]:
    return small_layout


@pytest.fixture
def make_manager(sink: RecordingSink, tmp_path: Path) -> Iterator[Factory]:
    """A factory of managers; at the end of the test each is checked, emptied and closed, and no page may be missing."""
    made: list[KvCacheManager] = []

    def make(
        pages: int = 16,
        *,
        tokens_per_block: int = 4,
        windows: tuple[int | None, ...] = (None,),
        host: int = 0,
        disk: int = 0,
        **settings: object,
    ) -> KvCacheManager:
        colder = {tier: count for tier, count in (("host", host), ("disk", disk)) if count}
        layout = small_layout(tokens_per_block, windows)
        levels = [[count * len(pool.groups) for pool in layout.pools] for count in (pages, *colder.values())]
        options = {"max_util_for_resume": 1.0, **settings}
        storage = Storage(layout, levels, ("gpu", *colder), CpuDevice(BUDGET), disk_path=tmp_path)
        manager = KvCacheManager(layout, storage, levels, CacheSettings(**options), sink)  # type: ignore[arg-type]
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.check_integrity()
        manager.close()
        manager.check_integrity()
        stats = manager.stats()
        assert stats.free == stats.total
    assert not sink.parents
    assert not any(sink.others.values())
