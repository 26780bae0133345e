"""Sliding windows of the V2 cache: which blocks are stale, scratch slots, what a window keeps and frees.

Covers semantics §3.3 and §3.7 (vectors), §3.8 (blocks needed), §1.3 (scratch under ``all_reusable``), §3.4 (windowed
pages that are missing or adopted).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_layouts import GroupOf, layout_of

from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.windows import blocks_needed, scratch_range, stale_range
from kvmesh.hashing import ReuseScope, as_token_ids

NO_SCOPE = ReuseScope()


def run(manager: KvCacheManager, tokens: np.ndarray, chunk: int | None = None) -> None:
    """Compute a prompt in chunks and close."""
    cache = manager.create(NO_SCOPE, tokens, "r")
    assert cache.resume()
    while cache.committed < len(tokens):
        begin = cache.committed
        end = cache.chunk_end(begin, min(len(tokens), begin + (chunk or len(tokens))))
        assert cache.resize(end, begin)
        cache.commit(tokens[begin:end])
    cache.close()
    manager.check_integrity()


@pytest.mark.parametrize(
    ("history", "window", "sinks", "expected"),
    [
        (32, 8, 0, (0, 3)),
        (31, 8, 0, (0, 3)),
        (33, 8, 0, (0, 3)),
        (100, 16, 1, (1, 10)),
        (0, 8, 0, (0, 0)),
        (7, 1, 0, (0, 0)),
        (8, 1, 0, (0, 1)),
        (64, None, 0, (0, 0)),
    ],
)
def test_stale_range(history: int, window: int | None, sinks: int, expected: tuple[int, int]) -> None:
    """§3.3, vectors with 8 tokens a block."""
    assert stale_range(history, 8, window, sinks) == expected


@given(history=st.integers(0, 300), size=st.integers(1, 16), window=st.integers(1, 100), sinks=st.integers(0, 4))
def test_stale_means_that_no_token_is_attended_to(history: int, size: int, window: int, sinks: int) -> None:
    """§3.3: the in-flight token at ``history`` attends to itself and the ``window - 1`` before it."""
    found = stale_range(history, size, window, sinks)
    blocks = -(-history // size)
    dead = [b for b in range(blocks) if (b + 1) * size <= history - (window - 1) and b >= min(blocks, sinks)]
    assert list(range(*found)) == dead


@pytest.mark.parametrize(
    ("history", "capacity", "rewind", "expected"),
    [(0, 64, 0, (0, 6)), (32, 64, 0, (4, 6)), (0, 64, 8, (0, 5)), (0, 16, 0, None)],
)
def test_scratch_range(history: int, capacity: int, rewind: int, expected: tuple[int, int] | None) -> None:
    """§3.7, vectors with 8 tokens a block and a window of 16."""
    found = scratch_range(history, capacity, 8, 16, max_rewind=rewind)
    assert found == expected if expected else found.size == 0


@pytest.mark.parametrize(
    ("window", "kind", "history", "capacity", "expected"),
    [
        (16, "attention", 0, 64, 8),
        (16, "attention", 100, 101, 3),
        (16, "attention", 99, 101, 3),
        (None, "attention", 100, 101, 13),
        (16, "attention", 0, 0, 1),
        (None, "state", 100, 101, 1),
    ],
)
def test_blocks_needed(window: int | None, kind: str, history: int, capacity: int, expected: int) -> None:
    """§3.8: ceil(cap / T) - |stale(h)|, at least 1; a state group always 1."""
    (group,) = layout_of(GroupOf(10, window, kind), tokens_per_block=8).groups  # type: ignore[arg-type]
    assert blocks_needed(group, 8, history=history, capacity=capacity) == expected


@pytest.mark.parametrize(("scratch", "pages"), [(False, 8), (True, 3)])
def test_the_peak_of_a_prefill_is_lower_with_scratch_slots(make_manager, scratch: bool, pages: int) -> None:
    """§2.2 enable_swa_scratch_reuse: 64 tokens, window 16, 8 tokens a block, 6 layers: ceil(6 / 6) slot and 2 pages."""
    manager = make_manager(16, tokens_per_block=8, windows=(16,) * 6, enable_swa_scratch_reuse=scratch)
    cache = manager.create(NO_SCOPE, np.arange(64, dtype=np.int32), "r")
    assert cache.resume()
    assert cache.resize(64, 0)
    assert manager.stats().locked == pages
    shared = cache.scratch(0)
    assert (shared is not None) == scratch
    if shared is not None:
        assert (shared.begin, shared.end, len(shared.slots)) == (0, 6, 1)
        assert (cache.page_ids(0) >= 0).tolist() == [False] * 6 + [True] * 2
    cache.close()


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 6, 7])
def test_scratch_slots_are_shared_by_as_many_blocks_as_there_are_layers(make_manager, layers: int) -> None:
    """§3.7: ceil(n * frac) slots."""
    manager = make_manager(16, tokens_per_block=8, windows=(16,) * layers, enable_swa_scratch_reuse=True)
    cache = manager.create(NO_SCOPE, np.arange(64, dtype=np.int32), "r")
    assert cache.resume()
    assert cache.resize(64, 0)
    shared = cache.scratch(0)
    assert shared is not None
    assert len(shared.slots) == -(-6 // layers)
    cache.close()


def test_scratch_slots_do_not_count_as_allocated(make_manager) -> None:
    """§3.7: excluded from the allocation statistics."""
    manager = make_manager(16, tokens_per_block=8, windows=(16,) * 6, enable_swa_scratch_reuse=True)
    cache = manager.create(NO_SCOPE, np.arange(64, dtype=np.int32), "r")
    assert cache.resume()
    assert cache.resize(64, 0)
    cache.note_step()
    assert manager.stats().counters.allocated_pages == 2
    cache.close()


def test_a_step_in_scratch_slots_must_be_computed_to_its_end(make_manager) -> None:
    """§3.7: new history = old capacity; no shrinking while scratch slots are in use."""
    manager = make_manager(16, tokens_per_block=8, windows=(16,) * 6, enable_swa_scratch_reuse=True)
    cache = manager.create(NO_SCOPE, np.arange(64, dtype=np.int32), "r")
    assert cache.resume()
    assert cache.resize(64, 0)
    for capacity, history in ((63, 0), (72, 63), (64, 0)):
        with pytest.raises(ValueError, match="scratch"):
            cache.resize(capacity, history)
    assert cache.resize(65, 64)
    assert cache.scratch(0) is None
    cache.close()


def test_blocks_in_scratch_slots_are_not_committed(make_manager, sink) -> None:
    """§1.3: with ``all_reusable`` and scratch slots only the other blocks are reusable in the windowed group."""
    manager = make_manager(
        16, tokens_per_block=8, windows=(None, 16, 16, 16, 16, 16, 16), enable_swa_scratch_reuse=True
    )
    tokens = np.arange(65, dtype=np.int32)
    run(manager, tokens[:64])
    keys = manager.block_keys(NO_SCOPE, tokens)
    assert [(1, key) in sink.levels for key in keys] == [False] * 6 + [True] * 2
    assert [(0, key) in sink.levels for key in keys] == [True] * 8
    assert manager.match(NO_SCOPE, tokens).num_tokens == 64
    assert manager.match(NO_SCOPE, tokens[:50]).num_tokens == 0


def test_an_old_block_of_a_window_may_go(make_manager) -> None:
    """§3.4 CHECK: window 4, 4 tokens a block: block 0's page goes, block 1 is still matched at 8."""
    manager = make_manager(windows=(None, 4))
    tokens = as_token_ids([*range(1, 9), 0])
    run(manager, tokens[:8])
    _, chain = manager.store.pages_of(manager.store.tree.walk(manager.block_keys(NO_SCOPE, tokens)))
    manager.store.drop_pages(0, chain[:1])
    manager.check_integrity()
    assert manager.match(NO_SCOPE, tokens).num_tokens == 8
    assert manager.match(NO_SCOPE, tokens[:8]).num_tokens == 7
    assert manager.match(NO_SCOPE, tokens[:7]).num_tokens == 0, "the token after 6 attends to number 3"


