"""The life of a sequence in the V2 cache, step by step.

Covers semantics §3.2 (accounting), §3.4 (insertion), §3.5 (states, invariants, rebase, virtual stop, the copy of a
partial block) and §2.2 (the writer of a private copy never changes its source).
"""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.manager import KvCacheManager
from kvmesh.cache.sequence import KvCache, SequenceState
from kvmesh.hashing import ReuseScope, as_token_ids

NO_SCOPE = ReuseScope()
WINDOWS = [(None,), (None, 8), (8, 5)]


def ids(*tokens: int) -> np.ndarray:
    return as_token_ids(list(tokens))


def started(manager: KvCacheManager, tokens: np.ndarray) -> KvCache:
    cache = manager.create(NO_SCOPE, tokens, "r")
    assert cache.resume()
    assert cache.resize(len(tokens))
    return cache


def run(manager: KvCacheManager, tokens: np.ndarray) -> None:
    cache = started(manager, tokens)
    cache.commit(tokens[cache.committed :])
    cache.close()
    manager.check_integrity()


@pytest.mark.parametrize("windows", WINDOWS)
def test_states(make_manager, windows: tuple[int | None, ...]) -> None:
    """§3.5: suspended, active, suspended, active, closed; what a state does not allow is an error."""
    manager = make_manager(windows=windows)
    cache = manager.create(NO_SCOPE, ids(1, 2, 3, 4, 5), "r")
    assert cache.state is SequenceState.SUSPENDED
    for call in (cache.suspend, lambda: cache.resize(5), lambda: cache.commit(ids(1))):
        with pytest.raises(CacheStateError, match="suspended"):
            call()
    assert cache.resume()
    assert cache.state is SequenceState.ACTIVE
    with pytest.raises(CacheStateError, match="active"):
        cache.resume()
    assert cache.resize(5)
    cache.suspend()
    assert cache.resume()
    cache.close()
    cache.close()
    for call in (cache.suspend, cache.resume, lambda: cache.resize(5), lambda: cache.commit(ids(1)),
                 cache.stop_committing):  # fmt: skip
        with pytest.raises(CacheStateError, match="closed"):
            call()


@pytest.mark.parametrize("windows", WINDOWS)
def test_committed_history_capacity(make_manager, windows: tuple[int | None, ...]) -> None:
    """§3.5: committed <= history <= capacity, num_blocks = ceil(capacity / T); a commit raises the history."""
    manager = make_manager(windows=windows)
    cache = manager.create(NO_SCOPE, np.arange(10, dtype=np.int32), "r")
    assert cache.resume()
    seen = [(cache.committed, cache.history, cache.capacity, cache.num_blocks)]
    for capacity, history, count in ((6, 0, 3), (6, 6, 0), (10, 6, 7), (13, 10, 0), (10, 10, 0)):
        assert cache.resize(capacity, history)
        cache.commit(np.arange(cache.committed, cache.committed + count, dtype=np.int32))
        seen.append((cache.committed, cache.history, cache.capacity, cache.num_blocks))
    assert seen == [(0, 0, 0, 0), (3, 3, 6, 2), (3, 6, 6, 2), (10, 10, 10, 3), (10, 10, 13, 4), (10, 10, 10, 3)]
    cache.close()


def test_close_lets_the_last_block_go_first(make_manager, sink) -> None:
    """§3.5: close drops the last block first, so that a prefix outlives what continues it."""
    manager = make_manager(4)
    run(manager, np.arange(16, dtype=np.int32))
    sink.log.clear()
    for number in range(3):
        run(manager, ids(90 + number))
    assert [keys for name, keys in sink.log if name == "removed"] == [
        [[12, 13, 14, 15]],
        [[8, 9, 10, 11]],
        [[4, 5, 6, 7]],
    ]


