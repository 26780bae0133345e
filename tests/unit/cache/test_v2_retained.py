"""Pages behind a window that only wait to be committed (semantics §3.3): held, on any level, read by nobody."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.sequence import KvCache
from kvmesh.hashing import ReuseScope

NO_SCOPE = ReuseScope()
PROMPT = np.arange(16, dtype=np.int32)


def three_chunks(manager: KvCacheManager) -> KvCache:
    """All but the last of four blocks computed: the window of 4 has passed two that cannot be committed yet."""
    cache = manager.create(NO_SCOPE, PROMPT, "r")
    assert cache.resume()
    for end in (4, 8, 12):
        assert cache.resize(end)
        cache.commit(PROMPT[end - 4 : end])
    assert [len(held) for _, held in map(cache.used_pages, (0, 1))] == [0, 2]
    return cache


def push_out(manager: KvCacheManager, capacity: int = 24) -> None:
    """Take the whole device for a moment."""
    other = manager.create(NO_SCOPE, np.full(1, 77, dtype=np.int32), "other", reuse=False)
    assert other.resume()
    assert other.resize(capacity)
    other.close()


def cold_retained(manager: KvCacheManager) -> KvCache:
    """The same, suspended, pushed to the colder level and resumed: the two blocks stay there."""
    cache = three_chunks(manager)
    cache.suspend()
    push_out(manager)
    assert cache.resume()
    _, held = cache.used_pages(1)
    assert manager.store.group_tables[1].level[held].tolist() == [1, 1]
    return cache


def test_they_are_not_in_the_block_table(make_manager) -> None:
    """A slot of a colder level is no address in the device pool."""
    manager = make_manager(6, windows=(None, 4), host=8, policy="per_request")
    cache = cold_retained(manager)
    assert (cache.page_ids(0) >= 0).all()
    assert (cache.page_ids(1) >= 0).tolist() == [False, False, True]
    cache.close()


def test_a_lease_does_not_need_them(make_manager) -> None:
    manager = make_manager(6, windows=(None, 4), host=8, policy="per_request")
    cache = cold_retained(manager)
    lease = cache.hold(12)
    assert (lease.page_ids(1) >= 0).tolist() == [False, False, True]
    lease.release()
    cache.close()


def test_they_are_committed_where_they_are(make_manager, sink) -> None:
    manager = make_manager(6, windows=(None, 4), host=8, policy="per_request")
    cache = cold_retained(manager)
    assert cache.resize(16)
    cache.commit(PROMPT[12:])
    keys = manager.block_keys(NO_SCOPE, PROMPT)
    assert [sink.levels[1, key] for key in keys] == [1, 1, 0, 0]
    assert [sink.levels[0, key] for key in keys] == [0, 0, 0, 0]
    cache.close()


def test_two_sequences_with_the_same_ones(make_manager, sink) -> None:
    """The one that commits later keeps the warmer pages, whosever they are."""
    manager = make_manager(8, windows=(None, 4), host=16, policy="per_request")
    first = three_chunks(manager)
    first.suspend()
    push_out(manager, 32)
    assert first.resume()
    second = three_chunks(manager)
    keys = manager.block_keys(NO_SCOPE, PROMPT)
    for cache in (first, second):
        assert cache.resize(16)
        cache.commit(PROMPT[12:])
        manager.check_integrity()
    assert [sink.levels[1, key] for key in keys] == [0, 0, 0, 0]
    first.close()
    second.close()


def test_one_that_is_damaged_is_not_committed(make_manager, sink) -> None:
    manager = make_manager(6, windows=(None, 4), host=8, policy="per_request")
    cache = cold_retained(manager)
    manager.store.placement.lose(0, cache.used_pages(1)[1][:1])
    manager.check_integrity()
    assert cache.resize(16)
    cache.commit(PROMPT[12:])
    manager.check_integrity()
    keys = manager.block_keys(NO_SCOPE, PROMPT)
    assert [(1, key) in sink.levels for key in keys] == [False, True, True, True]
    assert manager.match(NO_SCOPE, PROMPT).num_tokens == 15, "no later window needs it"
    cache.close()


def test_a_peer_that_may_write_into_them_stops_the_commit(make_manager) -> None:
    """decisions 3: a quarantined page does not become reusable, whether the window has passed it or not."""
    manager = make_manager(6, windows=(None, 4), policy="per_request")
    cache = manager.create(NO_SCOPE, PROMPT, "r")
    assert cache.resume()
    assert cache.resize(4)
    cache.commit(PROMPT[:4])
    lease = cache.hold(4)
    lease.quarantine()
    assert cache.resize(16, 12)
    with pytest.raises(CacheStateError, match="quarantined"):
        cache.commit(PROMPT[4:])
    manager.check_integrity()
    cache.close()
    lease.release()


def test_none_counts_twice_as_room(make_manager) -> None:
    """It may move to a colder level or be given up: one slot either way. A refusal for want of more changes nothing."""
    manager = make_manager(4, windows=(None, 4), host=8, policy="per_request")
    cache = three_chunks(manager)
    other = manager.create(NO_SCOPE, np.full(1, 77, dtype=np.int32), "other", reuse=False)
    assert other.resume()
    assert other.resize(4)
    assert manager.available_pages() == [2]
    before = manager.stats()
    assert not cache.resize(20, 12)
    assert manager.stats() == before
    assert cache.resize(16, 12)
    cache.close()
    other.close()
