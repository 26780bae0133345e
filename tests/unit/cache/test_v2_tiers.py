"""Colder levels of the V2 cache: who falls, who is dropped, who comes back, and what happens when a tier fails.

Covers semantics §2 (``cold_tier_offload_min_priority``, ``disk_prefetch_num_reqs``), §2.2 (host 0 and disk), §3.2 (page
status), §3.6 (suspension), §3.8 (eviction order, last level, prefetch).
"""

from __future__ import annotations

import errno

import numpy as np
import pytest

from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.sequence import KvCache
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

NO_SCOPE = ReuseScope()


def prompt(number: int, length: int = 4) -> np.ndarray:
    return np.full(length, number, dtype=np.int32)


def started(manager: KvCacheManager, tokens: np.ndarray, priority: int | None = None) -> KvCache:
    retention = None
    if priority is not None:
        whole = TokenRangeRetention(token_start=0, priority=priority)
        retention = RetentionConfig(token_range_retention_configs=(whole,))
    cache = manager.create(NO_SCOPE, tokens, "r", retention=retention)
    assert cache.resume()
    assert cache.resize(len(tokens))
    cache.commit(tokens[cache.committed :])
    return cache


def run(manager: KvCacheManager, tokens: np.ndarray, priority: int | None = None) -> None:
    started(manager, tokens, priority).close()
    manager.check_integrity()


def level_of(manager: KvCacheManager, sink, tokens: np.ndarray) -> list[int | None]:
    """Level of each full block, None where it is not reusable."""
    return [sink.levels.get((0, key)) for key in manager.block_keys(NO_SCOPE, tokens)]


@pytest.mark.parametrize(("tier", "threshold"), [("host", 30), ("disk", 30), ("host", 0), ("host", 100)])
def test_the_threshold_itself_is_offloaded(make_manager, sink, tier: str, threshold: int) -> None:
    """§2 cold_tier_offload_min_priority CHECK: threshold 30: priority 30 goes 0 -> 1, priority 29 is removed."""
    manager = make_manager(2, cold_tier_offload_min_priority=threshold, **{tier: 4})
    run(manager, prompt(1), threshold)
    if threshold:
        run(manager, prompt(2), threshold - 1)
    sink.log.clear()
    run(manager, prompt(3, 8), 100)
    assert level_of(manager, sink, prompt(1)) == [1]
    assert level_of(manager, sink, prompt(2)) == [None]
    assert sink.moves == [(0, 1)]
    assert [name for name, _ in sink.log if name == "removed"] == ["removed"] * (threshold > 0)


def test_host_zero_and_a_disk(make_manager, sink) -> None:
    """§2.2: levels [gpu, disk]; offload goes 0 -> 1 in the events, and back."""
    manager = make_manager(1, host=0, disk=10)
    assert tuple(manager.tiers) == ("gpu", "disk")
    run(manager, prompt(1))
    run(manager, prompt(2))
    assert level_of(manager, sink, prompt(1)) == [1]
    tokens = prompt(1, 5)
    assert manager.match(NO_SCOPE, tokens) == (4, 1, 1)
    cache = manager.create(NO_SCOPE, tokens, "r")
    assert cache.resume()
    assert sink.moves == [(0, 1), (0, 1), (1, 0)]
    assert level_of(manager, sink, prompt(1)) == [0]
    cache.close()


def test_what_falls_off_the_last_level_is_dropped(make_manager, sink) -> None:
    """§3.8: victims fall level by level, the oldest first, and recursively make room; from the last one to nowhere."""
    manager = make_manager(1, host=1, disk=1)
    for number in range(1, 5):
        run(manager, prompt(number))
    assert [level_of(manager, sink, prompt(number)) for number in range(1, 5)] == [[None], [2], [1], [0]]
    counters = manager.stats().counters
    assert (counters.offloaded_pages, counters.dropped_pages) == (5, 1)


def test_a_colder_level_evicts_by_priority_too(make_manager, sink) -> None:
    """§3.8: a priority map of LRU queues on every level."""
    manager = make_manager(1, host=2)
    run(manager, prompt(1), 90)
    run(manager, prompt(2), 40)
    run(manager, prompt(3), 50)
    run(manager, prompt(4), 50)
    assert [level_of(manager, sink, prompt(number)) for number in range(1, 5)] == [[1], [None], [1], [0]]


