"""What the V1 manager tells: its own 64-bit keys, per layer group, every stored key removed exactly once."""

from __future__ import annotations

from collections.abc import Callable

from v1_cache import SmallCache

from kvmesh.cache.v1 import V1CacheManager, V1Settings
from kvmesh.hashing import ReuseScope, as_token_ids, salt_id
from kvmesh.net.clock import ManualClock

Make = Callable[..., SmallCache]


def keys(cache: SmallCache, group: int = 0) -> list[int]:
    return [int.from_bytes(key, "big") for key in cache.sink.prefixes[group]]


def test_keys_are_the_golden_v1_hashes(make_cache: Make) -> None:
    """§4.2 v1_block_key"""
    for scope, expected in (
        (ReuseScope(), [924206229973855, 2728178455351807326]),
        (ReuseScope(lora_id=7), [1405807694910447675]),
        (ReuseScope(salt=salt_id("tenant-a")), [8961321873627678067]),
    ):
        cache = make_cache()
        cache.serve([1, 2, 3, 4, 5, 6, 7, 8][: 4 * len(expected)], scope=scope)
        assert keys(cache) == expected
        assert cache.manager.block_keys(scope, as_token_ids([1, 2, 3, 4, 5])) == [expected[0].to_bytes(8, "big")]


def test_creation_tells_tiers_and_slots_by_group(make_cache: Make) -> None:
    """§4.1 created: one entry for each level."""
    cache = make_cache(8, host=2, windows=(None, 8), heads=(1, 2))
    assert cache.sink.log == [("created", ("gpu", "host"), [[8, 2], [8, 2]])]


def test_each_group_is_told_in_ascending_order(make_cache: Make) -> None:
    """§7 T5: two blocks, two layer groups: exactly two events, group 0 then 1, each with both blocks."""
    cache = make_cache(windows=(None, 8))
    cache.sink.log.clear()
    sequence = cache.open([1] * 8)
    cache.compute(sequence, [1] * 8, [])
    assert [event[:2] for event in cache.sink.log] == [("stored", 0), ("stored", 1)]
    assert keys(cache, 0) == keys(cache, 1)
    sequence.close()


def test_consecutive_blocks_are_told_together_around_known_ones(make_cache: Make) -> None:
    cache = make_cache()
    one, two = cache.open([*range(16)]), cache.open([*range(4), 90, *range(5, 12)])
    cache.compute(two, [*range(4)], [])
    cache.sink.log.clear()
    cache.compute(one, [*range(16)], [])
    assert cache.sink.take("stored") == [("stored", 0, [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]])]
    one.close()
    two.close()


def test_removed_keys_come_after_those_that_continue_them(make_cache: Make) -> None:
    cache = make_cache()
    cache.serve([1, 1, 1, 1, 2, 2, 2, 2, 3, 3])
    cache.serve([1, 1, 1, 1, 4, 4, 4, 4])
    cache.sink.log.clear()
    cache.manager.clear_reusable_blocks()
    [(_, _, tails, _)] = cache.sink.take("removed")
    assert tails.index(3) < tails.index(2) < tails.index(1) > tails.index(4)  # type: ignore[attr-defined]


def test_without_a_sink_nothing_is_told() -> None:
    small = SmallCache(8, host=8)
    manager = V1CacheManager(
        small.layout, small.memory, [[8], [8]], ("gpu", "host"), V1Settings(), event_sink=None, clock=ManualClock()
    )
    tokens = as_token_ids([1] * 8)
    for _ in range(2):
        sequence = manager.create(ReuseScope(), tokens, "r")
        assert sequence.resume()
        assert sequence.resize(8)
        sequence.commit(tokens[sequence.committed :])
        sequence.close()
    blocker = manager.create(ReuseScope(), as_token_ids([2]), "b", reuse=False)
    assert blocker.resume()
    assert blocker.resize(32)
    blocker.close()
    assert manager.match(ReuseScope(), tokens).num_tokens == 7
    manager.check_integrity()
    manager.close()
    assert small.memory.num_closed == 1