def test_a_page_that_covers_less_shortens_the_match(make_manager, sink) -> None:
    """§3.4: a longer block replaces a partial one and adopts its page, which remembers how many tokens it holds."""
    manager = make_manager(windows=(None, 4))
    tokens = as_token_ids([*range(1, 17), 0])
    run(manager, tokens[:6])
    partial = {key for group, key in sink.levels if group == 1}
    cache = manager.create(NO_SCOPE, tokens, "r", reuse_limit=4)
    assert cache.resume()
    assert cache.resize(16, 16)  # The windowed group gets no pages for blocks 1 and 2.
    assert (cache.page_ids(1) >= 0).tolist() == [False, False, False, True]
    cache.commit(tokens[4:16])
    cache.close()
    manager.check_integrity()
    keys = manager.block_keys(NO_SCOPE, tokens)
    now = {key for group, key in sink.levels if group == 1}
    assert [key in now for key in keys] == [True, True, False, True]
    assert len(partial - now) == 1, "removed under the key of the partial block"
    assert manager.match(NO_SCOPE, tokens[:9]).num_tokens == 6
    assert manager.match(NO_SCOPE, tokens[:7]).num_tokens == 6
    assert manager.match(NO_SCOPE, tokens).num_tokens == 16


def test_what_a_window_has_passed_is_freed(make_manager) -> None:
    """§3.3: committed blocks become evictable, blocks that will never be committed are freed at once."""
    manager = make_manager(16, windows=(8,))
    for reuse in (True, False):
        cache = manager.create(NO_SCOPE, np.arange(40, dtype=np.int32), "r", reuse=reuse)
        assert cache.resume()
        for end in range(4, 41, 4):
            assert cache.resize(end, end - 4)
            cache.commit(np.arange(end - 4, end, dtype=np.int32))
        # The last tokens are 40 - 7 ... 40, in the blocks 8 and 9.
        assert (cache.page_ids(0) >= 0).tolist() == [False] * 8 + [True] * 2
        stats = manager.stats()
        assert (stats.locked, stats.evictable, stats.free) == ((2, 8, 6) if reuse else (2, 0, 14))
        cache.close()
        manager.clear_reusable_blocks()


