"""The V2 manager as an engine uses it: reuse, suspension, pressure, leases (semantics §2, §3.4-3.6, §1.3)."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.cache.errors import CacheBusyError, CacheStateError
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.sequence import KvCache, SequenceState
from kvmesh.hashing import ReuseScope, as_token_ids, salt_id
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention

NO_SCOPE = ReuseScope()


def ids(*tokens: int) -> np.ndarray:
    return as_token_ids(list(tokens))


def everywhere(priority: int) -> RetentionConfig:
    whole = TokenRangeRetention(token_start=0, priority=priority)
    return RetentionConfig(token_range_retention_configs=(whole,), decode_retention_priority=priority)


def start(
    manager: KvCacheManager, tokens: np.ndarray, scope: ReuseScope = NO_SCOPE, priority: int | None = None
) -> KvCache:
    """Create, resume and give it pages for the whole prompt."""
    retention = None if priority is None else everywhere(priority)
    cache = manager.create(scope, tokens, "r", retention=retention)
    assert cache.resume()
    assert cache.resize(len(tokens))
    return cache


def prefill(
    manager: KvCacheManager, tokens: np.ndarray, scope: ReuseScope = NO_SCOPE, priority: int | None = None
) -> KvCache:
    """Compute a whole prompt and leave the sequence open."""
    cache = start(manager, tokens, scope, priority)
    cache.commit(tokens[cache.committed :])
    return cache


def run(manager: KvCacheManager, tokens: np.ndarray, scope: ReuseScope = NO_SCOPE, priority: int | None = None) -> int:
    """Compute a whole prompt and close; returns the number of cached tokens."""
    cache = prefill(manager, tokens, scope, priority)
    cached = cache.num_cached_tokens
    cache.close()
    manager.check_integrity()
    return cached


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 96, 100])
def test_same_prompt_twice_reuses_all_but_the_last_token(make_manager, length: int) -> None:
    manager = make_manager(32, tokens_per_block=32)
    tokens = np.arange(length, dtype=np.int32)
    assert run(manager, tokens) == 0
    assert run(manager, tokens) == length - 1


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 100])
def test_without_partial_reuse_only_whole_blocks_are_reused(make_manager, length: int) -> None:
    manager = make_manager(32, tokens_per_block=32, enable_partial_reuse=False)
    tokens = np.arange(length, dtype=np.int32)
    assert run(manager, tokens) == 0
    assert run(manager, tokens) == 32 * ((length - 1) // 32)


@pytest.mark.parametrize(("reuse", "cached"), [(True, 64), (False, 0)])
def test_block_reuse_switch(make_manager, sink, reuse: bool, cached: int) -> None:
    # §2 enable_block_reuse, CHECK.
    manager = make_manager(16, tokens_per_block=32, enable_block_reuse=reuse)
    tokens = np.arange(65, dtype=np.int32)
    run(manager, tokens)
    assert manager.match(NO_SCOPE, tokens).num_tokens == cached
    assert run(manager, tokens) == cached
    assert bool(sink.log) == reuse


@pytest.mark.parametrize(("partial", "cached"), [(True, 5), (False, 0)])
def test_partial_match_of_a_block(make_manager, partial: bool, cached: int) -> None:
    # §2 enable_partial_reuse, CHECK: block [1..8], prompt [1,2,3,4,5,9,...].
    manager = make_manager(tokens_per_block=8, enable_partial_reuse=partial)
    run(manager, ids(1, 2, 3, 4, 5, 6, 7, 8))
    assert run(manager, ids(1, 2, 3, 4, 5, 9, 10, 11, 12)) == cached


def test_partial_match_is_skipped_among_many_children(make_manager) -> None:
    # §2 enable_partial_reuse: a node with >= 32 children is not scanned.
    manager = make_manager(128, tokens_per_block=4)
    for i in range(31):
        run(manager, ids(1, 2, 3, 4, 100 + i, 0, 0, 0))
    assert manager.match(NO_SCOPE, ids(1, 2, 3, 4, 100, 0, 7)).num_tokens == 6
    run(manager, ids(1, 2, 3, 4, 200, 0, 0, 0))
    assert manager.match(NO_SCOPE, ids(1, 2, 3, 4, 100, 0, 7)).num_tokens == 4
    assert manager.match(NO_SCOPE, ids(1, 2, 3, 4, 100, 0, 0, 0, 7)).num_tokens == 8


def test_longest_partial_match_wins(make_manager) -> None:
    manager = make_manager(tokens_per_block=8)
    for tail in ((1, 2), (1, 2, 3), (1, 9)):
        run(manager, ids(*range(100, 108), *tail))
    assert manager.match(NO_SCOPE, ids(*range(100, 108), 1, 2, 3, 4)).num_tokens == 11


def test_scopes_do_not_share(make_manager) -> None:
    manager = make_manager()
    tokens = ids(1, 2, 3, 4, 5, 6, 7, 8, 9)
    salted = ReuseScope(salt=salt_id("tenant-a"))
    for scope in (NO_SCOPE, salted, ReuseScope(lora_id=1), ReuseScope(lora_id=2)):
        assert run(manager, tokens, scope) == 0
        assert run(manager, tokens, scope) == 8


def test_full_blocks_are_shared_and_a_partial_one_is_copied(make_manager) -> None:
    manager = make_manager()
    first = prefill(manager, ids(1, 2, 3, 4, 5, 6))
    memory = manager.pools[0].array.reshape(-1, manager.layout.pools[0].page_bytes)
    pages = first.page_ids(0)
    memory[pages[0]] = 11
    memory[pages[1]] = 22
    first.close()
    second = manager.create(NO_SCOPE, ids(1, 2, 3, 4, 5, 6, 7), "r")
    assert second.num_cached_tokens == second.history == second.capacity == 6
    assert second.num_blocks == 1
    assert second.resume()
    shared, private = second.page_ids(0).tolist()
    assert shared == pages[0]
    assert private != pages[1]
    assert (memory[private] == 22).all()
    memory[private] = 33
    assert (memory[pages[1]] == 22).all(), "the writer of the copy never changes the source"
    second.close()


def test_policy_all_reusable_offers_each_chunk(make_manager) -> None:
    # §1.3 CHECK A.
    manager = make_manager()
    tokens = np.arange(12, dtype=np.int32)
    cache = start(manager, tokens)
    cache.commit(tokens[:5])
    assert manager.match(NO_SCOPE, tokens).num_tokens == 4
    cache.commit(tokens[5:8])
    assert manager.match(NO_SCOPE, tokens).num_tokens == 8
    cache.close()


def test_policy_per_request_offers_after_the_final_chunk(make_manager) -> None:
    # §1.3 CHECK A.
    manager = make_manager(policy="per_request")
    tokens = np.arange(12, dtype=np.int32)
    cache = start(manager, tokens)
    for begin in (0, 4, 8):
        assert manager.match(NO_SCOPE, tokens).num_tokens == 0
        cache.commit(tokens[begin : begin + 4])
    assert manager.match(NO_SCOPE, tokens).num_tokens == 11
    assert cache.resize(13)
    cache.commit(ids(99))
    cache.close()
    assert manager.match(NO_SCOPE, ids(*tokens.tolist(), 99, 5)).num_tokens == 13


def test_policy_per_request_keeps_nothing_of_an_aborted_prompt(make_manager, sink) -> None:
    manager = make_manager(policy="per_request")
    tokens = np.arange(12, dtype=np.int32)
    cache = start(manager, tokens)
    cache.commit(tokens[:8])
    cache.close()
    assert manager.stats().free == manager.stats().total
    assert not sink.log


def test_generated_tokens_are_reusable(make_manager) -> None:
    manager = make_manager()
    cache = prefill(manager, ids(1, 2, 3))
    for token in range(4, 12):
        assert cache.resize(cache.capacity + 1)
        cache.commit(ids(token))
    cache.close()
    assert manager.match(NO_SCOPE, ids(*range(1, 12), 50)).num_tokens == 11


def test_concurrent_identical_prompts_share_pages_once_committed(make_manager) -> None:
    manager = make_manager()
    tokens = ids(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    first, second = start(manager, tokens), start(manager, tokens)
    assert manager.stats().locked == 6
    first.commit(tokens)
    second.commit(tokens[:6])
    assert second.page_ids(0)[0] == first.page_ids(0)[0]
    assert second.page_ids(0)[1] != first.page_ids(0)[1]
    second.commit(tokens[6:])
    assert (second.page_ids(0)[:2] == first.page_ids(0)[:2]).all()
    assert second.page_ids(0)[2] != first.page_ids(0)[2], "a partial block is never rebased"
    assert manager.stats().locked == 4
    assert manager.stats().counters.rebased_pages == 2
    first.close()
    second.close()
    assert manager.stats().evictable == 3


def test_a_longer_block_replaces_a_partial_one(make_manager, sink) -> None:
    # §3.4 insert: replaced, with a removed event for the partial key.
    manager = make_manager()
    run(manager, ids(1, 2, 3, 4, 5, 6))
    run(manager, ids(1, 2, 3, 4, 5, 6, 7))
    run(manager, ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    assert sink.log == [
        ("stored", [[1, 2, 3, 4]]),
        ("stored", [[5, 6]]),
        ("removed", [[5, 6]]),
        ("stored", [[5, 6, 7]]),
        ("removed", [[5, 6, 7]]),
        ("stored", [[5, 6, 7, 8]]),
        ("stored", [[9]]),
    ]
    assert manager.stats().evictable == 3


def test_a_partial_block_that_is_covered_is_not_stored(make_manager, sink) -> None:
    # §3.4 insert: useless.
    manager = make_manager()
    run(manager, ids(1, 2, 3, 4, 5, 6, 7, 8))
    before = list(sink.log)
    run(manager, ids(1, 2, 3, 4, 5, 6))
    assert sink.log == before
    assert manager.stats().evictable == 2


def test_stop_committing(make_manager) -> None:
    manager = make_manager()
    tokens = ids(1, 2, 3, 4, 5, 6)
    cache = prefill(manager, tokens)
    assert manager.match(NO_SCOPE, ids(1, 2, 3, 4, 5, 6, 7)).num_tokens == 4
    cache.stop_committing()
    cache.stop_committing()
    assert manager.match(NO_SCOPE, ids(1, 2, 3, 4, 5, 6, 7)).num_tokens == 6
    cache.commit(ids())
    with pytest.raises(CacheStateError, match="after stop"):
        cache.commit(ids(7))
    cache.close()


def test_eviction_takes_leaves_first_and_oldest_first(make_manager, sink) -> None:
    manager = make_manager(4, tokens_per_block=4)
    run(manager, ids(1, 2, 3, 4, 5, 6, 7, 8))
    run(manager, ids(11, 12, 13, 14, 15, 16, 17, 18))
    sink.log.clear()
    run(manager, ids(21, 22, 23))
    assert sink.log[0] == ("removed", [[5, 6, 7, 8]])
    run(manager, ids(31, 32, 33))
    assert ("removed", [[1, 2, 3, 4]]) in sink.log
    assert manager.match(NO_SCOPE, ids(*range(11, 19), 0)).num_tokens == 8


def test_eviction_prefers_low_priority(make_manager) -> None:
    # §3.1 CHECK (the rule is the same in V2): A(priority 20), B(35, old), C(35, new) go in this order.
    manager = make_manager(3)
    run(manager, ids(1, 1, 1, 1), priority=35)
    run(manager, ids(2, 2, 2, 2), priority=35)
    run(manager, ids(3, 3, 3, 3), priority=20)
    survivors = []
    for i in range(3):
        run(manager, ids(9, i, i, i), priority=100)
        survivors.append([manager.match(NO_SCOPE, ids(t, t, t, t, 0)).num_tokens for t in (3, 1, 2)])
    assert survivors == [[0, 4, 4], [0, 0, 4], [0, 0, 0]]


def test_evicting_a_block_takes_what_continues_it(make_manager, sink) -> None:
    # §3.4 CHECK: [1..8] cached, tokens_per_block 4; block 0's page goes -> both blocks are removed, leaf first.
    manager = make_manager(4)
    run(manager, ids(1, 2, 3, 4), priority=10)
    run(manager, ids(1, 2, 3, 4, 5, 6, 7, 8), priority=90)
    run(manager, ids(11, 12, 13, 14, 15, 16, 17, 18), priority=90)
    sink.log.clear()
    cache = start(manager, ids(21))
    assert sink.log == [("removed", [[5, 6, 7, 8], [1, 2, 3, 4]])]
    cache.close()


def test_reuse_makes_a_prefix_young_again(make_manager) -> None:
    manager = make_manager(4)
    run(manager, ids(1, 1, 1, 1))
    run(manager, ids(2, 2, 2, 2))
    run(manager, ids(1, 1, 1, 1, 1))
    for i in range(2):
        run(manager, ids(50 + i, 0, 0, 0))
    assert manager.match(NO_SCOPE, ids(1, 1, 1, 1, 0)).num_tokens == 4
    assert manager.match(NO_SCOPE, ids(2, 2, 2, 2, 0)).num_tokens == 0


def test_resize_without_pages_changes_nothing(make_manager) -> None:
    manager = make_manager(4)
    first = prefill(manager, ids(*range(8)))
    second = start(manager, ids(50, 51))
    before = manager.stats()
    assert not second.resize(9)
    assert second.capacity == 2
    assert manager.stats() == before
    assert second.resize(8)
    assert second.resize(1, 1)
    assert second.num_blocks == 1
    first.close()
    second.close()


def test_resize_refuses_to_forget_history(make_manager) -> None:
    manager = make_manager()
    cache = prefill(manager, ids(1, 2, 3, 4, 5))
    for capacity, history in ((4, None), (8, 4), (8, 9)):
        with pytest.raises(ValueError, match="history"):
            cache.resize(capacity, history)
    assert cache.resize(12, 8)
    assert (cache.committed, cache.history, cache.capacity, cache.num_blocks) == (5, 8, 12, 3)
    cache.close()


def test_commit_needs_capacity(make_manager) -> None:
    manager = make_manager()
    cache = start(manager, ids(1, 2, 3))
    with pytest.raises(ValueError, match="capacity of 3"):
        cache.commit(ids(1, 2, 3, 4))
    cache.close()


def test_commit_of_other_tokens_than_the_prompt_stores_what_was_computed(make_manager) -> None:
    manager = make_manager()
    cache = start(manager, ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    cache.commit(ids(1, 2, 3, 4))
    cache.commit(ids(5, 6, 0, 8))
    cache.close()
    assert manager.match(NO_SCOPE, ids(1, 2, 3, 4, 5, 6, 0, 8, 9)).num_tokens == 8
    assert manager.match(NO_SCOPE, ids(1, 2, 3, 4, 5, 6, 7, 8, 9)).num_tokens == 6


def test_suspend_holds_pages(make_manager) -> None:
    manager = make_manager(4)
    cache = prefill(manager, ids(*range(8)))
    cache.suspend()
    assert cache.state is SequenceState.SUSPENDED
    assert (manager.stats().held, manager.stats().locked) == (2, 0)
    other = start(manager, ids(50, 51))
    assert not other.resize(12), "held pages cannot be dropped where there is no colder level"
    with pytest.raises(CacheStateError, match="suspended"):
        cache.commit(ids(1))
    other.close()
    assert cache.resume()
    assert (manager.stats().counters.suspended, manager.stats().counters.resumed) == (1, 0), "§3.10: no step yet"
    cache.suspend()
    assert cache.resume()
    cache.note_step()
    assert manager.stats().counters.resumed == manager.stats().counters.suspended == 1
    cache.suspend()
    assert manager.stats().counters.suspended == 2
    cache.close()
    assert manager.stats().evictable == 2


@pytest.mark.parametrize(("used", "allowed"), [(20, False), (19, True)])
def test_resume_respects_max_util(make_manager, used: int, allowed: bool) -> None:
    # §3.6 CHECK: 20 of 20 used -> 1.0 > .95 -> refused; 19 of 20 = .95 -> allowed.
    manager = make_manager(20, max_util_for_resume=0.95)
    cache = start(manager, np.arange(4 * used, dtype=np.int32))
    other = manager.create(NO_SCOPE, ids(7), "other")
    assert other.resume() is allowed
    cache.close()
    other.close()


def test_resume_without_a_page_for_the_copy_changes_nothing(make_manager) -> None:
    manager = make_manager(2)
    run(manager, ids(1, 2, 3))
    cache = manager.create(NO_SCOPE, ids(1, 2, 3, 4), "r")
    other = start(manager, ids(9))
    before = manager.stats()
    assert not cache.resume()
    assert manager.stats() == before
    other.close()
    assert cache.resume()
    cache.close()


def test_matched_pages_are_safe_until_resume(make_manager) -> None:
    manager = make_manager(3)
    run(manager, ids(1, 2, 3, 4, 5, 6))
    cache = manager.create(NO_SCOPE, ids(1, 2, 3, 4, 5, 6, 7), "r")
    assert manager.stats().held == 2
    other = start(manager, ids(50))
    assert not other.resize(8)
    other.close()
    cache.close()
    assert manager.stats().held == 0


def test_lease_outlives_its_sequence(make_manager) -> None:
    manager = make_manager(4)
    cache = prefill(manager, ids(*range(10)))
    lease = cache.hold(10)
    pages = lease.page_ids(0).tolist()
    assert pages == cache.page_ids(0).tolist()
    cache.close()
    assert manager.stats().pinned == lease.num_pages == 3
    other = start(manager, ids(50))
    assert not other.resize(8)
    other.close()
    with pytest.raises(CacheBusyError, match="lease"):
        manager.close()
    lease.release()
    assert lease.released
    with pytest.raises(CacheStateError, match="released"):
        lease.release()
    with pytest.raises(CacheStateError, match="released"):
        lease.page_ids(0)
    assert manager.stats().evictable == 3


def test_lease_of_a_page_that_is_rebased_keeps_that_page(make_manager) -> None:
    manager = make_manager()
    tokens = ids(1, 2, 3, 4)
    first, second = start(manager, tokens), start(manager, tokens)
    lease = second.hold(4)
    page = lease.page_ids(0)[0]
    first.commit(tokens)
    second.commit(tokens)
    assert second.page_ids(0)[0] == first.page_ids(0)[0] != page
    assert manager.stats().pinned == 1
    first.close()
    second.close()
    manager.check_integrity()
    lease.release()
    assert manager.stats().free == 15


def test_quarantine(make_manager) -> None:
    manager = make_manager()
    run(manager, ids(1, 2, 3, 4))
    cache = start(manager, ids(1, 2, 3, 4, 5, 6, 7, 8, 9))
    lease = cache.hold(9)
    lease.quarantine()
    lease.quarantine()
    with pytest.raises(CacheStateError, match="quarantined"):
        cache.commit(ids(5, 6, 7, 8))
    assert cache.committed == 4
    assert manager.stats().quarantined == 0, "locked pages count as locked"
    cache.close()
    stats = manager.stats()
    assert (stats.quarantined, stats.pinned) == (2, 1)
    manager.check_integrity()
    lease.release()
    assert manager.stats().free == 15


def test_hold_needs_pages(make_manager) -> None:
    manager = make_manager()
    cache = start(manager, ids(1, 2, 3))
    with pytest.raises(ValueError, match="no pages"):
        cache.hold(5)
    cache.close()
    with pytest.raises(CacheStateError, match="closed"):
        cache.hold(1)


def test_receiver_commits_what_it_received(make_manager) -> None:
    """A generation server: matched prefix, pages for the prompt, lease while bytes arrive, then one commit."""
    manager = make_manager()
    tokens = ids(*range(10))
    run(manager, tokens[:4])
    cache = start(manager, tokens)
    lease = cache.hold(10)
    missing = lease.page_ids(0)[cache.num_cached_tokens // 4 :]
    assert len(missing) == 2
    lease.release()
    cache.commit(tokens[cache.committed :])
    cache.close()
    assert manager.match(NO_SCOPE, ids(*range(11))).num_tokens == 10


def test_block_table_into(make_manager) -> None:
    manager = make_manager()
    cache = start(manager, np.arange(9, dtype=np.int32))
    row = np.full(6, -7, dtype=np.int32)
    assert cache.block_table_into(0, row) == 3
    assert row.tolist() == [*cache.page_ids(0).tolist(), -7, -7, -7]
    cache.close()


def test_two_layer_groups_in_two_pools(make_manager) -> None:
    manager = make_manager(8, windows=(None, 16, None))
    assert [group.pool for group in manager.layout.groups] == [0, 1]
    tokens = np.arange(10, dtype=np.int32)
    cache = prefill(manager, tokens)
    assert [len(cache.page_ids(group)) for group in (0, 1)] == [3, 3]
    cache.close()
    assert run(manager, tokens) == 9


def test_two_layer_groups_in_one_pool(make_manager) -> None:
    manager = make_manager(8, windows=(None, 16))
    assert [group.pool for group in manager.layout.groups] == [0, 0]
    tokens = np.arange(10, dtype=np.int32)
    cache = prefill(manager, tokens)
    assert not set(cache.page_ids(0).tolist()) & set(cache.page_ids(1).tolist())
    assert not cache.resize(40)
    assert cache.resize(32)
    cache.close()
    assert run(manager, tokens) == 9
    assert run(manager, np.arange(50, 82, dtype=np.int32)) == 0
    assert manager.match(NO_SCOPE, tokens).num_tokens == 0


def test_clear_and_close(make_manager, sink) -> None:
    manager = make_manager()
    run(manager, np.arange(10, dtype=np.int32))
    cache = start(manager, ids(1))
    with pytest.raises(CacheBusyError, match="open"):
        manager.clear_reusable_blocks()
    cache.close()
    cache.close()
    manager.clear_reusable_blocks()
    assert not sink.parents
    assert manager.stats().free == 16
    manager.close()
    manager.close()


def test_bad_arguments_of_create(make_manager) -> None:
    manager = make_manager()
    with pytest.raises(ValueError, match="at least one token"):
        manager.create(NO_SCOPE, ids(), "r")


def test_keys_can_be_computed_once(make_manager) -> None:
    manager = make_manager()
    tokens = np.arange(10, dtype=np.int32)
    keys = manager.block_keys(NO_SCOPE, tokens)
    run(manager, tokens)
    assert manager.match(NO_SCOPE, tokens, block_keys=keys) == manager.match(NO_SCOPE, tokens) == (9, 2, 0)
    cache = manager.create(NO_SCOPE, tokens, "r", block_keys=keys)
    assert cache.num_cached_tokens == 9
    cache.close()


def test_counters(make_manager) -> None:
    manager = make_manager()
    tokens = np.arange(10, dtype=np.int32)
    run(manager, tokens)
    run(manager, tokens)
    counters = manager.stats().counters
    assert (counters.prompt_tokens, counters.cached_tokens) == (20, 9)
    assert (counters.reused_full_blocks, counters.reused_partial_blocks, counters.missed_blocks) == (2, 1, 3)
    assert (counters.allocated_pages, counters.copied_pages, counters.stored_blocks) == (4, 1, 3)
    assert manager.stats().cached_blocks == 3
