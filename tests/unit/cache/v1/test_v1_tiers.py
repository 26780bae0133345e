"""V1's secondary pool: offload, onboarding, damage; retention priorities and durations (§2, §3.1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from v1_cache import UNSCOPED, SmallCache

from kvmesh.cache.stats import GroupPages
from kvmesh.hashing import as_token_ids
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

Make = Callable[..., SmallCache]

PROMPT = list(range(1, 13))


def retain(priority: int, duration_ms: int | None = None, *, decode: int = 35) -> RetentionConfig:
    whole = TokenRangeRetention(token_start=0, priority=priority, duration_ms=duration_ms)
    return RetentionConfig(token_range_retention_configs=(whole,), decode_retention_priority=decode)


def fill(cache: SmallCache, pages: int) -> None:
    """Use all of ``pages`` once, leaving nothing behind."""
    sequence = cache.open([99], reuse=False)
    assert sequence.resize(pages * cache.size)
    sequence.close()


def test_priority_30_is_offloaded_and_29_removed(make_cache: Make) -> None:
    """§2 cold_tier_offload_min_priority: threshold 30: priority 30 moves 0 -> 1, priority 29 is removed."""
    cache = make_cache(2, host=2)
    cache.serve([1] * 4, retention=retain(29))
    cache.serve([2] * 4, retention=retain(30))
    cache.sink.log.clear()
    fill(cache, 2)
    assert cache.sink.log == [("removed", 0, [1], 0), ("moved", 0, [2], 0, 1)]
    assert (cache.match([1] * 5), cache.match([2] * 5)) == (0, 4)
    found = cache.manager.match(UNSCOPED, as_token_ids([2] * 5))
    assert (found.num_tokens, found.num_full_blocks, found.coldest_level) == (4, 1, 1)


def test_a_stated_threshold(make_cache: Make) -> None:
    cache = make_cache(2, host=2, cold_tier_offload_min_priority=36)
    cache.serve([1] * 4)
    cache.serve([2] * 4, retention=retain(36))
    fill(cache, 2)
    assert (cache.match([1] * 5), cache.match([2] * 5)) == (0, 4)


def test_host_blocks_are_onboarded_before_they_are_used(make_cache: Make) -> None:
    """§3.1"""
    cache = make_cache(4, host=4)
    cache.serve(PROMPT)
    fill(cache, 4)
    assert cache.sink.take("moved") == [("moved", 0, [tail], 0, 1) for tail in (12, 8, 4)]
    sequence = cache.open([*PROMPT, 99])
    assert sequence.num_cached_tokens == 12
    assert cache.sink.take("moved") == [("moved", 0, [tail], 1, 0) for tail in (4, 8, 12)]
    counters = cache.manager.stats().counters
    page = cache.layout.groups[0].page_bytes
    assert (counters.offloaded_pages, counters.onboarded_pages) == (3, 3)
    assert (counters.offloaded_bytes, counters.onboarded_bytes) == (3 * page, 3 * page)
    sequence.close()


def test_a_full_host_pool_evicts_by_the_same_policy(make_cache: Make) -> None:
    """§3.1: host eviction, lowest priority first, then the least recently used: removed."""
    cache = make_cache(4, host=2)
    for token, priority in ((1, 40), (2, 35), (3, 50)):
        cache.serve([token] * 4, retention=retain(priority))
    cache.sink.log.clear()
    fill(cache, 4)
    assert cache.sink.log == [
        ("moved", 0, [2], 0, 1),
        ("moved", 0, [1], 0, 1),
        ("removed", 0, [2], 1),
        ("moved", 0, [3], 0, 1),
    ]
    assert cache.match([1] * 5) == cache.match([3] * 5) == 4
    counters = cache.manager.stats().counters
    assert (counters.offloaded_pages, counters.dropped_pages) == (2, 1), "the one in between never went there"
    for token in (1, 3):
        cache.open([token] * 5).close()


def test_dropping_a_device_block_drops_what_continues_it_on_the_host(make_cache: Make) -> None:
    cache = make_cache(3, host=3)
    low = TokenRangeRetention(token_start=0, token_end=4, priority=0)
    cache.serve(PROMPT, retention=RetentionConfig(token_range_retention_configs=(low,)))
    cache.sink.log.clear()
    sequence = cache.open([99], reuse=False)
    assert sequence.resize(8)
    assert cache.match(PROMPT) == 11
    assert sequence.resize(12)
    assert cache.sink.log[-2:] == [("removed", 0, [12, 8], 1), ("removed", 0, [4], 0)]
    sequence.close()
    assert [level.free for level in cache.manager.level_stats()] == [(3,), (3,)]


def test_without_room_on_the_device_nothing_is_onboarded(make_cache: Make) -> None:
    cache = make_cache(4, host=4)
    cache.serve(PROMPT)
    fill(cache, 4)
    blocker = cache.open([50] * 5)
    assert blocker.resize(8)
    waiting = cache.manager.create(UNSCOPED, as_token_ids([*PROMPT, 99]), "w")
    before = cache.manager.stats().pools
    assert not waiting.resume()
    assert not waiting.lost
    assert cache.manager.stats().pools == before
    fill(cache, 2)
    assert cache.manager.level_stats()[1].groups[0].held == 3, "what waits is not evicted from the host either"
    blocker.close()
    assert waiting.resume()
    cache.check(waiting, PROMPT)
    waiting.close()


def test_a_partially_matched_host_block_is_copied_from_there(make_cache: Make) -> None:
    cache = make_cache(4, host=4)
    cache.serve(PROMPT)
    fill(cache, 4)
    sequence = cache.open([*PROMPT[:10], 70, 71, 72])
    assert sequence.num_cached_tokens == 10
    assert cache.manager.match(UNSCOPED, as_token_ids([*PROMPT, 99])).coldest_level == 1
    sequence.close()
    cache.open([*PROMPT, 99]).close()


def test_a_partially_matched_host_block_is_onboarded_to_be_claimed(make_cache: Make) -> None:
    cache = make_cache(4, host=4, copy_on_partial_reuse=False)
    cache.serve(PROMPT)
    fill(cache, 4)
    sequence = cache.open([*PROMPT[:10], 70, 71, 72])
    assert sequence.num_cached_tokens == 10
    assert cache.match([*PROMPT, 99]) == 8
    assert cache.manager.level_stats()[1].free == (4,)
    sequence.close()


@pytest.mark.parametrize("length", [9, 10, 12])
def test_the_coldest_level_of_a_match(make_cache: Make, length: int) -> None:
    """Of whole and partially matched blocks: here the last one alone is on the host, then the first two as well."""
    cache = make_cache(3, host=3)
    cache.serve(PROMPT)
    prompt = as_token_ids([*PROMPT[:length], 70])
    assert cache.manager.match(UNSCOPED, prompt).coldest_level == 0
    fill(cache, 1)
    assert cache.manager.match(UNSCOPED, prompt) == (length, length // 4, 1)
    assert cache.manager.match(UNSCOPED, as_token_ids(PROMPT[:8])).coldest_level == 0
    fill(cache, 3)
    sibling = cache.open([*PROMPT[:8], 90, 91, 92, 93])
    cache.compute(sibling, [90, 91, 92, 93], PROMPT[:8])
    sibling.close()
    assert cache.manager.match(UNSCOPED, as_token_ids([*PROMPT[:8], 90, 1])).coldest_level == 0
    assert cache.manager.match(UNSCOPED, prompt).coldest_level == 1


def host_slot(cache: SmallCache, last_token: int) -> int:
    [block] = [
        node.block
        for node in cache.manager.index.trees[0].nodes()
        if node.block is not None and int.from_bytes(node.tokens[-4:], "big") == last_token
    ]
    assert block.level == 1
    return block.slot


def test_a_damaged_host_page_is_a_miss(make_cache: Make) -> None:
    """The block and what continues it leave the tree; a new sequence finds what is left."""
    cache = make_cache(4, host=4)
    cache.serve(PROMPT)
    fill(cache, 4)
    cache.memory.damage(0, host_slot(cache, 8))
    prompt = as_token_ids([*PROMPT, 99])
    one, two = (cache.manager.create(UNSCOPED, prompt, name) for name in ("one", "two"))
    cache.sink.log.clear()
    assert not one.resume()
    assert one.lost
    assert not two.lost
    assert not two.resume()
    assert two.lost
    assert not two.resume()
    assert cache.sink.take("removed") == [("removed", 0, [12, 8], 1)]
    assert cache.manager.stats().counters.damaged_pages == 1
    assert cache.match([*PROMPT, 99]) == 4
    cache.manager.check_integrity()
    one.close()
    two.close()
    assert cache.match([*PROMPT, 99]) == 4
    assert cache.manager.level_stats()[1].free == (4,)
    cache.serve([*PROMPT, 99])
    assert cache.match([*PROMPT, 99, 99]) == 13


@pytest.mark.parametrize("copy", [True, False])
def test_a_damaged_partial_match_is_a_miss(make_cache: Make, copy: bool) -> None:
    cache = make_cache(4, host=4, copy_on_partial_reuse=copy)
    cache.serve(PROMPT)
    fill(cache, 4)
    cache.memory.damage(0, host_slot(cache, 12))
    sequence = cache.manager.create(UNSCOPED, as_token_ids([*PROMPT[:10], 70]), "s")
    assert sequence.num_cached_tokens == 10
    assert not sequence.resume()
    assert sequence.lost
    sequence.close()
    assert cache.match([*PROMPT[:10], 70]) == 8
    cache.serve([*PROMPT[:10], 70])


def test_a_host_pool_that_takes_no_pages_is_left_out(make_cache: Make) -> None:
    cache = make_cache(4, host=4)
    cache.serve(PROMPT)
    cache.memory.refuses = True
    fill(cache, 4)
    assert cache.match(PROMPT) == 0
    assert cache.manager.stats().counters.offloaded_pages == 0
    assert cache.manager.level_stats()[1].free == (4,)
    cache.serve(PROMPT)
    assert cache.match(PROMPT) == 11


def test_a_block_computed_again_replaces_its_host_copy(make_cache: Make) -> None:
    cache = make_cache(8, host=8)
    one = cache.open(PROMPT)
    cache.serve(PROMPT)
    fill(cache, 8)
    leased = cache.open([*PROMPT, 50], reuse=False)
    assert cache.manager.level_stats()[1].groups[0].evictable == 3
    cache.compute(one, PROMPT[:4], [])
    assert one.resize(8, 4)
    lease = one.hold(8)
    cache.write(one, PROMPT[4:8], PROMPT[:4])
    one.commit(as_token_ids(PROMPT[4:8]))
    assert cache.sink.take("moved")[-2:] == [("moved", 0, [4], 1, 0), ("moved", 0, [8], 1, 0)]
    assert cache.manager.level_stats()[1].free == (7,)
    cache.check(one, PROMPT[:8])
    cache.manager.check_integrity()
    lease.release()
    leased.close()
    one.close()


def test_what_cannot_replace_a_host_copy_that_is_waited_for_is_not_stored(make_cache: Make) -> None:
    cache = make_cache(8, host=8)
    one = cache.open(PROMPT)
    cache.serve(PROMPT)
    fill(cache, 7)
    fill(cache, 8)
    waiting = cache.manager.create(UNSCOPED, as_token_ids([*PROMPT, 99]), "w")
    assert one.resize(12)
    lease = one.hold(12)
    cache.write(one, PROMPT, [])
    one.commit(as_token_ids(PROMPT))
    cache.manager.check_integrity()
    cache.check(one, PROMPT)
    assert cache.manager.level_stats()[1].groups[0].held == 3
    one.close()
    assert waiting.resume()
    cache.check(waiting, PROMPT)
    lease.release()
    cache.compute(waiting, [99, 98, 97, 96], PROMPT)
    cache.manager.check_integrity()
    waiting.close()


def test_a_duration_counts_from_the_release(make_cache: Make) -> None:
    """§3.1: on expiry the priority reverts to 35."""
    cache = make_cache(2, host=2)
    sequence = cache.open([1] * 4, retention=retain(80, 1000))
    cache.compute(sequence, [1] * 4, [])
    cache.clock._now_s = 100.0
    cache.manager.tick(100.0)
    assert list(cache.sink.priorities[0].values()) == [80], "in use"
    sequence.close()
    cache.manager.tick(100.9)
    assert list(cache.sink.priorities[0].values()) == [80]
    cache.manager.tick(101.0)
    assert cache.sink.take("priority") == [("priority", 0, [1], 80, 35)]
    cache.manager.tick(200.0)
    assert cache.sink.take("priority") == []


def test_an_expired_priority_decides_who_goes(make_cache: Make) -> None:
    cache = make_cache(3)
    cache.serve([1] * 4, retention=retain(80, 1000))
    cache.serve([2] * 4, retention=retain(40))
    cache.serve([3] * 4, retention=retain(10, 500))
    cache.manager.tick(0.6)
    cache.sink.log.clear()
    cache.manager.tick(1.5)
    sequence = cache.open([99], reuse=False)
    for size in (4, 8, 12):
        assert sequence.resize(size)
    assert [tails for _, _, tails, _ in cache.sink.take("removed")] == [[1], [3], [2]], "35 old, 35 young, 40"
    sequence.close()


def test_a_duration_counts_from_the_first_release(make_cache: Make) -> None:
    """§3.1: from when the block first became available for reuse, also while it is used again."""
    cache = make_cache(3)
    cache.serve([1] * 4, retention=retain(80, 1000))
    cache.clock._now_s = 0.5
    cache.open([1] * 5).close()
    sequence = cache.open([1] * 5)
    cache.manager.tick(0.9)
    assert list(cache.sink.priorities[0].values()) == [80]
    cache.manager.tick(1.0)
    assert list(cache.sink.priorities[0].values()) == [35]
    sequence.close()
    cache.manager.tick(9.0)
    assert len(cache.sink.take("priority")) == 1


def test_a_new_duration_replaces_the_one_that_runs(make_cache: Make) -> None:
    cache = make_cache(3)
    cache.serve([1] * 4, retention=retain(80, 1000))
    cache.clock._now_s = 0.5
    cache.open([1] * 5, retention=retain(90, 1000)).close()
    cache.manager.tick(1.4)
    assert list(cache.sink.priorities[0].values()) == [90]
    cache.manager.tick(1.5)
    assert list(cache.sink.priorities[0].values()) == [35]


def test_a_lasting_priority_replaces_one_that_runs_out(make_cache: Make) -> None:
    cache = make_cache(3)
    cache.serve([1] * 4, retention=retain(80, 1000))
    cache.open([1] * 5, retention=retain(90)).close()
    cache.manager.tick(9.0)
    assert list(cache.sink.priorities[0].values()) == [90]


def test_durations_of_evicted_blocks_are_forgotten(make_cache: Make) -> None:
    cache = make_cache(3)
    cache.serve([1] * 4, retention=retain(80, 1000))
    fill(cache, 3)
    assert len(cache.manager.usage._expiring) == 0


def test_generated_blocks_have_the_decode_priority(make_cache: Make) -> None:
    cache = make_cache()
    cache.serve([1, 2, 3, 4], [5, 6, 7, 8], retention=retain(60, decode=10))
    assert list(cache.sink.priorities[0].values()) == [60, 10]


def test_a_reused_block_takes_the_priority_that_a_range_gives_it(make_cache: Make) -> None:
    cache = make_cache()
    cache.serve(PROMPT)
    first = TokenRangeRetention(token_start=0, token_end=4, priority=90)
    cache.serve([*PROMPT, 99], retention=RetentionConfig(token_range_retention_configs=(first,)))
    assert cache.sink.take("priority") == [("priority", 0, [4], 35, 90)]
    cache.serve([*PROMPT, 99])
    assert cache.sink.take("priority") == []


def test_level_stats(make_cache: Make) -> None:
    cache = make_cache(4, host=5)
    cache.serve(PROMPT)
    fill(cache, 2)
    device, host = cache.manager.level_stats()
    assert (device.level, device.tier, device.total, device.free) == (0, "gpu", (4,), (2,))
    assert (host.level, host.tier, host.total, host.free) == (1, "host", (5,), (4,))
    assert device.groups == (GroupPages(0, None, locked=0, pinned=0, held=0, evictable=2),)
    assert host.groups == (GroupPages(0, None, locked=0, pinned=0, held=0, evictable=1),)
    assert cache.manager.tiers == ("gpu", "host")
    assert cache.sink.known[0]
