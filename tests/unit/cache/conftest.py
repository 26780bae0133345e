"""Small caches for the tests, and sinks that check what they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.events import StoredBlock
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.settings import CacheSettings
from kvmesh.hashing import ReuseScope, v2_root

BUDGET = 1 << 24


class RecordingSink:
    """Keeps the reusable keys as an indexer would, and fails on a key stored twice or removed without being there."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        self.parents: dict[bytes, bytes | None] = {}
        self.tokens: dict[bytes, list[int]] = {}

    def on_stored(self, scope: ReuseScope, parent_key: bytes | None, blocks: Sequence[StoredBlock]) -> None:
        assert blocks
        for block in blocks:
            assert block.key not in self.parents, "stored twice"
            assert parent_key is None or parent_key in self.parents, "stored after an unknown block"
            assert parent_key != v2_root(scope)
            self.parents[block.key] = parent_key
            self.tokens[block.key] = block.token_ids.tolist()
            parent_key = block.key
        self.log.append(("stored", [block.token_ids.tolist() for block in blocks]))

    def on_removed(self, keys: Sequence[bytes]) -> None:
        assert keys
        for key in keys:
            del self.parents[key]
            assert key not in self.parents.values(), "removed before a block that continues it"
        self.log.append(("removed", [self.tokens[key] for key in keys]))


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
def make_manager(sink: RecordingSink) -> Iterator[Factory]:
    """A factory of managers; at the end of the test each is checked, emptied and closed, and no page may be missing."""
    made: list[KvCacheManager] = []

    def make(
        pages: int = 16, *, tokens_per_block: int = 4, windows: tuple[int | None, ...] = (None,), **settings: object
    ) -> KvCacheManager:
        layout = small_layout(tokens_per_block, windows)
        counts = [pages * len(pool.groups) for pool in layout.pools]
        options = {"max_util_for_resume": 1.0, **settings}
        manager = KvCacheManager(layout, counts, CpuDevice(BUDGET), CacheSettings(**options), sink)  # type: ignore[arg-type]
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
