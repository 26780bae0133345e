"""The V2 cache moves memory between its pools (semantics §3.9, §1.1, §2.2): when, how much, nothing is lost."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from event_checks import CheckedEvents
from forward_pass import ForwardPass

from kvmesh.cache.adjust import adjust_level
from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.rebalance import RebalanceTuner
from kvmesh.cache.sequence import KvCache
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.storage import Storage
from kvmesh.cache.storage.disk import PageFile
from kvmesh.config import KvPoolRebalanceConfig
from kvmesh.hashing import ReuseScope

NO_SCOPE = ReuseScope()
BLOCK = 4
LAYOUT = PageLayout.build(
    CacheRequirements(
        (
            LayerCacheSpec(layer_index=0, num_kv_heads=1, head_dim=8, dtype="float32"),
            LayerCacheSpec(layer_index=1, num_kv_heads=2, head_dim=8, dtype="float32", window=8),
        )
    ),
    BLOCK,
)
Make = Callable[..., KvCacheManager]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Managers of two pools with ``pages`` blocks each on every level."""
    made: list[tuple[KvCacheManager, CheckedEvents]] = []

    def make(
        pages: int = 12, tiers: tuple[str, ...] = ("gpu",), *, tuned: bool = True, **config: object
    ) -> KvCacheManager:
        levels = [[pages, pages] for _ in tiers]
        level_bytes = [pages * LAYOUT.bytes_per_block for _ in tiers]
        most = [level_bytes[0] // pool.page_bytes for pool in LAYOUT.pools]
        options = {"min_sampled_kv_caches": 1, "cooldown_secs": 0, "target_ratio_update_interval": 1, **config}
        tuner = RebalanceTuner(
            KvPoolRebalanceConfig(**options),  # type: ignore[arg-type]
            LAYOUT,
            now_s=0.0,
            level_bytes=level_bytes,
            floors=[[2, 2] for _ in tiers],
        )
        storage = Storage(LAYOUT, levels, tiers, CpuDevice(1 << 22), disk_path=tmp_path, device_reserve=most)
        sink = CheckedEvents(LAYOUT)
        manager = KvCacheManager(
            LAYOUT,
            storage,
            levels,
            CacheSettings(max_util_for_resume=1.0),
            sink,
            max_pages=[len(tiers) * count for count in most],
            tuner=tuner if tuned else None,
        )
        made.append((manager, sink))
        return manager

    yield make
    for manager, sink in made:
        manager.check_integrity()
        manager.close()
        sink.finish()


def prompt(number: int, length: int) -> np.ndarray:
    return np.full(length, number, dtype=np.int32)


def started(manager: KvCacheManager, tokens: np.ndarray) -> KvCache:
    """Compute a prompt block by block, so that its window needs few pages."""
    cache = manager.create(NO_SCOPE, tokens, "r")
    assert cache.resume()
    while (begin := cache.committed) < len(tokens):
        end = min(len(tokens), begin + BLOCK)
        assert cache.resize(end, begin)
        ForwardPass(manager).compute(cache, tokens[:end].tolist(), begin)
        cache.commit(tokens[begin:end])
    return cache


def sizes(manager: KvCacheManager, level: int = 0) -> list[int]:
    return [table.num_slots[level] for table in manager.store.tables]


def test_long_requests_take_memory_from_the_window(make: Make) -> None:
    """§3.9: 40 tokens are 10 blocks with full attention, and a window of 8 is 3."""
    manager = make()
    started(manager, prompt(1, 40)).close()
    assert manager.wants_rebalance(1.0)
    before = sizes(manager)
    assert manager.rebalance(1.0)
    after = sizes(manager)
    assert after[0] > before[0]
    assert after[1] < before[1]
    used = sum(count * pool.page_bytes for count, pool in zip(after, LAYOUT.pools, strict=True))
    assert used <= 12 * LAYOUT.bytes_per_block
    assert not manager.wants_rebalance(2.0), "it is as it should be"
    assert manager.stats().counters.rebalances == 1
    # The memory is really there: one more block than there was.
    started(manager, prompt(2, BLOCK * (before[0] + 1))).close()


def test_only_when_all_are_suspended(make: Make) -> None:
    """§3.9, §2.2: adjust asserts that every living cache is suspended; here it does nothing before."""
    manager = make(tiers=("gpu", "host"))
    started(manager, prompt(1, 40)).close()
    one, two = started(manager, prompt(2, 8)), started(manager, prompt(3, 8))
    assert manager.wants_rebalance(1.0)
    before = sizes(manager)
    assert not manager.rebalance(1.0)
    one.suspend()
    assert not manager.rebalance(1.0)
    assert sizes(manager) == before
    two.suspend()
    assert manager.rebalance(1.0)
    assert sizes(manager) != before
    for cache, number in ((one, 2), (two, 3)):
        assert cache.resume()
        for group in (0, 1):
            ForwardPass(manager).check(group, cache.page_ids(group), NO_SCOPE, [number] * 8)
        cache.close()


def test_never_without_a_tuner(make: Make) -> None:
    """§2.2 enable_kv_pool_rebalance off: never, even with a mismatch."""
    manager = make(tuned=False)
    started(manager, prompt(1, 40)).close()
    assert not manager.wants_rebalance(1.0)
    assert not manager.rebalance(1.0)


def test_cooldown_and_samples(make: Make) -> None:
    """§1.1: at least ``cooldown_secs`` since the start and since each adjustment, and enough closed requests."""
    manager = make(cooldown_secs=10, min_sampled_kv_caches=2)
    started(manager, prompt(1, 40)).close()
    assert not manager.wants_rebalance(11.0)
    started(manager, prompt(2, 40)).close()
    assert not manager.wants_rebalance(9.0)
    assert manager.rebalance(11.0)
    for _ in range(8):
        started(manager, prompt(3, 4)).close()
    assert not manager.wants_rebalance(12.0)


@pytest.mark.parametrize("tiers", [("gpu",), ("gpu", "host"), ("gpu", "disk"), ("gpu", "host", "disk")])
def test_what_stays_keeps_its_content(make: Make, tiers: tuple[str, ...]) -> None:
    """§3.9: a shrinking pool evicts and defragments; pages that stay are where the cache says, with their bytes."""
    manager = make(tiers=tiers)
    started(manager, prompt(1, 40)).close()
    for number in range(2, 8):
        started(manager, prompt(number, 12)).close()
    prompts = [prompt(number, 13) for number in range(2, 8)]
    before = [manager.match(NO_SCOPE, tokens).num_tokens for tokens in prompts]
    started(manager, prompt(8, 40)).close()
    assert manager.rebalance(1.0)
    manager.check_integrity()
    after = [manager.match(NO_SCOPE, tokens).num_tokens for tokens in prompts]
    assert all(now in (0, had) for now, had in zip(after, before, strict=True))
    assert len(tiers) == 1 or any(after)
    for tokens in prompts:
        # Reads what it found as a forward pass does.
        started(manager, tokens).close()


def test_a_pool_with_pinned_pages_stays(make: Make) -> None:
    """A lease's pages cannot move: their pool does not shrink, and nobody grows at its cost."""
    manager = make(tiers=("gpu", "host"))
    started(manager, prompt(1, 40)).close()
    caches = [started(manager, prompt(number, 8)) for number in range(2, 6)]
    leases = [cache.hold(8) for cache in caches]
    for cache in caches:
        cache.close()
    slots = [lease.page_ids(1).tolist() for lease in leases]
    assert manager.rebalance(1.0)
    manager.check_integrity()
    assert [lease.page_ids(1).tolist() for lease in leases] == slots
    used = sum(count * pool.page_bytes for count, pool in zip(sizes(manager), LAYOUT.pools, strict=True))
    assert used <= 12 * LAYOUT.bytes_per_block
    for lease, number in zip(leases, range(2, 6), strict=True):
        ForwardPass(manager).check(1, lease.page_ids(1), NO_SCOPE, [number] * 8)
        lease.release()


def test_a_disk_that_fails_meanwhile_is_disabled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defragmentation writes, too; what fails then costs the tier, not the engine."""
    manager = make(tiers=("gpu", "disk"), moving_average_decay=0.01)
    for number in range(1, 12):
        started(manager, prompt(number, 8)).close()
    started(manager, prompt(20, 24)).close()
    started(manager, prompt(20, 25)).close()
    assert manager.tuner is not None
    targets = manager.tuner.target_pages()
    assert targets is not None
    table, left = manager.store.tables[1], targets[1][1]
    high = table.pages_above(1, left)
    held = []
    for number in range(1, 12):
        cache = manager.create(NO_SCOPE, prompt(number, 9), "r")
        held.append(cache)
        if not np.isin(cache.used_pages(1)[0], high).any():
            held.pop().close()
    assert 0 < table.counts(1).held <= left, "the pool can shrink if it moves some of these"
    for pool in manager.storage._cold[0]:
        monkeypatch.setattr(pool, "store", refuse)
        monkeypatch.setattr(pool, "resize", refuse)
    assert manager.rebalance(1.0)
    manager.check_integrity()
    assert not manager.can_suspend
    for cache in held:
        cache.close()
    started(manager, prompt(9, 40)).close()


def spoil(manager: KvCacheManager, level: int, pool: int, slot: int) -> None:
    """Flip a bit of one page of a colder level."""
    cold = manager.storage._cold[level - 1][pool]
    if isinstance(cold, PageFile):
        with cold.path.open("r+b") as file:
            place = slot * LAYOUT.pools[pool].page_bytes + 5
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 0x10]))
    else:
        cold.array[slot * cold.page_bytes + 5] ^= 0x10


@pytest.mark.parametrize("held", [False, True], ids=["cached", "held"])
@pytest.mark.parametrize("tiers", [("gpu", "host"), ("gpu", "disk"), ("gpu", "host", "disk")])
def test_one_damaged_page_among_those_that_are_packed(make: Make, tiers: tuple[str, ...], held: bool) -> None:
    """§3.9, content safety: what continues the damaged block goes, a slot is free once, the cache stays in order."""
    shrunk = lost = 0
    for nth in range(8):
        manager = make(pages=24, tiers=tiers)
        caches = []
        for number in range(1, 6):
            cache = started(manager, prompt(number, 40))
            if held and number == 2:
                cache.suspend()
                caches.append(cache)
            else:
                cache.close()
        table = manager.store.tables[0]
        above = table.pages_above(1, 12)
        assert len(above) >= 8
        spoil(manager, 1, 0, int(table.slot[above[nth]]))
        adjust_level(manager.store, manager.storage, 1, [12, 24], 24 * LAYOUT.bytes_per_block)
        manager.check_integrity()
        shrunk += table.num_slots[1] == 12
        for cache in caches:
            if not cache.resume():
                assert cache.lost
                lost += 1
            cache.close()
        for number in range(11, 15):
            started(manager, prompt(number, 40)).close()
            manager.check_integrity()
        for number in range(1, 6):
            # Reads what it found as a forward pass does.
            started(manager, prompt(number, 41)).close()
    assert held or shrunk == 8
    assert bool(lost) == held


def test_nothing_is_evicted_for_a_pool_that_cannot_shrink(make: Make) -> None:
    """§3.9: a page of a lease lies where the pool would end; what is cached in the pool stays."""
    manager = make(tiers=("gpu",))
    for number in range(1, 4):
        started(manager, prompt(number, 8)).close()
    cache = manager.create(NO_SCOPE, prompt(3, 9), "r")
    assert cache.resume()
    lease = cache.hold(8)
    cache.close()
    table = manager.store.tables[0]
    last = int(table.slots(lease.pages(0)).max())
    before = [manager.match(NO_SCOPE, prompt(number, 9)).num_tokens for number in range(1, 4)]
    assert before == [8, 8, 8]
    wanted = min(last, 3)
    assert len(table.free_slots[0]) < 12 - wanted, "room would have to be made"
    adjust_level(manager.store, manager.storage, 0, [wanted, 12], 12 * LAYOUT.bytes_per_block)
    assert table.num_slots[0] == 12
    assert [manager.match(NO_SCOPE, prompt(number, 9)).num_tokens for number in range(1, 4)] == before
    lease.release()


def test_a_level_that_cannot_grow_stays_smaller(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make(tiers=("gpu", "host"), moving_average_decay=0.01)
    started(manager, prompt(1, 40)).close()
    started(manager, prompt(1, 41)).close()
    for pool in manager.storage._cold[0]:
        monkeypatch.setattr(pool, "resize", refuse)
    assert manager.rebalance(1.0)
    manager.check_integrity()
    assert all(count <= 12 for count in sizes(manager, 1))
    started(manager, prompt(9, 40)).close()


def refuse(*_: object) -> None:
    raise OSError(errno.EIO, "the disk is broken")