def test_endpoint_rewind_priorities(make_manager) -> None:
    """§1.3: 70 near the end of the reusable prompt, 0 elsewhere in the window's group, 35 with full attention."""
    manager = make_manager(32, windows=(None, 4), swa_endpoint_rewind_tokens=4)
    tokens = np.arange(28, dtype=np.int32)
    cache = manager.create(NO_SCOPE, tokens[:16], "r")
    assert cache.resume()
    assert cache.resize(16, 0)
    cache.commit(tokens[:16])
    assert cache.resize(24, 16)  # Decode does not move the endpoint.
    cache.commit(tokens[16:24])
    cache.close()

    def priorities(count: int) -> list[list[int]]:
        nodes = manager.store.tree.walk(manager.block_keys(NO_SCOPE, tokens[:count]))
        tables, chains = manager.store.group_tables, manager.store.pages_of(nodes)
        return [table.priority[chain].tolist() for table, chain in zip(tables, chains, strict=True)]

    # The reusable prompt is the tokens 0..14; 4 + 4 tokens before its end begin in block 1.
    assert priorities(24) == [[35] * 6, [0, 70, 70, 70, 0, 0]]
    # A later request: pages that it reuses keep their priority, new ones get its own.
    run(manager, tokens)
    assert priorities(28) == [[35] * 7, [0, 70, 70, 70, 0, 0, 70]]


def test_branch_snapshot_keeps_the_window_at_the_fork(make_manager) -> None:
    """§1.3: the fork, aligned down to a block, ends a chunk, so that its window is committed."""
    tokens = np.arange(24, dtype=np.int32)
    other = np.concatenate((tokens[:10], np.arange(90, 104, dtype=np.int32)))
    third = np.concatenate((tokens[:9], np.arange(70, 80, dtype=np.int32)))
    found = {}
    for branch in (False, True):
        manager = make_manager(
            32, windows=(None, 4, 4, 4, 4), enable_swa_scratch_reuse=True, enable_branch_snapshot=branch
        )
        run(manager, tokens)
        cache = manager.create(NO_SCOPE, other, "r")
        assert cache.num_cached_tokens == 0, "the window's pages before the end were scratch"
        assert cache.chunk_end(0, 24) == (8 if branch else 24)
        cache.close()
        run(manager, other)
        found[branch] = manager.match(NO_SCOPE, third).num_tokens
        manager.clear_reusable_blocks()
    assert found == {False: 0, True: 8}
