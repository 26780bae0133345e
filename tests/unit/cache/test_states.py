"""Recurrent states in the cache: points, snapshots, match, prune (semantics §1.2, §1.3, §3.4 (1), §3.11)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, LayoutError, PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.sequence import KvCache
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.snapshots import branch_point, snapshot_points
from kvmesh.cache.storage import Storage
from kvmesh.hashing import ReuseScope

SCOPE = ReuseScope()
BLOCK = 4
STATE = 1
"""The state group of the layouts below that have attention, too."""


def test_points_of_the_specification() -> None:
    """§1.2 CHECK."""
    points = snapshot_points(100, interval=0, offsets_from_start=[128, 64], offsets_from_end=[0, 32, 500])
    assert points == (64, 68, 100)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"interval": 30}, (30, 60, 90)),
        ({"interval": 50}, (50, 100)),
        ({}, ()),
        ({"branch_snapshots": True}, (100,)),
        ({"branch_snapshots": True, "fork": 64}, (64, 100)),
        ({"branch_snapshots": True, "fork": 64, "interval": 40}, (40, 64, 80)),
        ({"fork": 64}, ()),
        ({"offsets_from_end": [100, 99]}, (1,)),
    ],
)
def test_points(options: dict[str, Any], expected: tuple[int, ...]) -> None:
    """§1.2, §1.3: the prompt's end is the fallback of branch snapshots."""
    rules = {"interval": 0, "offsets_from_start": [], "offsets_from_end": [], **options}
    assert snapshot_points(100, **rules) == expected


def test_branch_point() -> None:
    """§1.3: aligned down to a block, and nowhere when nothing, or everything, is known."""
    assert branch_point(3, 4, 20) == 12
    assert branch_point(0, 4, 20) is None
    assert branch_point(5, 4, 20) is None


def layout_of(*kinds: str, state_bytes: int = 300) -> PageLayout:
    layers = tuple(
        LayerCacheSpec(
            layer_index=index,
            kind="state" if kind == "state" else "attention",
            num_kv_heads=1,
            head_dim=8,
            dtype="float32",
            window=6 if kind == "window" else None,
            state_bytes=state_bytes if kind == "state" else None,
        )
        for index, kind in enumerate(kinds)
    )
    return PageLayout.build(CacheRequirements(layers), BLOCK)


def test_layout() -> None:
    layout = layout_of("full", "state", "state", state_bytes=100)
    group = layout.groups[STATE]
    assert (group.kind, group.layers, group.page_bytes) == ("state", (1, 2), 256), "states are 64-byte aligned"
    assert group.buffer(2, "state").offset_bytes == 128
    assert "states of 100 + 100 bytes" in layout.summary()
    with pytest.raises(LayoutError, match="positive size"):
        layout_of("state", state_bytes=0)