def test_held_pages_fall_whatever_their_priority(make_manager, sink) -> None:
    """§3.2, §3.6: a suspended sequence's pages move, they are never dropped; it comes back with its bytes."""
    manager = make_manager(2, host=2, cold_tier_offload_min_priority=50)
    cache = started(manager, prompt(1, 8), priority=0)
    memory = manager.pools[0].array.reshape(-1, manager.layout.pools[0].page_bytes)
    memory[cache.page_ids(0)] = [[11], [22]]
    cache.suspend()
    other = started(manager, prompt(2, 8), priority=0)
    assert level_of(manager, sink, prompt(1, 8)) == [1, 1]
    assert not cache.resume(), "the device is locked"
    other.close()
    assert cache.resume()
    assert [int(memory[slot, 0]) for slot in cache.page_ids(0)] == [11, 22]
    assert level_of(manager, sink, prompt(1, 8)) == [0, 0]
    assert level_of(manager, sink, prompt(2, 8)) == [None, None], "priority 0 is dropped"
    cache.close()


def test_held_pages_that_nobody_has_room_for_are_a_refusal(make_manager) -> None:
    """§3.8: what must be kept must find a place, else there are no pages, and nothing has changed."""
    manager = make_manager(2, host=1)
    cache = started(manager, prompt(1, 8))
    cache.suspend()
    other = manager.create(NO_SCOPE, prompt(2, 8), "other")
    assert other.resume()
    before = manager.stats()
    assert not other.resize(8)
    assert manager.stats() == before
    assert other.resize(4)
    other.close()
    cache.close()


def test_suspended_sequences_on_the_last_level_keep_their_pages(make_manager) -> None:
    """§3.2: HELD on the last level cannot be evicted: neither by other held pages, nor by droppable ones."""
    manager = make_manager(2, host=2)
    first = started(manager, prompt(1, 8))
    first.suspend()
    second = started(manager, prompt(2, 8))
    second.suspend()
    third = manager.create(NO_SCOPE, prompt(3), "third")
    assert third.resume()
    assert not third.resize(4), "everything is held"
    third.close()
    second.close()
    assert first.resume()
    first.close()


def test_prefetch_takes_the_disk_s_pages_to_the_host(make_manager, sink) -> None:
    """§2 disk_prefetch_num_reqs CHECK: the first one's pages move 2 -> 1, the second's stay."""
    manager = make_manager(2, host=2, disk=8)
    for number in (1, 2, 3, 4):
        run(manager, prompt(number, 8))
    assert [level_of(manager, sink, prompt(number, 8)) for number in (1, 2)] == [[2, 2], [2, 2]]
    manager.clear_reusable_blocks()
    run(manager, prompt(1, 8))
    run(manager, prompt(2, 8))
    run(manager, prompt(3, 8))
    assert level_of(manager, sink, prompt(1, 8)) == [2, 2]
    # Room on the host without driving anything out.
    manager.store.drop_pages(0, np.flatnonzero(manager.store.tables[0].level == 1).astype(np.int32))
    sink.moves.clear()
    assert manager.prefetch(NO_SCOPE, prompt(1, 9)) == 2
    assert sink.moves == [(2, 1), (2, 1)]
    assert level_of(manager, sink, prompt(1, 8)) == [1, 1]
    assert manager.prefetch(NO_SCOPE, prompt(1, 9)) == 0, "nothing is left to do"


def test_prefetch_into_a_full_host_changes_places(make_manager, sink) -> None:
    """§2 disk_prefetch_num_reqs CHECK with N=1: the first one's pages move 2 -> 1, the second's are unchanged."""
    manager = make_manager(2, host=4, disk=8)
    for number in range(1, 6):
        run(manager, prompt(number, 8))
    assert [level_of(manager, sink, prompt(number, 8)) for number in range(1, 6)] == [
        [2, 2], [2, 2], [1, 1], [1, 1], [0, 0],
    ]  # fmt: skip
    sink.moves.clear()
    assert manager.prefetch(NO_SCOPE, prompt(1, 9)) == 2
    manager.check_integrity()
    assert sorted(sink.moves) == [(1, 2), (1, 2), (2, 1), (2, 1)], "no more than has to"
    assert [level_of(manager, sink, prompt(number, 8)) for number in range(1, 6)] == [
        [1, 1], [2, 2], [2, 2], [1, 1], [0, 0],
    ]  # fmt: skip
    assert manager.prefetch(NO_SCOPE, prompt(1, 9)) == 0
    assert manager.stats().counters.dropped_pages == 0


def test_prefetch_spares_other_prompts(make_manager, sink) -> None:
    """Neither the host pages of prompts that were fetched before nor their disk pages pay for this one."""
    manager = make_manager(2, host=4, disk=6)
    for number in range(1, 7):
        run(manager, prompt(number, 8))
    assert [level_of(manager, sink, prompt(number, 8)) for number in range(1, 7)] == [
        [2, 2], [2, 2], [2, 2], [1, 1], [1, 1], [0, 0],
    ]  # fmt: skip
    keep = [manager.block_keys(NO_SCOPE, prompt(number, 9)) for number in (1, 4)]
    assert manager.prefetch(NO_SCOPE, prompt(3, 9), keep=keep) == 2
    manager.check_integrity()
    # The disk was full: what was there longest of the others made room.
    assert [level_of(manager, sink, prompt(number, 8)) for number in range(1, 7)] == [
        [2, 2], [None, None], [1, 1], [1, 1], [2, 2], [0, 0],
    ]  # fmt: skip


