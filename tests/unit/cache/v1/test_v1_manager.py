"""The V1 manager: reuse, eviction, partial blocks, leases; the CHECK lines of §2 and §3.1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from v1_cache import SmallCache

from kvmesh.cache.errors import CacheBusyError, CacheStateError
from kvmesh.hashing import ReuseScope, as_token_ids
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

Make = Callable[..., SmallCache]

PROMPT = list(range(1, 13))
"""Three blocks of 4."""

SALTED = ReuseScope(salt=5)


def retain(priority: int, duration_ms: int | None = None) -> RetentionConfig:
    whole = TokenRangeRetention(token_start=0, priority=priority, duration_ms=duration_ms)
    return RetentionConfig(token_range_retention_configs=(whole,))


def test_enable_block_reuse_65_tokens(make_cache: Make) -> None:
    """§2: the same 65-token prompt twice, blocks of 32: the second finds 64 tokens, or none without reuse."""
    prompt = list(range(65))
    for enabled in (True, False):
        cache = make_cache(8, tokens_per_block=32, enable_block_reuse=enabled)
        cache.serve(prompt)
        assert cache.match(prompt) == (64 if enabled else 0)
        cache.serve(prompt)
        assert cache.manager.stats().counters.cached_tokens == (64 if enabled else 0)


def test_blocks_are_reusable_as_soon_as_they_are_filled(make_cache: Make) -> None:
    """§3.1"""
    cache = make_cache()
    first = cache.open(PROMPT)
    cache.compute(first, PROMPT[:7], [])
    assert cache.match(PROMPT) == 4
    cache.compute(first, PROMPT[7:], PROMPT[:7])
    assert cache.match([*PROMPT, 99]) == 12
    assert cache.match(PROMPT) == 11, "the last token of a prompt is always computed"
    second = cache.open([*PROMPT, 99])
    assert second.page_ids(0).tolist() == first.page_ids(0).tolist(), "shared"
    first.close()
    second.close()


def test_a_trailing_partial_block_is_stored_at_the_end(make_cache: Make) -> None:
    cache = make_cache()
    sequence = cache.open(PROMPT)
    cache.compute(sequence, PROMPT[:6], [])
    assert cache.match(PROMPT) == 4
    sequence.stop_committing()
    assert cache.match(PROMPT) == 6
    with pytest.raises(CacheStateError, match="after stop_committing"):
        sequence.commit(as_token_ids([1]))
    sequence.close()
    cache.serve(PROMPT)
    assert sorted(len(prefix) for _, prefix in cache.sink.prefixes[0].values()) == [4, 8, 12], "the longer one replaces"


def test_enable_partial_reuse(make_cache: Make) -> None:
    """§2: block [1..8], prompt [1,2,3,4,5,9,...]: 5 tokens are reused, or none."""
    for enabled in (True, False):
        cache = make_cache(tokens_per_block=8, enable_partial_reuse=enabled)
        cache.serve(range(1, 9))
        prompt = [1, 2, 3, 4, 5, 9, 10, 11, 12]
        assert cache.match(prompt) == (5 if enabled else 0)
        cache.serve(prompt)


def test_copy_on_partial_reuse_true_keeps_the_original(make_cache: Make) -> None:
    """§2: True: partial reuse, and the original is still matchable; the copy's writer never changes it (§2.2)."""
    cache = make_cache()
    cache.serve(PROMPT)
    sequence = cache.open([1, 2, 3, 4, 5, 6, 70, 71])
    assert sequence.num_cached_tokens == 6
    cache.compute(sequence, [70, 71, 72], [1, 2, 3, 4, 5, 6])
    assert cache.match([*PROMPT, 99]) == 12
    cache.open([*PROMPT, 99]).close()
    sequence.close()
    assert cache.manager.stats().counters.copied_pages == 1


def test_copy_on_partial_reuse_false_with_a_block_in_use(make_cache: Make) -> None:
    """§2: False: no partial reuse of a block that somebody holds."""
    cache = make_cache(copy_on_partial_reuse=False)
    holder = cache.open(PROMPT)
    cache.compute(holder, PROMPT, [])
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 70]) == 8
    holder.close()
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 70]) == 9
    assert cache.match([1, 2, 3, 4, 5, 70]) == 4, "another block continues it"


def test_copy_on_partial_reuse_false_claims_the_block(make_cache: Make) -> None:
    """§2: False: the block is claimed and overwritten, so it leaves the tree."""
    cache = make_cache(copy_on_partial_reuse=False)
    cache.serve(PROMPT)
    prompt = [*PROMPT[:9], 70, 71, 72]
    before = cache.manager.stats()
    sequence = cache.open(prompt)
    assert sequence.num_cached_tokens == 9
    assert cache.sink.take("removed") == [("removed", 0, [12], 0)]
    assert cache.manager.stats().free == before.free, "no page was needed"
    assert cache.match([*PROMPT, 99]) == 8
    cache.compute(sequence, prompt[9:], prompt[:9])
    assert cache.match([*prompt, 99]) == 12
    sequence.close()


