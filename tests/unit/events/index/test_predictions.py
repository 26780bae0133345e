"""Predicted blocks: they count for a time, real ones take their place, and sources without events live of them."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.records import Cleared, Removed, Stored, Tier
from kvmesh.net.clock import ManualClock

BLOCK = 2
A, B = Source("a"), Source("b")


class Index:
    """An index of two sources whose clock is moved by hand."""

    def __init__(self, max_memory_bytes: int = 1 << 30) -> None:
        self.clock = ManualClock()
        self.index = PrefixIndex(max_memory_bytes, clock=self.clock)
        for source in (A, B):
            self.index.add(source, model="m")

    def predict(self, *blocks: int, source: Source = A, ttl_s: float = 10.0, salt: str | None = None) -> None:
        self.index.predict(source, tokens_of(*blocks), model="m", block_size=BLOCK, ttl_s=ttl_s, cache_salt=salt)

    def store(self, hashes: list[int], *blocks: int, tier: Tier = Tier.DEVICE) -> None:
        self.index.apply(
            A, [Stored(hashes=hashes, parent=None, token_ids=tokens_of(*blocks), block_size=BLOCK, tier=tier)]
        )

    def held(self, *blocks: int, salt: str | None = None) -> dict[str, int]:
        matches = self.index.match(tokens_of(*blocks), model="m", cache_salt=salt)
        return {match.instance_id: match.device_tokens // BLOCK for match in matches}


def tokens_of(*blocks: int) -> np.ndarray:
    return np.repeat(np.array(blocks, np.int32), BLOCK)


@pytest.fixture
def index() -> Index:
    return Index()


def test_they_count_until_their_time_is_over(index: Index) -> None:
    index.predict(1, 2, 3)
    assert index.held(1, 2, 3, 4) == {"a": 3}
    index.clock.advance(9.9)
    assert index.held(1, 2, 3) == {"a": 3}
    index.clock.advance(0.2)
    assert index.held(1, 2, 3) == {}
    assert index.index.statistics().blocks == 0
    assert index.index.statistics().expired_blocks_total == 3


def test_expire_tells_how_many(index: Index) -> None:
    assert index.index.expire() == 0
    index.predict(1, 2, ttl_s=1)
    index.predict(5, source=B, ttl_s=2)
    index.clock.advance(1.5)
    assert index.index.expire() == 2
    index.clock.advance(1)
    assert index.index.expire() == 1
    assert index.index.num_held(A) == index.index.num_held(B) == 0


def test_asking_again_prolongs_and_never_shortens(index: Index) -> None:
    index.predict(1, 2, ttl_s=10)
    index.clock.advance(8)
    index.predict(1, ttl_s=10)
    index.predict(1, ttl_s=1)
    index.clock.advance(4)
    assert index.held(1, 2) == {"a": 1}


def test_a_block_that_was_really_stored_stays_and_is_removed_by_its_hash(index: Index) -> None:
    index.predict(1, 2)
    index.store([7], 1)
    index.clock.advance(100)
    assert index.held(1, 2) == {"a": 1}
    assert index.index.statistics().predicted_blocks == 0
    index.index.apply(A, [Removed(hashes=[7])])
    assert index.held(1, 2) == {}
    assert index.index.statistics().blocks == 0


def test_what_is_really_there_is_not_predicted(index: Index) -> None:
    index.store([7], 1)
    index.predict(1, 2, ttl_s=1)
    assert index.index.statistics().predicted_blocks == 1
    index.clock.advance(2)
    assert index.held(1, 2) == {"a": 1}


def test_colder_tiers_do_not_make_it_real(index: Index) -> None:
    index.predict(1, 2, ttl_s=1)
    index.store([7], 1, tier=Tier.HOST)
    (match,) = index.index.match(tokens_of(1, 2), model="m")
    assert (match.device_tokens, match.host_tokens) == (2 * BLOCK, 2 * BLOCK)
    index.clock.advance(2)
    (match,) = index.index.match(tokens_of(1, 2), model="m")
    assert (match.device_tokens, match.host_tokens) == (0, BLOCK)


def test_salted_prompts_keep_to_themselves(index: Index) -> None:
    index.predict(1, salt="s")
    assert index.held(1, salt="s") == {"a": 1}
    assert index.held(1) == {}


def test_cleared_and_departed_sources_lose_them(index: Index) -> None:
    index.predict(1)
    index.predict(1, source=B)
    index.index.apply(A, [Cleared()])
    index.index.remove(B)
    assert index.held(1) == {}
    index.predict(1, source=B)
    index.clock.advance(100)
    assert index.index.expire() == 0
    assert index.index.statistics().residencies == 0


def test_they_are_no_part_of_digests(index: Index) -> None:
    index.predict(1)
    assert index.index.digests(A) == {}


def test_a_source_without_events_keeps_what_was_asked_for_last() -> None:
    """Approximate mode: the memory bound pushes out what no request reached for longest."""
    index = Index(max_memory_bytes=150_000)
    for number in range(5000):
        index.predict(1, 2, 3, 10 + number, ttl_s=1e6)
        assert index.index.memory_bytes <= 150_000
    assert index.held(1, 2, 3, 5009) == {"a": 4}
    assert index.held(1, 2, 3, 10) == {"a": 3}
    assert index.index.statistics().forgotten_blocks_total > 1000
