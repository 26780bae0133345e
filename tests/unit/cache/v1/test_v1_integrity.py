"""The self-check of the V1 cache finds what it is there to find; wrong uses are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from v1_cache import SmallCache

from kvmesh.cache.errors import CacheIntegrityError
from kvmesh.cache.lazy_queue import LazyQueue
from kvmesh.cache.v1 import V1CacheManager, V1Settings
from kvmesh.cache.v1.block import Block, BlockState
from kvmesh.cache.v1.tree import BlockTree
from kvmesh.cache.v1.usage import LevelUse
from kvmesh.net.clock import ManualClock


def populated() -> tuple[SmallCache, list[Block]]:
    """A chain of three blocks on the device, and a fourth that continues the first one."""
    cache = SmallCache(6, host=4)
    cache.serve([*range(12)])
    cache.serve([0, 1, 2, 3, 90, 91, 92, 93])
    blocks = [node.block for node in cache.manager.index.trees[0].nodes() if node.block is not None]
    assert [block.slot for block in blocks] == [0, 1, 2, 3]
    cache.manager.check_integrity()
    return cache, blocks


def use(cache: SmallCache) -> LevelUse:
    return cache.manager.usage.pools[0][0]


def tree(cache: SmallCache) -> BlockTree:
    return cache.manager.index.trees[0]


BREAK: dict[str, Callable[[SmallCache, list[Block]], object]] = {
    "users of a block are miscounted": lambda _, blocks: setattr(blocks[0], "holds", 1),
    "another state": lambda _, blocks: setattr(blocks[0], "counted_as", BlockState.HELD),
    "slot is lost": lambda cache, _: use(cache).free.take(1),
    "used twice": lambda _, blocks: setattr(blocks[0], "slot", 1),
    "states of blocks are miscounted": lambda cache, _: use(cache).counts.__setitem__(BlockState.LOCKED, 1),
    "group are miscounted": lambda cache, _: use(cache).group_counts[0].__setitem__(BlockState.HELD, 1),
    "exactly the blocks that may go": lambda cache, blocks: use(cache).queue.discard(blocks[2]),
    "queue holds a block that does not exist": lambda cache, _: use(cache).queue.push(Block(0, 0, 9), 35, 10**9),
    "quarantined blocks are miscounted": lambda cache, _: setattr(cache.manager.usage, "quarantined", 1),
    "reusable blocks are miscounted": lambda cache, _: cache.manager.index.num_offered.__setitem__(0, 9),
    "another layer group": lambda _, blocks: setattr(blocks[0], "group", 1),
    "miscounts the sequences": lambda _, blocks: setattr(blocks[0].node, "anchors", 1),
    "miscounts the levels": lambda _, blocks: blocks[0].node.on_level.__setitem__(0, 9),  # type: ignore[union-attr]
    "hold different blocks": lambda cache, blocks: tree(cache)._by_key.__setitem__(b"x", blocks[0].node),
    "does not continue": lambda _, blocks: setattr(blocks[2].node, "parent", blocks[0].node),
    "does not know it": lambda _, blocks: setattr(blocks[2], "node", blocks[1].node),
    "a partial block is continued": lambda _, blocks: setattr(blocks[1].node, "tokens", b"1234"),
    "was kept": lambda cache, blocks: tree(cache).place(blocks[2].node, None),
    "not in order": lambda _, blocks: blocks[0].node.children.reverse(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("message", BREAK)
def test_the_check_finds(message: str) -> None:
    cache, blocks = populated()
    BREAK[message](cache, blocks)
    with pytest.raises(CacheIntegrityError, match=message):
        cache.manager.check_integrity()


@pytest.mark.parametrize("verb", ["unlock", "unhold", "unpin", "unquarantine"])
def test_no_count_goes_negative(verb: str) -> None:
    cache, blocks = populated()
    with pytest.raises(CacheIntegrityError, match=verb):
        getattr(cache.manager.usage, verb)(blocks[0])


@pytest.mark.parametrize("tiers", [(), ("host",), ("gpu", "disk"), ("gpu", "host", "disk")])
def test_other_tiers_are_refused(tiers: tuple[str, ...]) -> None:
    cache = SmallCache()
    with pytest.raises(ValueError, match="V1 has a gpu tier"):
        V1CacheManager(
            cache.layout, cache.memory, [[4]] * len(tiers), tiers, V1Settings(), event_sink=None, clock=ManualClock()
        )


@pytest.mark.parametrize("counts", [[], [[4]], [[4], [4, 4]]])
def test_page_counts_must_fit(counts: list[list[int]]) -> None:
    cache = SmallCache()
    with pytest.raises(ValueError, match="page counts"):
        V1CacheManager(
            cache.layout, cache.memory, counts, ("gpu", "host"), V1Settings(), event_sink=None, clock=ManualClock()
        )


def test_a_queue_is_compacted() -> None:
    """Blocks that come and go leave no entries behind without bound."""
    queue: LazyQueue[Block] = LazyQueue()
    blocks = [Block(0, 0, i) for i in range(10)]
    for number in range(10_000):
        queue.push(blocks[number % 10], 35, number)
    assert len(queue._heap) < 100
    assert [queue.pop() for _ in range(11)] == [*blocks, None]