class Bench:
    """A manager whose sequences compute: the state after n tokens is their sum, and so is each token's KV."""

    def __init__(
        self,
        directory: Path,
        *kinds: str,
        pages: int = 16,
        states: int | None = None,
        host: int = 0,
        chunk: int = 64,
        **settings: Any,
    ) -> None:
        self.layout = layout_of(*kinds)
        self.chunk = chunk
        self.device = CpuDevice(1 << 22)
        tiers = ("gpu", "host") if host else ("gpu",)
        counts = [[count] * len(self.layout.pools) for count in (pages, host) if count]
        state_pool = next(group.pool for group in self.layout.groups if group.kind == "state")
        counts[0][state_pool] = states or pages
        storage = Storage(self.layout, counts, tiers, self.device, disk_path=directory)
        options = {"max_util_for_resume": 1.0, **settings}
        self.manager = KvCacheManager(self.layout, storage, counts, CacheSettings(**options))
        self.state_group = next(group for group in self.layout.groups if group.kind == "state")

    def state(self, cache: KvCache) -> np.ndarray:
        (slot,) = cache.page_ids(self.state_group.group_id).tolist()
        pool = self.manager.pools[self.state_group.pool].array
        words: np.ndarray = pool.view(np.int64).reshape(-1, self.state_group.page_bytes // 8)[slot]
        return words

    def start(self, tokens: list[int]) -> KvCache:
        cache = self.manager.create(SCOPE, np.array(tokens, dtype=np.int32), "r")
        assert cache.resume()
        if cache.committed:
            assert self.state(cache)[0] == sum(tokens[: cache.committed]), "the state of the matched prefix"
        else:
            self.state(cache)[0] = 0
        return cache

    def compute(self, cache: KvCache, tokens: list[int]) -> None:
        while cache.committed < len(tokens):
            begin = cache.committed
            end = cache.chunk_end(begin, min(len(tokens), begin + self.chunk))
            assert cache.resize(end, begin)
            self.state(cache)[0] += sum(tokens[begin:end])
            cache.commit(np.array(tokens[begin:end], dtype=np.int32))
            self.manager.check_integrity()

    def run(self, tokens: list[int]) -> int:
        cache = self.start(tokens)
        self.compute(cache, tokens)
        cache.close()
        self.manager.check_integrity()
        return cache.num_cached_tokens

    def close(self) -> None:
        self.manager.check_integrity()
        self.manager.close()
        assert self.manager.stats().free == self.manager.stats().total
        assert self.device.free_bytes == 1 << 22


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Any]:
    made: list[Bench] = []

    def make(*kinds: str, **options: Any) -> Bench:
        made.append(Bench(tmp_path, *kinds, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


PROMPT = list(range(1, 19))


@pytest.mark.parametrize("kinds", [("full", "state"), ("state", "full", "window"), ("state",)], ids="-".join)
def test_periodic_snapshots_are_found_and_exact(make_bench: Any, kinds: tuple[str, ...]) -> None:
    """§3.4 (1): a match is cut to the deepest snapshot; §3.11: reuse copies it."""
    bench = make_bench(*kinds, snapshot_interval=8)
    assert bench.run(PROMPT) == 0
    assert bench.manager.match(SCOPE, np.array(PROMPT, dtype=np.int32)).num_tokens == 16
    assert bench.run([*PROMPT[:14], 99, 98]) == 8
    assert bench.run([*PROMPT[:7], 99]) == 0
    first, second = bench.start([*PROMPT, 7]), bench.start([*PROMPT, 8])
    bench.state(first)[0] += 1
    assert bench.state(second)[0] == sum(PROMPT[:16]), "the copies are private"
    first.close()
    second.close()


def test_chunks_end_at_snapshot_points(make_bench: Any) -> None:
    bench = make_bench("full", "state", snapshot_offsets_from_start=(6,), snapshot_offsets_from_end=(0, 3))
    cache = bench.start(PROMPT)
    assert [cache.chunk_end(begin, 18) for begin in (0, 5, 6, 15, 16)] == [6, 6, 15, 18, 18]
    cache.close()


@pytest.mark.parametrize(("partial", "cached"), [(True, 6), (False, 0)])
def test_a_snapshot_inside_a_block(make_bench: Any, partial: bool, cached: int) -> None:
    """§3.11: exact token positions inside a block."""
    bench = make_bench("full", "state", snapshot_offsets_from_start=(6,), enable_partial_reuse=partial)
    bench.run(PROMPT)
    assert bench.run([*PROMPT[:10], 50]) == cached


def test_one_block_keeps_the_later_snapshot(make_bench: Any) -> None:
    """§3.4: one slot keeps the page with the largest token count."""
    bench = make_bench("full", "state", snapshot_offsets_from_start=(6, 7))
    bench.run(PROMPT)
    assert bench.run([*PROMPT[:10], 50]) == 7
    assert bench.manager.level_stats()[0].groups[STATE].evictable == 1


def test_equal_prompts_computed_together_keep_one_snapshot(make_bench: Any) -> None:
    bench = make_bench("full", "state", snapshot_interval=8)
    caches = [bench.start(PROMPT), bench.start(PROMPT)]
    for cache in caches:
        bench.compute(cache, PROMPT)
    for cache in caches:
        cache.close()
    assert bench.manager.level_stats()[0].groups[STATE].evictable == 2
    assert bench.run(PROMPT) == 16


def test_an_evicted_snapshot_leaves_the_blocks(make_bench: Any) -> None:
    """§3.4: the removal of a state page is of that life cycle only."""
    bench = make_bench("full", "state", pages=8, snapshot_interval=8)
    bench.run(PROMPT)
    table, tree = bench.manager.store.group_tables[STATE], bench.manager.store.tree
    assert len(tree.nodes()) == 5
    pages = tree.pages(STATE)
    bench.manager.store.drop_pages(bench.state_group.pool, pages[pages >= 0])
    assert len(tree.nodes()) == 5
    assert len(table.free_slots[0]) == 8
    assert bench.manager.match(SCOPE, np.array(PROMPT, dtype=np.int32)).num_tokens == 0
    bench.run(PROMPT)
    assert bench.run(PROMPT) == 16, "snapshots return to blocks that are there"


def test_snapshots_fall_to_the_host_and_come_back(make_bench: Any) -> None:
    bench = make_bench("full", "state", pages=8, host=32, snapshot_interval=8)
    bench.run(PROMPT)
    for other in range(3):
        bench.run([100 * other + token for token in range(50, 68)])
    assert bench.manager.store.counters.offloaded_pages > 0
    assert bench.run(PROMPT) == 16
    assert bench.manager.store.counters.onboarded_pages > 0


def test_no_room_for_a_snapshot_is_no_error(make_bench: Any) -> None:
    """§3.11: silently skipped."""
    bench = make_bench("full", "state", states=5, snapshot_interval=4)
    held = [bench.start([900 + i]) for i in range(4)]
    cache = bench.start(PROMPT)
    bench.compute(cache, PROMPT)
    cache.close()
    assert bench.manager.match(SCOPE, np.array(PROMPT, dtype=np.int32)).num_tokens == 0
    for other in held:
        other.close()


def test_the_fork_is_snapshotted(make_bench: Any) -> None:
    """§1.3 enable_branch_snapshot: state at the fork of a prompt and what is cached, and at the prompt's end."""
    bench = make_bench("full", "state", enable_branch_snapshot=True)
    bench.run(PROMPT)
    branch = [*PROMPT[:13], 99, 98, 97]
    cache = bench.start(branch)
    assert cache.num_cached_tokens == 0, "the first prompt left a snapshot at its end only"
    assert cache.chunk_end(0, 16) == 12
    bench.compute(cache, branch)
    cache.close()
    assert bench.run([*PROMPT[:13], 55]) == 12


def test_a_suspended_state_moves_and_returns(make_bench: Any) -> None:
    bench = make_bench("full", "state", pages=6, host=32)
    cache = bench.start(PROMPT)
    bench.compute(cache, PROMPT)
    cache.suspend()
    bench.run([70 + token for token in range(18)])
    bench.manager.check_integrity()
    assert cache.resume()
    assert bench.state(cache)[0] == sum(PROMPT)
    cache.close()


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=8),
    interval=st.sampled_from([0, 3, 4, 5]),
    from_start=st.lists(st.integers(1, 12), max_size=2),
    pages=st.integers(6, 12),
    host=st.sampled_from([0, 6]),
    kinds=st.sampled_from([("full", "state"), ("window", "state"), ("state",)]),
)
def test_random_prompts(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
    interval: int,
    from_start: list[int],
    pages: int,
    host: int,
    kinds: tuple[str, ...],
) -> None:
    """What is matched always comes with exactly its state, and only at a snapshot point."""
    directory = tmp_path_factory.getbasetemp()
    bench = Bench(
        directory, *kinds, pages=pages, host=host, chunk=7,
        snapshot_interval=interval, snapshot_offsets_from_start=tuple(from_start),
    )  # fmt: skip
    rules: dict[str, Any] = {"interval": interval, "offsets_from_start": from_start, "offsets_from_end": []}
    seen: list[list[int]] = []
    for prompt in prompts:
        cached = bench.run(prompt)
        assert cached < len(prompt)
        assert not cached or any(
            prompt[:cached] == old[:cached] and cached in snapshot_points(len(old), **rules) for old in seen
        )
        seen.append(prompt)
    bench.close()