def test_a_block_that_is_not_claimable_any_more_is_copied(make_cache: Make) -> None:
    cache = make_cache(copy_on_partial_reuse=False)
    cache.serve(PROMPT)
    partial = cache.manager.create(ReuseScope(), as_token_ids([*PROMPT[:9], 70]), "partial")
    full = cache.open([*PROMPT, 99])
    assert partial.resume()
    cache.check(partial, PROMPT[:9])
    cache.compute(partial, [70], PROMPT[:9])
    cache.check(full, PROMPT)
    partial.close()
    full.close()


def test_a_block_that_was_continued_meanwhile_is_copied(make_cache: Make) -> None:
    cache = make_cache(copy_on_partial_reuse=False)
    cache.serve(PROMPT)
    partial = cache.manager.create(ReuseScope(), as_token_ids([*PROMPT[:9], 70]), "partial")
    cache.serve([*PROMPT, 50, 51, 52, 53])
    assert partial.resume()
    cache.compute(partial, [70], PROMPT[:9])
    assert cache.match([*PROMPT, 50, 51, 52, 53, 9]) == 16
    partial.close()


def test_a_partial_block_that_was_replaced_meanwhile_is_copied(make_cache: Make) -> None:
    for copy in (True, False):
        cache = make_cache(copy_on_partial_reuse=copy)
        cache.serve(PROMPT[:10])
        partial = cache.manager.create(ReuseScope(), as_token_ids([*PROMPT[:10], 70]), "partial")
        full = cache.open(PROMPT, reuse=True)
        cache.compute(full, PROMPT[full.num_cached_tokens :], PROMPT[: full.num_cached_tokens])
        full.close()
        assert partial.resume()
        assert partial.num_cached_tokens == 10
        cache.check(partial, PROMPT[:10])
        partial.close()


def test_scopes_do_not_share(make_cache: Make) -> None:
    cache = make_cache()
    cache.serve(PROMPT)
    for scope in (SALTED, ReuseScope(lora_id=1)):
        assert cache.match(PROMPT, scope) == 0
        cache.serve(PROMPT, scope=scope)
        assert cache.match(PROMPT, scope) == 11