def test_prefetch_never_moves_what_a_suspended_sequence_holds(make_manager, sink) -> None:
    """§3.8 prefetch: no space, nothing happens; never fatal."""
    manager = make_manager(2, host=2, disk=8)
    run(manager, prompt(1, 8))
    run(manager, prompt(2, 8))
    suspended = started(manager, prompt(3, 8))
    suspended.suspend()
    run(manager, prompt(4, 8))
    assert [level_of(manager, sink, prompt(number, 8)) for number in (1, 2, 3)] == [[2, 2], [2, 2], [1, 1]]
    sink.moves.clear()
    assert manager.prefetch(NO_SCOPE, prompt(1, 9)) == 0
    manager.check_integrity()
    assert sink.moves == []
    assert suspended.resume()
    suspended.close()


def test_prefetch_leaves_what_the_window_has_passed(make_manager, sink) -> None:
    """§3.3: a page that the sequence will not read stays where it is."""
    manager = make_manager(6, windows=(None, 8), host=6, disk=24)
    for number in range(1, 5):
        run(manager, prompt(number, 24))
    windowed = [sink.levels.get((1, key)) for key in manager.block_keys(NO_SCOPE, prompt(1, 24))]
    assert windowed == [2] * 6
    assert manager.prefetch(NO_SCOPE, prompt(1, 25)) == 6 + 2
    levels = [
        [sink.levels.get((group, key)) for key in manager.block_keys(NO_SCOPE, prompt(1, 24))] for group in (0, 1)
    ]
    assert levels == [[1] * 6, [2] * 4 + [1] * 2]