def test_a_commit_after_a_cut_chain_is_accepted_and_not_stored(make_manager, sink) -> None:
    """§3.5 VIRTUAL_STOP: the block before went from the tree; later commits count and store nothing."""
    manager = make_manager()
    tokens = np.arange(12, dtype=np.int32)
    cache = started(manager, tokens)
    cache.commit(tokens[:4])
    manager.store.clear()
    assert not sink.parents
    cache.commit(tokens[4:8])
    cache.commit(tokens[8:])
    assert cache.committed == 12
    assert not sink.parents
    manager.check_integrity()
    cache.close()
    assert manager.stats().free == manager.stats().total


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_the_same_block_is_shared_a_partial_one_never(make_manager, windows: tuple[int | None, ...]) -> None:
    """§3.5: rebase of full blocks in every layer group; two equal partial blocks stay two pages."""
    manager = make_manager(windows=windows)
    tokens = ids(1, 2, 3, 4, 5, 6)
    first, second = started(manager, tokens), started(manager, tokens)
    first.commit(tokens)
    second.commit(tokens)
    for group in range(len(manager.layout.groups)):
        assert first.page_ids(group)[0] == second.page_ids(group)[0]
        assert first.page_ids(group)[1] != second.page_ids(group)[1]
    first.stop_committing()
    tails = [second.page_ids(group)[1] for group in range(len(manager.layout.groups))]
    second.stop_committing()
    assert tails == [second.page_ids(group)[1] for group in range(len(manager.layout.groups))]
    manager.check_integrity()
    first.close()
    second.close()
    assert manager.stats().evictable == 2 * len(manager.layout.groups)


@pytest.mark.parametrize(("windows", "copies"), [((None,), 1), ((None, 8), 2), ((None, 8, 5), 3)])
def test_the_first_resume_copies_once_for_each_group(make_manager, windows, copies: int) -> None:
    """§3.5: one extra slot for each life cycle; the source is unlocked, and a later resume copies nothing."""
    manager = make_manager(8, windows=windows, host=8)
    run(manager, ids(1, 2, 3, 4, 5, 6))
    cache = manager.create(NO_SCOPE, ids(1, 2, 3, 4, 5, 6, 7), "r")
    before = manager.stats()
    assert cache.resume()
    after = manager.stats()
    assert before.free - after.free == after.counters.copied_pages == copies
    assert (after.locked, after.evictable) == (2 * copies, copies), "the source is nobody's any more"
    cache.suspend()
    assert cache.resume()
    assert manager.stats().counters.copied_pages == copies
    cache.close()


def test_without_a_resume_nothing_is_copied(make_manager) -> None:
    """§3.5: created and closed: the tree is as before."""
    manager = make_manager()
    run(manager, ids(1, 2, 3, 4, 5, 6))
    before = manager.stats()
    cache = manager.create(NO_SCOPE, ids(1, 2, 3, 4, 5, 6, 7), "r")
    cache.close()
    after = manager.stats()
    assert before.pools == after.pools
    assert manager.match(NO_SCOPE, ids(1, 2, 3, 4, 5, 6, 7)).num_tokens == 6


def test_an_empty_commit_changes_nothing(make_manager) -> None:
    """§3.5: an empty commit is a no-op, also after a stop; a commit after a stop is an error."""
    manager = make_manager()
    cache = started(manager, ids(1, 2, 3))
    before = manager.stats()
    cache.commit(ids())
    assert manager.stats() == before
    cache.stop_committing()
    cache.commit(ids())
    with pytest.raises(CacheStateError, match="after stop"):
        cache.commit(ids(1))
    cache.close()


def test_many_siblings_are_neither_scanned_nor_merged(make_manager) -> None:
    """§3.4: with 32 children and more a partial block is stored although another one covers it."""
    manager = make_manager(64)
    for number in range(32):
        run(manager, ids(number, 0, 0, 0))
    blocks = manager.stats().cached_blocks
    run(manager, ids(5, 0))
    assert manager.stats().cached_blocks == blocks + 1
    assert manager.match(NO_SCOPE, ids(5, 0, 1)).num_tokens == 0
    assert manager.match(NO_SCOPE, ids(5, 0, 0, 0, 1)).num_tokens == 4


def test_a_scope_is_a_tree_of_its_own(make_manager) -> None:
    """§3.4: one root for each (LoRA id, salt); the same tokens under another root are other blocks."""
    manager = make_manager(32)
    scopes = [
        ReuseScope(),
        ReuseScope(salt=0),
        ReuseScope(lora_id=0),
        ReuseScope(salt=7),
        ReuseScope(lora_id=7),
        ReuseScope(lora_id=7, salt=7),
    ]
    tokens = ids(1, 2, 3, 4, 5)
    for done, scope in enumerate(scopes):
        assert [manager.match(other, tokens).num_tokens for other in scopes] == [4] * done + [0] * (6 - done)
        cache = manager.create(scope, tokens, "r")
        assert cache.resume()
        assert cache.resize(5)
        cache.commit(tokens)
        cache.close()
    assert manager.stats().cached_blocks == 12