def test_a_hash_hit_is_no_match_without_equal_tokens(make_cache: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """§3.1: 64 bits are not trusted: here every block has the same key."""
    monkeypatch.setattr(
        "kvmesh.cache.v1.tokens.v1_block_keys",
        lambda tokens, size, *_, **__: np.zeros(-(-len(tokens) // size), np.uint64),
    )
    cache = make_cache()
    cache.serve(PROMPT[:4])
    assert cache.match([1, 2, 3, 4, 5]) == 4
    assert cache.match([9, 9, 9, 9, 9]) == 0
    assert cache.match([1, 2, 3, 4, 1, 2, 3, 4, 9]) == 4, "equal tokens after another beginning"
    cache.serve([9, 9, 9, 9, 9])
    assert cache.match([9, 9, 9, 9, 9]) == 0, "the key is taken: not stored"
    assert cache.match(PROMPT) == 4
    cache.serve(PROMPT)
    assert cache.match(PROMPT) == 4


def test_lowest_priority_first_then_lru(make_cache: Make) -> None:
    """§3.1: cached leaves A(20) B(35, old) C(35, new), need 3: evict A, B, C."""
    cache = make_cache(3)
    cache.serve([2] * 4)
    cache.serve([3] * 4)
    cache.serve([1] * 4, retention=retain(20))
    cache.sink.log.clear()
    sequence = cache.open([9] * 12)
    for size in (4, 8, 12):
        assert sequence.resize(size)
    assert [tails for _, _, tails, _ in cache.sink.take("removed")] == [[1], [2], [3]]
    sequence.close()


def test_only_leaves_are_evicted(make_cache: Make) -> None:
    """§3.1: a block goes after those that continue it, even when its own priority is lower."""
    cache = make_cache(4)
    first = TokenRangeRetention(token_start=0, token_end=4, priority=0)
    cache.serve(PROMPT, retention=RetentionConfig(token_range_retention_configs=(first,)))
    cache.sink.log.clear()
    sequence = cache.open([99] * 16)
    assert sequence.resize(4)
    for size in (8, 12, 16):
        assert sequence.resize(size)
    assert [tails for _, _, tails, _ in cache.sink.take("removed")] == [[12], [8], [4]]
    sequence.close()


def test_reuse_makes_a_block_young(make_cache: Make) -> None:
    cache = make_cache(3)
    cache.serve([1] * 4)
    cache.serve([2] * 4)
    cache.open([1] * 5).close()
    cache.serve([3] * 8)
    assert (cache.match([1] * 5), cache.match([2] * 5)) == (4, 0)


def test_blocks_in_use_are_never_evicted(make_cache: Make) -> None:
    cache = make_cache(4)
    running = cache.open(PROMPT)
    cache.compute(running, PROMPT, [])
    other = cache.open([99] * 8)
    before = cache.manager.stats()
    assert other.resize(4)
    assert not other.resize(8)
    assert other.capacity == 4
    assert cache.manager.available_pages() == [0]
    assert cache.manager.stats()._replace(counters=None) == before._replace(
        free=0, locked=4, counters=None, pools=cache.manager.stats().pools
    )
    cache.check(running, PROMPT)
    other.close()
    running.close()


def test_identical_blocks_computed_together_are_shared(make_cache: Make) -> None:
    cache = make_cache()
    one, two = cache.open(PROMPT), cache.open(PROMPT)
    cache.compute(one, PROMPT[:8], [])
    cache.compute(two, PROMPT[:8], [])
    assert one.page_ids(0).tolist() == two.page_ids(0).tolist()
    assert cache.manager.stats().counters.rebased_pages == 2
    cache.compute(two, PROMPT[8:], PROMPT[:8])
    cache.compute(one, PROMPT[8:], PROMPT[:8])
    one.close()
    two.close()


def test_reuse_false_neither_finds_nor_leaves_anything(make_cache: Make) -> None:
    cache = make_cache()
    cache.serve(PROMPT)
    cache.sink.log.clear()
    sequence = cache.open(PROMPT, reuse=False)
    assert sequence.num_cached_tokens == 0
    cache.compute(sequence, PROMPT, [])
    sequence.close()
    assert cache.sink.log == []


def test_many_siblings_are_all_searched_for_partial_matches(make_cache: Make) -> None:
    cache = make_cache(64)
    for i in range(50):
        cache.serve([1, 2, 3, 4, 100 + i, 200 + i, 7, 7])
    assert cache.match([1, 2, 3, 4, 137, 237, 5, 5]) == 6
    assert cache.match([1, 2, 3, 4, 137, 5, 5, 5]) == 5
    assert cache.match([1, 2, 3, 4, 99, 5, 5, 5]) == 4


def test_a_lease_outlives_its_sequence(make_cache: Make) -> None:
    cache = make_cache(4)
    sequence = cache.open(PROMPT)
    cache.compute(sequence, PROMPT, [])
    lease = sequence.hold(9)
    ids = lease.page_ids(0)
    sequence.close()
    assert len(ids) == lease.num_pages == 3
    other = cache.open([99] * 8)
    assert other.resize(4)
    assert not other.resize(8), "pinned"
    assert cache.manager.reservable_pages() == [1]
    cache.check_slots([ids], ReuseScope(), PROMPT)
    with pytest.raises(CacheBusyError, match="leases"):
        cache.manager.close()
    lease.release()
    assert other.resize(8)
    with pytest.raises(CacheStateError, match="released"):
        lease.release()
    with pytest.raises(CacheStateError, match="released"):
        lease.page_ids(0)
    other.close()


def test_quarantined_blocks_are_never_committed(make_cache: Make) -> None:
    cache = make_cache(8)
    sequence = cache.open(PROMPT)
    assert sequence.resize(12)
    lease = sequence.hold(12)
    lease.quarantine()
    lease.quarantine()
    assert lease.quarantined
    with pytest.raises(CacheStateError, match="quarantined"):
        sequence.commit(as_token_ids(PROMPT))
    sequence.close()
    assert cache.manager.stats().quarantined == 3
    assert cache.match(PROMPT) == 0
    lease.release()
    assert cache.manager.stats().free == 8


def test_a_quarantined_partial_block_is_not_stored_at_the_end(make_cache: Make) -> None:
    cache = make_cache(8)
    sequence = cache.open(PROMPT)
    cache.compute(sequence, PROMPT[:6], [])
    lease = sequence.hold(6)
    lease.quarantine()
    sequence.close()
    assert cache.match(PROMPT) == 4
    lease.release()
    assert cache.match(PROMPT) == 4


def test_stored_blocks_under_a_lease_are_not_quarantined(make_cache: Make) -> None:
    cache = make_cache(8)
    sequence = cache.open(PROMPT)
    cache.compute(sequence, PROMPT, [])
    lease = sequence.hold(12)
    lease.quarantine()
    assert not lease.quarantined
    sequence.close()
    lease.release()


def test_sequences_run_from_resume_to_close(make_cache: Make) -> None:
    cache = make_cache()
    sequence = cache.manager.create(ReuseScope(), as_token_ids(PROMPT), "r")
    with pytest.raises(CacheStateError, match="resize on a sequence that is created"):
        sequence.resize(4)
    assert sequence.resume()
    assert not cache.manager.can_suspend
    with pytest.raises(CacheStateError, match="suspend needs KV cache manager V2"):
        sequence.suspend()
    with pytest.raises(CacheStateError, match="resume on a sequence that is active"):
        sequence.resume()
    with pytest.raises(CacheBusyError, match="1 sequences"):
        cache.manager.clear_reusable_blocks()
    with pytest.raises(ValueError, match="capacity"):
        sequence.commit(as_token_ids([1]))
    with pytest.raises(ValueError, match="must not be below"):
        sequence.resize(2, 3)
    with pytest.raises(ValueError, match="no pages for 1 tokens"):
        sequence.hold(1)
    assert sequence.resize(7)
    row = np.full(5, 77, dtype=np.int32)
    assert sequence.block_table_into(0, row) == sequence.num_blocks == 2
    assert row.tolist() == [*sequence.page_ids(0).tolist(), 77, 77, 77]
    assert sequence.resize(4)
    assert sequence.num_blocks == 1
    assert sequence.chunk_end(3, 9) == 9
    assert sequence.scratch(0) is None
    sequence.close()
    sequence.close()
    with pytest.raises(CacheStateError, match="closed"):
        sequence.stop_committing()


def test_what_only_v2_has_does_nothing(make_cache: Make) -> None:
    cache = make_cache()
    assert cache.manager.prefetch(ReuseScope(), as_token_ids(PROMPT)) == 0
    assert not cache.manager.rebalance(0.0)
    assert not cache.manager.wants_rebalance(0.0)


def test_wrong_prompts_and_retention_are_refused(make_cache: Make) -> None:
    cache = make_cache()
    with pytest.raises(ValueError, match="at least one token"):
        cache.manager.create(ReuseScope(), as_token_ids([]), "r")
    with pytest.raises(ValueError, match="101"):
        cache.manager.create(ReuseScope(), as_token_ids([1]), "r", retention=retain(101))
    assert cache.manager.stats().open_sequences == 0


def test_a_sequence_that_could_not_resume_leaves_the_cache_as_it_was(make_cache: Make) -> None:
    cache = make_cache(3)
    cache.serve(PROMPT[:8])
    blocker = cache.open([99] * 4)
    assert blocker.resize(4)
    before = cache.manager.stats().pools
    waiting = cache.manager.create(ReuseScope(), as_token_ids([1, 2, 3, 4, 5, 6, 70]), "w")
    assert waiting.num_cached_tokens == 6
    assert not waiting.resume(), "no page for the copy"
    assert not waiting.lost
    waiting.close()
    assert cache.manager.stats().pools == before
    assert cache.match(PROMPT[:8]) == 7
    blocker.close()


def test_page_counts(make_cache: Make) -> None:
    cache = make_cache(8)
    cache.serve(PROMPT)
    waiting = cache.manager.create(ReuseScope(), as_token_ids([*PROMPT[:8], 70]), "w")
    running = cache.open([50] * 5)
    assert running.resize(5)
    stats = cache.manager.stats()
    assert (stats.free, stats.evictable, stats.held, stats.locked) == (3, 1, 2, 2)
    assert stats.cached_blocks == 3
    assert cache.manager.pages_needed(history=4, capacity=9) == [3]
    waiting.close()
    running.close()


def test_a_long_answer_is_reusable(make_cache: Make) -> None:
    cache = make_cache(200)
    answer = [i % 50 for i in range(600)]
    cache.serve(PROMPT, answer)
    assert cache.match([*PROMPT, *answer]) == 611


def test_an_empty_prompt_matches_nothing(make_cache: Make) -> None:
    cache = make_cache()
    cache.serve(PROMPT)
    assert cache.match([]) == 0
    assert cache.match([1]) == 0


def test_tokens_that_differ_from_the_prompt_have_keys_of_their_own(make_cache: Make) -> None:
    """What is committed counts, not what was announced."""
    cache = make_cache()
    sequence = cache.open(PROMPT)
    cache.compute(sequence, [1, 2, 3, 4, 50, 60, 70, 80], [])
    sequence.close()
    assert cache.match(PROMPT) == 4
    committed = as_token_ids([1, 2, 3, 4, 50, 60, 70, 80, 9])
    assert list(cache.sink.prefixes[0]) == cache.manager.block_keys(ReuseScope(), committed)
    assert cache.manager.match(ReuseScope(), committed) == (8, 2, 0)