def test_prefetch_of_a_damaged_page_goes_on_without_it(make_manager, tmp_path, sink) -> None:
    """Content safety: what continues the damaged block is no longer worth fetching."""
    manager = make_manager(6, host=6, disk=12)
    for number in range(1, 4):
        run(manager, prompt(number, 24))
    assert level_of(manager, sink, prompt(1, 24)) == [2] * 6
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 12 // 2] ^= 1
    file.write_bytes(content)
    found = manager.match(NO_SCOPE, prompt(1, 25)).num_tokens
    moved = manager.prefetch(NO_SCOPE, prompt(1, 25))
    manager.check_integrity()
    assert manager.stats().counters.damaged_pages == 1
    left = manager.match(NO_SCOPE, prompt(1, 25)).num_tokens
    assert left < found
    assert level_of(manager, sink, prompt(1, 24))[: left // 4] == [1] * (left // 4)
    assert moved >= left // 4


@pytest.mark.parametrize("options", [{"host": 4}, {"host": 1, "disk": 4, "enable_block_reuse": False}, {}])
def test_prefetch_needs_a_disk_and_reuse(make_manager, options) -> None:
    """§2.2: with reuse off no I/O."""
    manager = make_manager(1, **options)
    for number in (1, 2, 3):
        run(manager, prompt(number))
    assert manager.prefetch(NO_SCOPE, prompt(1, 5)) == 0
    assert manager.stats().counters.onboarded_pages == 0


def test_a_partial_block_on_the_disk_is_copied_from_there(make_manager) -> None:
    """§3.5: the copy of the first resume reads the source where it is; the source stays."""
    manager = make_manager(2, disk=4)
    cache = started(manager, np.arange(3, dtype=np.int32))
    memory = manager.pools[0].array.reshape(-1, manager.layout.pools[0].page_bytes)
    memory[cache.page_ids(0)] = 77
    cache.close()
    run(manager, prompt(9, 8))
    found = manager.match(NO_SCOPE, np.arange(4, dtype=np.int32))
    assert found == (3, 0, 1)
    again = manager.create(NO_SCOPE, np.arange(4, dtype=np.int32), "r")
    assert again.resume()
    assert (memory[again.page_ids(0)[0]] == 77).all()
    assert manager.match(NO_SCOPE, np.arange(4, dtype=np.int32)) == found
    again.close()


def test_a_full_disk_disables_the_tier_and_serving_goes_on(make_manager, sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 3, content safety: what is on the tier is dropped from the cache, except what somebody still needs."""
    manager = make_manager(2, disk=8)
    run(manager, prompt(1, 8))
    suspended = started(manager, prompt(2, 8))
    suspended.suspend()
    run(manager, prompt(3, 8))
    assert level_of(manager, sink, prompt(2, 8)) == [1, 1]

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on the device")

    (pool,) = manager.storage._cold[0]
    monkeypatch.setattr(pool, "store", refuse)
    assert [level.usable for level in manager.level_stats()] == [True, True]
    run(manager, prompt(4, 8))
    assert [level.usable for level in manager.level_stats()] == [True, False]
    assert not manager.can_suspend
    assert [level_of(manager, sink, prompt(number, 8)) for number in (1, 3)] == [[None] * 2] * 2
    assert level_of(manager, sink, prompt(2, 8)) == [1, 1]
    assert suspended.resume(), "what it holds can still be read"
    suspended.close()
    for number in range(5, 9):
        run(manager, prompt(number, 8))
    assert manager.stats().counters.damaged_pages == 0


def test_a_damaged_page_is_a_miss(make_manager, tmp_path, sink) -> None:
    """Issue 3, content safety: a sequence that needs it is lost, and a new one finds what is left."""
    manager = make_manager(3, disk=8)
    run(manager, prompt(1, 8))
    run(manager, prompt(2, 12))
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    assert level_of(manager, sink, prompt(1, 8)) == [1, 1]
    content[len(content) // 4] ^= 1
    file.write_bytes(content)
    cache = manager.create(NO_SCOPE, prompt(1, 9), "r")
    assert cache.num_cached_tokens == 8
    assert not cache.resume()
    assert cache.lost
    cache.close()
    assert manager.stats().counters.damaged_pages == 1
    found = manager.match(NO_SCOPE, prompt(1, 9)).num_tokens
    again = started(manager, prompt(1, 9))
    assert again.num_cached_tokens == found < 8
    again.close()


@pytest.mark.parametrize("slot", range(6))
@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_one_damaged_host_page_that_falls_takes_only_what_continues_it(
    make_manager, windows: tuple[int | None, ...], slot: int
) -> None:
    """§3.8, content safety: blocks that fall together with the damaged one that they continue go, and their slots are
    used again.
    """
    manager = make_manager(6, windows=windows, host=6, disk=12)
    run(manager, prompt(1, 24))
    run(manager, prompt(2, 24))
    host = manager.storage._cold[0][0]
    host.array[slot * host.page_bytes + 5] ^= 0x10
    for number in range(3, 8):
        run(manager, prompt(number, 24))
    counters = manager.stats().counters
    assert counters.damaged_pages == 1
    kept = manager.match(NO_SCOPE, prompt(2, 24)).num_tokens
    again = started(manager, prompt(2, 24))
    assert again.num_cached_tokens == kept
    again.close()


@pytest.mark.parametrize("slot", range(6))
def test_one_damaged_host_page_of_a_suspended_sequence(make_manager, slot: int) -> None:
    """§3.6, content safety: a page that is needed and damaged stays only until its sequence finds out."""
    manager = make_manager(6, host=6, disk=12)
    suspended = started(manager, prompt(1, 24))
    suspended.suspend()
    run(manager, prompt(2, 24))
    host = manager.storage._cold[0][0]
    host.array[slot * host.page_bytes + 5] ^= 0x10
    for number in range(3, 6):
        run(manager, prompt(number, 24))
    assert not suspended.resume()
    assert suspended.lost
    suspended.close()
    for number in range(6, 9):
        run(manager, prompt(number, 24))
    assert manager.stats().counters.damaged_pages == 1


@pytest.mark.parametrize(("util", "resumed"), [(0.95, 19), (1.0, 20), (0.5, 10)])
def test_utilisation_counts_what_cannot_leave(make_manager, util: float, resumed: int) -> None:
    """§3.6: unavailable / total must not exceed the limit: one sequence of a block each, as many as may resume."""
    manager = make_manager(20, max_util_for_resume=util)
    caches = []
    for number in range(20):
        cache = manager.create(NO_SCOPE, prompt(number), "r")
        if cache.resume():
            assert cache.resize(4)
        caches.append(cache)
    # A sequence takes its page after it has resumed: at the limit exactly one more may.
    assert manager.stats().locked == min(20, resumed + 1)
    for cache in caches:
        cache.close()


def test_suspended_pages_do_not_count_where_they_can_move(make_manager) -> None:
    """§3.6: evictable includes held pages unless this is the last level."""
    for host, possible in ((4, True), (0, False)):
        manager = make_manager(4, host=host, max_util_for_resume=0.5)
        first = started(manager, prompt(1, 16))
        first.suspend()
        second = manager.create(NO_SCOPE, prompt(2), "r")
        assert second.resume() is possible
        second.close()
        first.close()
        manager.clear_reusable_blocks()
