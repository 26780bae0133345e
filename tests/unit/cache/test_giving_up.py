"""§3.3, §3.6, §3.7: what a sequence lets go of before it is refused pages, and when its step is not computed."""

from __future__ import annotations

import numpy as np

from kvmesh.cache.manager import KvCacheManager
from kvmesh.hashing import ReuseScope


def test_blocks_that_only_wait_to_be_committed_are_no_reason_to_refuse(make_manager) -> None:
    """Under ``per_request`` nothing is committed before the prompt is done: its old blocks fill the pool.

    The prompt has 16 blocks; the pool, which both groups share, has room for them and the 4 of a window.
    """
    manager: KvCacheManager = make_manager(10, windows=(None, 8), policy="per_request")
    tokens = np.arange(64, dtype=np.int32)
    cache = manager.create(ReuseScope(), tokens, "r")
    assert cache.resume()
    for end in range(4, 65, 4):
        assert cache.resize(end, end - 4), end
        cache.commit(tokens[end - 4 : end])
        manager.check_integrity()
    cache.close()
    # What was still there becomes reusable: the end of the prompt.
    assert manager.match(ReuseScope(), np.arange(70, dtype=np.int32)).num_tokens == 64


def test_with_room_they_are_kept_and_become_reusable(make_manager) -> None:
    manager: KvCacheManager = make_manager(32, windows=(8, 9), policy="per_request")
    tokens = np.arange(64, dtype=np.int32)
    cache = manager.create(ReuseScope(), tokens, "r")
    assert cache.resume()
    for end in range(4, 65, 4):
        assert cache.resize(end, end - 4), end
        cache.commit(tokens[end - 4 : end])
    cache.close()
    assert [manager.match(ReuseScope(), tokens[:end]).num_tokens for end in (17, 33)] == [16, 32]


def test_a_refusal_lets_go_of_nothing(make_manager) -> None:
    manager: KvCacheManager = make_manager(6, windows=(8, 9), policy="per_request")
    tokens = np.arange(64, dtype=np.int32)
    cache = manager.create(ReuseScope(), tokens, "r")
    assert cache.resume()
    assert cache.resize(16, 0)
    cache.commit(tokens[:16])
    assert cache.resize(20, 16)
    before = manager.stats()
    assert before.held > 0
    assert not cache.resize(64, 20)
    assert manager.stats() == before
    cache.close()


def test_a_step_in_scratch_slots_that_is_not_computed_is_taken_back(make_manager) -> None:
    """Suspended before it was computed, the sequence comes back without holes and computes the step again."""
    manager: KvCacheManager = make_manager(32, windows=(None, 8), host=32, enable_swa_scratch_reuse=True)
    tokens = np.arange(48, dtype=np.int32)
    cache = manager.create(ReuseScope(), tokens, "r")
    assert cache.resume()
    assert cache.resize(8, 0)
    cache.commit(tokens[:8])
    assert cache.resize(40, 8)
    assert cache.scratch(1) is not None
    cache.suspend()
    manager.check_integrity()
    assert (cache.capacity, cache.history, cache.num_blocks) == (8, 8, 2)
    assert cache.resume()
    # A smaller step than the one that was given up: its blocks must have pages of their own where they are needed.
    assert cache.resize(16, 8)
    assert (cache.page_ids(0) >= 0).all()
    assert (cache.page_ids(1)[2:] >= 0).all()
    cache.commit(tokens[8:16])
    cache.close()
