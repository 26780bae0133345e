"""Leases whose pages nobody reads yet: they may fall to colder tiers, and are read from where they are then."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.cache.errors import CacheStateError
from kvmesh.cache.lease import PageLease
from kvmesh.cache.manager import KvCacheManager
from kvmesh.hashing import ReuseScope

NO_SCOPE = ReuseScope()


def prompt(number: int, length: int = 8) -> np.ndarray:
    return np.full(length, number, dtype=np.int32)


def finished(manager: KvCacheManager, tokens: np.ndarray) -> PageLease:
    """A computed prompt whose sequence has gone: only the lease (and the tree) have its pages."""
    cache = manager.create(NO_SCOPE, tokens, "context")
    assert cache.resume()
    assert cache.resize(len(tokens))
    for group in range(len(manager.layout.groups)):
        pool = manager.layout.groups[group].pool
        pages = manager.pools[pool].array.reshape(-1, manager.layout.pools[pool].page_bytes)
        pages[cache.page_ids(group)[cache.page_ids(group) >= 0]] = int(tokens[0])
    cache.commit(tokens[cache.committed :])
    lease = cache.hold(len(tokens))
    cache.close()
    return lease


def crowd(manager: KvCacheManager, number: int, length: int = 8) -> bool:
    """Another prompt wants pages of the device; whether it got them."""
    cache = manager.create(NO_SCOPE, prompt(number, length), "other")
    fits = cache.resume() and cache.resize(length)
    if fits:
        cache.commit(prompt(number, length)[cache.committed :])
    cache.close()
    manager.check_integrity()
    return fits


def content(manager: KvCacheManager, lease: PageLease, group: int = 0) -> list[int]:
    """The first byte of every page where the lease says that it is."""
    pool = manager.layout.groups[group].pool
    tiers = [
        one.array.reshape(-1, manager.layout.pools[pool].page_bytes)
        for one in (manager.pools[pool], manager.host_pools[pool])
    ]
    return [int(tiers[level][slot, 0]) for slot, level in zip(lease.page_ids(group), lease.levels(group), strict=True)]


def test_pages_that_nobody_reads_make_room_and_are_read_from_the_host_tier(make_manager) -> None:
    manager = make_manager(2, host=4)
    lease = finished(manager, prompt(7))
    assert not crowd(manager, 1), "pinned"
    assert lease.let_move()
    assert lease.let_move(), "twice is the same as once"
    manager.check_integrity()
    assert crowd(manager, 1)
    assert lease.levels(0).tolist() == [1, 1]
    assert lease.keep_place()
    manager.check_integrity()
    assert content(manager, lease) == [7, 7]
    assert manager.store.tables[0].counts(1).pinned == 2
    assert crowd(manager, 2, 8)
    assert lease.levels(0).tolist() == [1, 1], "they stay while they are read"
    lease.release()
    manager.check_integrity()
    assert manager.store.tables[0].counts(1).pinned == 0


def test_pages_that_did_not_move_are_where_they_were(make_manager) -> None:
    manager = make_manager(4, host=4)
    lease = finished(manager, prompt(7))
    before = lease.page_ids(0).tolist()
    lease.let_move()
    assert lease.keep_place()
    assert lease.keep_place()
    assert (lease.page_ids(0).tolist(), lease.levels(0).tolist()) == (before, [0, 0])
    lease.release()
    manager.check_integrity()


def test_a_prompt_that_is_being_read_from_the_host_tier_waits_to_come_up(make_manager) -> None:
    """Its host slots would be given to others while a peer reads them."""
    manager = make_manager(2, host=4)
    lease = finished(manager, prompt(7))
    lease.let_move()
    assert crowd(manager, 1)
    assert lease.keep_place()
    again = manager.create(NO_SCOPE, prompt(7, 9), "again")
    assert again.num_cached_tokens == 8
    assert not again.resume()
    lease.release()
    assert again.resume()
    again.close()
    manager.check_integrity()


def test_pages_of_a_disk_come_up_before_they_are_read(make_manager) -> None:
    manager = make_manager(2, host=2, disk=4)
    lease = finished(manager, prompt(7))
    lease.let_move()
    assert crowd(manager, 1)
    assert crowd(manager, 2)
    assert lease.levels(0).max() == 2
    assert lease.keep_place()
    manager.check_integrity()
    assert lease.levels(0).max() <= 1
    assert content(manager, lease) == [7, 7]
    lease.release()
    manager.check_integrity()


def test_without_room_to_come_up_the_pages_go_on_waiting(make_manager) -> None:
    manager = make_manager(2, host=2, disk=8)
    waiting = finished(manager, prompt(7))
    waiting.let_move()
    assert crowd(manager, 1)
    other = finished(manager, prompt(8))
    other.let_move()
    assert crowd(manager, 2)
    assert (waiting.levels(0).tolist(), other.levels(0).tolist()) == ([2, 2], [1, 1])
    assert other.keep_place(), "fills the host tier"
    running = manager.create(NO_SCOPE, prompt(3), "running")
    assert running.resume()
    assert running.resize(8), "fills the device"
    assert not waiting.keep_place()
    assert waiting.movable
    manager.check_integrity()
    other.release()
    assert waiting.keep_place()
    assert content(manager, waiting) == [7, 7]
    waiting.release()
    running.close()
    manager.check_integrity()


def test_a_prompt_that_the_host_tier_cannot_hold_comes_up_to_the_device_in_part(make_manager) -> None:
    manager = make_manager(4, host=2, disk=8)
    lease = finished(manager, prompt(7, 16))
    lease.let_move()
    assert crowd(manager, 1)
    assert crowd(manager, 2)
    assert sorted(lease.levels(0).tolist()) == [1, 1, 2, 2]
    assert lease.keep_place()
    manager.check_integrity()
    assert lease.levels(0).max() <= 1
    assert content(manager, lease) == [7, 7, 7, 7]
    lease.release()
    manager.check_integrity()


def test_pages_come_up_one_by_one_where_others_go_down_in_their_place(make_manager) -> None:
    """All tiers are full of prompts that wait: only what comes up makes room for what leaves the device."""
    manager = make_manager(2, host=0, disk=3)
    first = finished(manager, prompt(7))
    first.let_move()
    second = finished(manager, prompt(8))
    second.let_move()
    assert (first.levels(0).tolist(), second.levels(0).tolist()) == ([1, 1], [0, 0])
    for lease, other in ((first, second), (second, first), (first, second)):
        assert lease.keep_place()
        manager.check_integrity()
        assert (lease.levels(0).tolist(), other.levels(0).tolist()) == ([0, 0], [1, 1])
        pages = manager.pools[0].array.reshape(-1, manager.layout.pools[0].page_bytes)
        assert set(pages[lease.page_ids(0), 0].tolist()) == {7 if lease is first else 8}
        lease.let_move()
    first.release()
    second.release()
    manager.check_integrity()


def test_lost_pages_are_told(make_manager) -> None:
    manager = make_manager(2, host=2, disk=4)
    lease = finished(manager, prompt(7))
    lease.let_move()
    assert crowd(manager, 1)
    assert crowd(manager, 2)
    assert lease.levels(0).tolist() == [2, 2]
    manager.storage._sums[1][0][:] ^= np.uint64(1)
    assert not lease.keep_place()
    assert lease.lost
    assert not lease.keep_place()
    lease.release()
    manager.check_integrity()


def test_a_lease_that_may_move_is_released_as_any_other(make_manager) -> None:
    manager = make_manager(2, host=2)
    lease = finished(manager, prompt(7))
    lease.let_move()
    lease.release()
    manager.check_integrity()
    with pytest.raises(CacheStateError):
        lease.let_move()
    with pytest.raises(CacheStateError):
        lease.keep_place()


def test_destinations_of_a_peer_never_move(make_manager) -> None:
    manager = make_manager(2, host=2)
    cache = manager.create(NO_SCOPE, prompt(7), "generation")
    assert cache.resume()
    assert cache.resize(8)
    lease = cache.hold(8)
    lease.quarantine()
    with pytest.raises(CacheStateError, match="may write into"):
        lease.let_move()
    lease.release()
    cache.close()
    manager.check_integrity()
