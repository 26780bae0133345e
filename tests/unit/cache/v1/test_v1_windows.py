"""V1 with sliding windows: blocks that the window has passed are really free, and what all groups can serve."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from v1_cache import UNSCOPED, SmallCache

from kvmesh.cache.v1.block import Block
from kvmesh.cache.v1.match import GroupPath, servable_tokens
from kvmesh.cache.v1.tree import BlockTree
from kvmesh.hashing import as_token_ids

Make = Callable[..., SmallCache]

PROMPT = list(range(1, 17))
"""Four blocks of 4."""


def path(present: str, tail: int = 0) -> GroupPath:
    """A walked path of blocks of 4 tokens; '-' is a hole."""
    tree = BlockTree(4)
    node = tree.anchor_root(UNSCOPED)
    nodes = []
    for i, there in enumerate(present):
        node = tree.add(node, bytes([i]), bytes(16))
        if there != "-":
            tree.place(node, Block(0, 0, i))
        nodes.append(node)
    return GroupPath(nodes, None, tail)


@pytest.mark.parametrize(
    ("present", "tail", "limit", "window", "expected"),
    [
        ("xxxx", 0, 16, None, 16),
        ("xxxx", 0, 15, None, 15),
        ("xx", 3, 16, None, 11),
        ("xxxx", 0, 16, 8, 16),
        ("--xx", 0, 16, 8, 16),
        ("-x-x", 0, 16, 5, 16),
        ("-x-x", 0, 16, 6, 0),
        ("-x-x", 0, 15, 5, 8),
        ("--xx", 0, 15, 8, 15),
        ("---x", 0, 16, 8, 0),
        ("x-x-", 2, 18, 4, 12),
        ("x--", 2, 14, 2, 14),
        ("x--", 2, 14, 3, 14),
        ("x--", 2, 14, 4, 4),
        ("", 3, 9, 4, 3),
        ("", 0, 9, 4, 0),
    ],
)
def test_servable_tokens(present: str, tail: int, limit: int, window: int | None, expected: int) -> None:
    assert servable_tokens(path(present, tail), limit, 4, window) == expected


def test_servable_tokens_is_the_longest_prefix_whose_window_is_there() -> None:
    """Against the definition: the last block, and all blocks with a token inside the window of the next query."""
    for bits in range(1 << 5):
        present = "".join("x" if bits >> i & 1 else "-" for i in range(5))
        for window in (1, 3, 4, 5, 8, 11):
            for tail in (0, 2):
                for limit in range(24):
                    covered = [4 * (there == "x") for there in present] + [tail]

                    def served(length: int, covered: list[int] = covered, window: int = window) -> bool:
                        blocks = -(-length // 4)
                        first = min(max(0, (length + 1 - window) // 4), blocks - 1)
                        return length == 0 or all(
                            block < len(covered) and covered[block] >= min(4, length - 4 * block)
                            for block in range(first, blocks)
                        )

                    expected = max(length for length in range(limit + 1) if served(length))
                    assert servable_tokens(path(present, tail), limit, 4, window) == expected


def test_pages_outside_the_window_are_free_for_others(make_cache: Make) -> None:
    cache = make_cache(6, windows=(8,))
    one = cache.open([1])
    tokens: list[int] = []
    for token in range(1, 100):
        cache.compute(one, [token], tokens)
        tokens.append(token)
        assert cache.manager.stats().locked <= 4
    cache.check(one, tokens)
    assert one.page_ids(0).tolist()[:20] == [-1] * 20
    two = cache.open([50] * 8)
    assert two.resize(8)
    two.close()
    one.close()


def test_an_exact_pool_is_enough_for_a_window(make_cache: Make) -> None:
    """§8 item 15: the pages that the scheduler counts are those that a sequence needs; else it would wait for ever."""
    cache = make_cache(3, windows=(8,), enable_block_reuse=False)
    sequence = cache.open([1])
    for history in range(60):
        assert cache.manager.pages_needed(history=history, capacity=history + 1)[0] <= 3
        assert sequence.resize(history + 1, history)
    sequence.close()


def test_a_page_that_passes_is_room_for_the_next(make_cache: Make) -> None:
    cache = make_cache(3, windows=(8,), enable_block_reuse=False)
    sequence = cache.open([1])
    for history in range(0, 60, 4):
        assert cache.manager.pages_needed(history=history, capacity=history + 4)[0] <= 3
        assert sequence.resize(history + 4, history)
    sequence.close()


def test_a_page_that_passes_is_no_room_while_somebody_else_needs_it(make_cache: Make) -> None:
    cache = make_cache(3, windows=(8,))
    sequence = cache.open(PROMPT)
    cache.compute(sequence, PROMPT[:4], [])
    lease = sequence.hold(4)
    assert sequence.resize(12, 4)
    assert not sequence.resize(16, 12)
    assert (sequence.capacity, sequence.history) == (12, 4)
    lease.release()
    assert sequence.resize(16, 12)
    sequence.close()


@pytest.mark.parametrize("leased", [True, False])
def test_the_last_block_in_the_window_goes_first(make_cache: Make, leased: bool) -> None:
    cache = make_cache(4, windows=(8,))
    sequence = cache.open(PROMPT)
    cache.compute(sequence, PROMPT, [])
    lease = sequence.hold(16) if leased else None
    sequence.close()
    if lease is not None:
        lease.release()
    cache.sink.log.clear()
    blocker = cache.open([99], reuse=False)
    for size in (4, 8, 12, 16):
        assert blocker.resize(size)
    assert [tails for _, _, tails, _ in cache.sink.take("removed")] == [[4], [8], [16], [12]]
    blocker.close()


def test_a_prompt_that_is_received_gets_no_pages_outside_the_window(make_cache: Make) -> None:
    cache = make_cache(windows=(None, 8))
    sequence = cache.open(PROMPT)
    assert sequence.resize(16, 16)
    assert (sequence.page_ids(0) >= 0).tolist() == [True] * 4
    assert (sequence.page_ids(1) >= 0).tolist() == [False, False, True, True]
    lease = sequence.hold(16)
    assert lease.page_ids(1).tolist() == sequence.page_ids(1).tolist()
    assert lease.num_pages == 6
    cache.write(sequence, PROMPT, [])
    sequence.commit(as_token_ids(PROMPT))
    cache.manager.check_integrity()
    assert cache.match([*PROMPT, 99]) == 16
    assert cache.match(PROMPT[:9]) == 0, "the windowed group never had these blocks"
    lease.release()
    sequence.close()
    cache.open([*PROMPT, 99]).close()


def test_the_reuse_length_is_what_all_groups_can_serve(make_cache: Make) -> None:
    cache = make_cache(windows=(None, 8))
    cache.serve(PROMPT)
    assert cache.match([*PROMPT, 99]) == 16
    assert cache.match(PROMPT[:9]) == 8
    windowed = cache.manager.index.trees[1]
    [third] = [node.block for node in windowed.nodes() if node.tokens.endswith(bytes([12]))]
    assert third is not None
    cache.manager.index.drop(third)
    assert cache.match([*PROMPT, 99]) == 8
    assert cache.match([*PROMPT[:8], 99]) == 8
    cache.manager.check_integrity()
    cache.serve([*PROMPT, 99])
    assert cache.match([*PROMPT, 99]) == 16, "computed again, the hole is filled"


def test_an_evicted_block_outside_the_window_does_not_hurt(make_cache: Make) -> None:
    cache = make_cache(windows=(8,))
    cache.serve(PROMPT)
    [first] = [node.block for node in cache.manager.index.trees[0].nodes() if node.tokens.endswith(bytes([4]))]
    assert first is not None
    cache.manager.index.drop(first)
    assert cache.match([*PROMPT, 99]) == 16
    cache.serve([*PROMPT, 99, 98, 97, 96])
    assert cache.match(PROMPT[:5]) == 0


def test_holes_go_with_the_last_block_that_continues_them(make_cache: Make) -> None:
    cache = make_cache(4, windows=(8,))
    cache.serve(PROMPT)
    tree = cache.manager.index.trees[0]
    assert [len(list(tree.nodes())), len(list(tree.roots()))] == [4, 1]
    blocker = cache.open([99], reuse=False)
    assert blocker.resize(16)
    assert list(tree.nodes()) == []
    blocker.close()
    assert list(tree.roots()) == []


def test_blocks_that_left_the_window_go_first(make_cache: Make) -> None:
    cache = make_cache(5, windows=(8,))
    running = cache.open(PROMPT)
    for begin in range(0, 16, 4):
        cache.compute(running, PROMPT[begin : begin + 4], PROMPT[:begin])
    cache.sink.log.clear()
    other = cache.open([99], reuse=False)
    assert other.resize(12)
    assert [tails for _, _, tails, _ in cache.sink.take("removed")] == [[4], [8]]
    assert not other.resize(16)
    cache.check(running, PROMPT)
    cache.manager.check_integrity()
    running.close()
    other.close()


def test_a_chunk_longer_than_the_window_is_stored_whole(make_cache: Make) -> None:
    """Blocks that the window passes before they are committed wait for the commit."""
    cache = make_cache(windows=(4,))
    sequence = cache.open(PROMPT)
    assert sequence.resize(16, 0)
    cache.write(sequence, PROMPT, [])
    assert sequence.resize(16, 16)
    assert cache.manager.stats().locked == 4
    sequence.commit(as_token_ids(PROMPT))
    assert cache.manager.stats().locked == 1
    assert cache.match(PROMPT[:5]) == 4
    sequence.close()


def test_a_damaged_block_of_a_window_is_a_hole(make_cache: Make) -> None:
    cache = make_cache(6, host=6, windows=(8,))
    cache.serve(PROMPT)
    blocker = cache.open([99], reuse=False)
    assert blocker.resize(24)
    blocker.close()
    [third] = [node.block for node in cache.manager.index.trees[0].nodes() if node.tokens.endswith(bytes([12]))]
    assert third is not None
    assert third.level == 1
    cache.memory.damage(0, third.slot)
    sequence = cache.manager.create(UNSCOPED, as_token_ids([*PROMPT, 99]), "s")
    assert not sequence.resume()
    assert sequence.lost
    sequence.close()
    assert cache.match([*PROMPT, 99]) == 8
    cache.serve([*PROMPT, 99])


def test_groups_of_different_page_sizes_have_pools_of_their_own(make_cache: Make) -> None:
    cache = make_cache(8, windows=(None, 8), heads=(1, 2))
    assert len(cache.manager.pools) == 2
    cache.serve(PROMPT)
    assert cache.manager.pages_needed(history=16, capacity=17) == [5, 3]
    assert cache.match([*PROMPT, 99]) == 16
    running = cache.open([99], reuse=False)
    assert running.resize(32)
    assert cache.match([*PROMPT, 99]) == 0
    running.close()


def test_groups_of_the_same_page_size_share_a_pool(make_cache: Make) -> None:
    cache = make_cache(8, windows=(None, 8))
    assert len(cache.manager.pools) == 1
    assert cache.manager.available_pages() == [16]
    running = cache.open([99], reuse=False)
    assert running.resize(48, 48)
    assert cache.manager.available_pages() == [16 - 12 - 2]
    running.close()
