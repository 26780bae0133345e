"""§3.10: what sequences found and were given, by layer group; who counts, and from when on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from v1_cache import SmallCache

from kvmesh.cache.device import CpuDevice
from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.stats import CacheStats
from kvmesh.cache.storage import Storage
from kvmesh.cache.tallies import GroupTally
from kvmesh.hashing import ReuseScope

Factory = Callable[..., KvCacheManager]
SCOPE = ReuseScope()
SUMS = {
    "allocated_pages": "allocated",
    "new_pages": "new",
    "missed_blocks": "missed",
    "generated_blocks": "generated",
    "reused_full_blocks": "reused_full",
    "reused_partial_blocks": "reused_partial",
}
"""Counters of the whole cache, and what they are the sums of."""


def ids(length: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + length, dtype=np.int32)


def serve(manager: KvCacheManager, prompt: np.ndarray, output: int = 0, **options: object) -> int:
    """A prompt in one step, then ``output`` tokens one by one, a block of pages at a time; returns what was cached."""
    sequence = manager.create(SCOPE, prompt, "r", **options)  # type: ignore[arg-type]
    assert sequence.resume()
    assert sequence.resize(len(prompt))
    sequence.commit(prompt[sequence.committed :])
    for token in range(output):
        if sequence.committed == sequence.capacity:
            size = manager.layout.tokens_per_block
            assert sequence.resize((sequence.committed // size + 1) * size)
        sequence.commit(np.array([900 + token], dtype=np.int32))
    sequence.close()
    return sequence.num_cached_tokens


def check_sums(stats: CacheStats) -> None:
    for counter, field in SUMS.items():
        assert getattr(stats.counters, counter) == sum(getattr(one, field) for one in stats.tallies), counter
    for field in ("reused_full", "reused_partial"):
        by_level = [
            sum(getattr(flow, field) for flow in stats.flows if flow.group == one.group) for one in stats.tallies
        ]
        assert by_level == [getattr(one, field) for one in stats.tallies], field
    for one in stats.tallies:
        assert one.lookups == one.hits + one.misses
        assert one.hits == one.aligned_hits + one.unaligned_hits


def test_prompt_and_generated_blocks(make_manager: Factory) -> None:
    """Blocks of 4: a prompt of 6 has 2, and 7 generated tokens fill the second and begin a third and a fourth."""
    manager = make_manager(16)
    serve(manager, ids(6), output=7)
    assert manager.stats().tallies == (GroupTally(0, allocated=4, new=4, missed=2, generated=2),)


def test_reuse_whole_and_in_part(make_manager: Factory) -> None:
    """The copy of a block that is found in part is a page, but no new one; nothing of it was missed."""
    manager = make_manager(16)
    serve(manager, ids(12))
    assert serve(manager, np.concatenate((ids(10), ids(6, 50)))) == 10
    [tally] = manager.stats().tallies
    assert tally == GroupTally(0, allocated=5, new=4, missed=4, reused_full=2, reused_partial=1)
    assert [flow.copied for flow in manager.stats().flows] == [1]
    assert manager.stats().counters.cached_tokens == 10


def test_windows_count_what_they_were_given(make_manager: Factory) -> None:
    """A group counts its own pages: of three matched blocks a window of 4 needs one."""
    manager = make_manager(16, windows=(None, 4))
    serve(manager, ids(12))
    serve(manager, np.concatenate((ids(12), ids(4, 50))))
    full, windowed = manager.stats().tallies
    assert (full.reused_full, full.missed) == (3, 3 + 1)
    assert (windowed.reused_full, windowed.missed) == (1, 3 + 1)
    check_sums(manager.stats())


def test_a_tiny_window_s_scratch_slots_are_in_no_figure(make_manager: Factory) -> None:
    """§3.7: excluded from allocations and misses."""
    manager = make_manager(32, tokens_per_block=8, windows=(None, 16), enable_swa_scratch_reuse=True)
    serve(manager, ids(64))
    full, windowed = manager.stats().tallies
    assert (full.allocated, full.missed) == (8, 8)
    assert (windowed.allocated, windowed.missed) == (2, 2), "(h0, cap64, w16) -> [0, 6) in scratch slots"


def test_without_a_step_there_is_no_trace(make_manager: Factory) -> None:
    """Discarded if the request closes before its figures are committed."""
    manager = make_manager(16)
    serve(manager, ids(8))
    before = manager.stats()
    for resumed in (False, True):
        sequence = manager.create(SCOPE, ids(12), "r")
        if resumed:
            assert sequence.resume()
            assert sequence.resize(12)
        sequence.close()
    after = manager.stats()
    assert (after.counters, after.tallies, after.flows) == (before.counters, before.tallies, before.flows)


def test_a_step_counts_before_its_tokens_are_committed(make_manager: Factory) -> None:
    manager = make_manager(16)
    sequence = manager.create(SCOPE, ids(6), "r")
    assert sequence.resume()
    assert sequence.resize(6)
    assert manager.stats().counters.missed_blocks == 0
    sequence.note_step()
    sequence.note_step()
    assert (manager.stats().counters.missed_blocks, manager.stats().counters.prompt_tokens) == (2, 6)
    sequence.commit(ids(6))
    assert sequence.resize(9)
    assert manager.stats().tallies == (GroupTally(0, allocated=3, new=3, missed=2, generated=1),)
    sequence.close()


def test_a_prompt_that_is_tried_again_counts_once(make_manager: Factory) -> None:
    """What the scheduler does while there is no room: make a cache, get no pages, close it."""
    manager = make_manager(4)
    serve(manager, ids(4))
    other = manager.create(SCOPE, ids(8, 50), "other")
    assert other.resume()
    assert other.resize(8)
    prompt = np.concatenate((ids(4), ids(8, 80)))
    for _ in range(5):
        sequence = manager.create(SCOPE, prompt, "r")
        assert sequence.resume()
        assert not sequence.resize(12)
        sequence.close()
    other.close()
    assert serve(manager, prompt) == 4
    counters = manager.stats().counters
    assert (counters.reused_full_blocks, counters.missed_blocks, counters.cached_tokens) == (1, 1 + 2, 4)
    assert counters.prompt_tokens == 4 + 12, "the other one never computed a step"


@pytest.mark.parametrize("v1", [False, True])
def test_uncounted_sequences_never_count(make_manager: Factory, v1: bool) -> None:
    """Excluded (dummy) caches."""
    manager = SmallCache(16).manager if v1 else make_manager(16)
    for _ in range(2):
        sequence = manager.create(SCOPE, ids(10), "probe", reuse=False, counted=False)
        assert sequence.resume()
        assert sequence.resize(10)
        sequence.commit(ids(10))
        if not v1:
            sequence.suspend()
            assert sequence.resume()
        assert sequence.resize(14)
        sequence.commit(ids(3))
        sequence.close()
    stats = manager.stats()
    assert set(stats.tallies) == {GroupTally(0)}
    assert not any(getattr(stats.counters, name) for name in stats.counters.__dataclass_fields__)
    assert stats.free == stats.total, "nothing of it can be reused"


@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_sequence_that_is_made_again_is_no_new_prompt(make_manager: Factory, v1: bool, whole: bool) -> None:
    """Released for want of pages, it finds its own blocks: no hits. What is computed again was missed once.

    §3.10: pages really given are allocated and new ones, as ever.
    """
    manager = SmallCache(16).manager if v1 else make_manager(16)
    generated = np.array([900, 901], dtype=np.int32)
    serve(manager, ids(10), output=2)
    before = manager.stats().counters
    assert (before.prompt_tokens, before.cached_tokens, before.missed_blocks) == (10, 0, 3)
    if not whole:
        manager.clear_reusable_blocks()
    known = np.concatenate((ids(10), generated))
    sequence = manager.create(SCOPE, known, "r", prompt_length=10, again=True)
    assert sequence.resume()
    cached = sequence.num_cached_tokens
    assert cached == (11 if whole else 0)
    assert sequence.resize(12)
    sequence.commit(known[cached:])
    assert sequence.resize(16)
    sequence.commit(ids(4, 950))
    sequence.close()
    after = manager.stats()
    assert after.counters.recomputed_tokens == 12 - cached
    for name in ("prompt_tokens", "cached_tokens", "missed_blocks", "reused_full_blocks", "reused_partial_blocks"):
        assert getattr(after.counters, name) == getattr(before, name), name
    assert after.counters.generated_blocks == before.generated_blocks + 1, "of the tokens 12 to 15"
    assert after.counters.allocated_pages - before.allocated_pages == (1 + 1 if whole else 3 + 1)
    check_sums(after)


def test_a_resumption_without_a_step_is_none(make_manager: Factory) -> None:
    """The scheduler resumes, finds that too little room is left for the others, and suspends again."""
    manager = make_manager(16)
    sequence = manager.create(SCOPE, ids(8), "r")
    assert sequence.resume()
    assert sequence.resize(8)
    sequence.commit(ids(8))
    sequence.suspend()
    for _ in range(3):
        assert sequence.resume()
        sequence.suspend()
    assert sequence.resume()
    counters = manager.stats().counters
    assert (counters.suspended, counters.resumed) == (1, 0)
    assert sequence.resize(9)
    sequence.commit(ids(1))
    counters = manager.stats().counters
    assert (counters.suspended, counters.resumed) == (1, 1)
    sequence.close()


@pytest.mark.parametrize("point", [8, 6])
def test_states(point: int) -> None:
    """Lookups, hits and misses, reused and other tokens, at the end of a block or inside; a copied state is not new."""
    attention = LayerCacheSpec(layer_index=0, num_kv_heads=1, head_dim=8, dtype="float32")
    state = LayerCacheSpec(layer_index=1, kind="state", num_kv_heads=0, head_dim=0, dtype="float32", state_bytes=300)
    layout = PageLayout.build(CacheRequirements((attention, state)), 4)
    pages = [[32] * len(layout.pools)]
    chosen = CacheSettings(max_util_for_resume=1.0, snapshot_offsets_from_start=(point,))
    manager = KvCacheManager(layout, Storage(layout, pages, ("gpu",), CpuDevice(1 << 24)), pages, chosen)
    for length in (10, 12):
        sequence = manager.create(SCOPE, ids(length), "r")
        assert sequence.resume()
        assert sequence.resize(length)
        while (start := sequence.committed) < length:
            sequence.commit(ids(length)[start : sequence.chunk_end(start, length)])
        sequence.close()
    attended, stated = manager.stats().tallies
    assert stated == GroupTally(
        1,
        allocated=2,
        new=1,
        lookups=2,
        hits=1,
        misses=1,
        reused_tokens=point,
        unreused_tokens=10 + 12 - point,
        aligned_hits=point == 8,
        unaligned_hits=point == 6,
    )
    assert attended.reused_full + attended.reused_partial == 2
    assert [flow.copied for flow in manager.stats().flows] == [point == 6, 1 + 1], "a snapshot is a copy, too"
    check_sums(manager.stats())
    manager.close()


LENGTHS = st.lists(st.tuples(st.integers(1, 24), st.integers(0, 6), st.integers(0, 1)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([(None,), (4,), (None, 8)]))
def test_sums_of_groups_are_the_totals(requests: list[tuple[int, int, int]], windows: tuple[int | None, ...]) -> None:
    """Full attention: found and missed blocks are those of the prompt, and pages those of prompt and output."""
    layers = tuple(
        LayerCacheSpec(layer_index=i, num_kv_heads=1, head_dim=8, dtype="float32", window=window)
        for i, window in enumerate(windows)
    )
    layout = PageLayout.build(CacheRequirements(layers), 4)
    pages = [[64] * len(layout.pools)]
    storage = Storage(layout, pages, ("gpu",), CpuDevice(1 << 24))
    manager = KvCacheManager(layout, storage, pages, CacheSettings(max_util_for_resume=1.0))
    blocks = generated = copies = cached = 0
    for length, output, family in requests:
        found = serve(manager, ids(length, 50 * family), output)
        cached += found
        blocks += -(-length // 4)
        generated += -(-(length + output) // 4) - -(-length // 4)
        copies += found % 4 > 0
        check_sums(manager.stats())
    stats = manager.stats()
    assert (stats.counters.prompt_tokens, stats.counters.cached_tokens) == (sum(one[0] for one in requests), cached)
    assert sum(flow.copied for flow in stats.flows) == stats.counters.copied_pages
    for one, window in zip(stats.tallies, windows, strict=True):
        assert one.generated == generated
        assert one.allocated == one.new + copies
        assert one.new == one.missed + one.generated
        if window is None:
            assert one.reused_full + one.reused_partial + one.missed == blocks
    manager.close()
