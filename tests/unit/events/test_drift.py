"""An index compares itself with what a publisher tells, as of the same batch, whoever of the two is ahead."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvmesh.events.digests import Digest, DigestAnswer, DigestKey, digest_of
from kvmesh.events.feeds.drift import KEPT_BATCHES, LONGEST_REST_S, DriftWatch
from kvmesh.events.feeds.feed import Feed
from kvmesh.events.feeds.saved import SavedFeed
from kvmesh.events.index import Source
from kvmesh.events.published import NOTHING_PUBLISHED
from kvmesh.events.records import Tier
from kvmesh.events.subscriber import Watermark

DEVICE, HOST = DigestKey(Tier.DEVICE), DigestKey(Tier.HOST)


def held(*hashes: int) -> dict[DigestKey, Digest]:
    return {DEVICE: digest_of(hashes)}


def answer(sequence: int, *hashes: int) -> DigestAnswer:
    return DigestAnswer(sequence, held(*hashes))


def test_equal_sets_are_equal_whoever_is_ahead() -> None:
    watch = DriftWatch(1.0)
    assert not watch.wants(0)
    watch.asked((0, held(1)))
    assert watch.wants(1)
    assert watch.applied(1, held(1, 2)) is None
    assert watch.told(answer(0, 1), (1, held(1, 2))) is None  # late
    assert watch.missed_total == 0
    assert watch.told(answer(1, 2, 1), (1, held(1, 2))) is None
    assert not watch.wants(2)
    assert watch.told(answer(3, 3), (1, held(1, 2))) is None  # early: it waits
    assert [watch.wants(sequence) for sequence in (2, 3)] == [False, True]
    assert watch.applied(2, held(2)) is None
    assert watch.applied(3, held(3)) is None
    assert watch.compared_total == 3


def test_nothing_published_and_nothing_held_are_equal() -> None:
    watch = DriftWatch(1.0)
    assert watch.told(DigestAnswer(NOTHING_PUBLISHED, {}), (-1, {})) is None
    assert watch.compared_total == 1
    drift = watch.told(DigestAnswer(NOTHING_PUBLISHED, {}), (-1, held(1)))
    assert drift is not None
    assert drift.differences == {DEVICE: 1}


def test_differences_are_found_whoever_is_ahead() -> None:
    watch = DriftWatch(1.0)
    watch.asked((-1, {}))
    watch.applied(0, held(1))
    watch.applied(1, held(1, 2))
    late = watch.told(answer(0, 1, 7), (1, held(1, 2)))
    assert late == (0, {DEVICE: -1})
    assert watch.told(answer(2, 5, 6), (1, held(1, 2))) is None
    early = watch.applied(2, held(5, 7))
    assert early == (2, {DEVICE: 0})
    both = watch.told(DigestAnswer(2, {HOST: digest_of([1])}), (2, held(5, 7)))
    assert both == (2, {DEVICE: 2, HOST: -1})


def test_a_last_batch_that_never_came_is_noticed() -> None:
    watch = DriftWatch(1.0)
    watch.applied(0, held(1))
    assert watch.told(answer(1, 1, 2), (0, held(1))) is None
    assert watch.told(answer(1, 1, 2), (0, held(1))) == (1, {})


def test_a_reader_that_is_behind_is_not_wrong() -> None:
    """Read anew it would fall behind even more."""
    watch = DriftWatch(1.0)
    for sequence in range(10):
        assert watch.told(answer(sequence + 5, 1), (sequence, held(1))) is None
        watch.applied(sequence + 1, held(1))
    assert watch.told(answer(20, 1), (10, held(1))) is None
    assert watch.told(answer(21, 1), (10, held(1))) == (21, {}), "and then nothing came any more"


def test_nothing_is_compared_with_what_is_void_or_forgotten() -> None:
    watch = DriftWatch(1.0)
    watch.applied(0, held(1))
    watch.told(answer(2, 9), (0, held(1)))
    watch.void()
    assert watch.applied(2, held(1)) is None
    assert watch.applied(3, None) is None
    assert watch.told(answer(2, 9), (3, None)) is None
    assert watch.told(answer(3, 9), (3, None)) is None
    watch.asked((-1, None))
    for sequence in range(KEPT_BATCHES):
        assert watch.wants(sequence)
        watch.applied(sequence, held(1))
    assert not watch.wants(KEPT_BATCHES)
    assert watch.told(answer(KEPT_BATCHES, 9), (KEPT_BATCHES + 1, held(1))) is None
    assert watch.compared_total == 0


def test_repairs_that_do_not_help_become_rare() -> None:
    watch = DriftWatch(10.0)
    now_s, times = 0.0, []
    for _ in range(10_000):
        if watch.repair(now_s):
            times.append(now_s)
        now_s += 1.0
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[:4] == [10.0, 20.0, 40.0, 80.0]
    assert max(gaps) == LONGEST_REST_S
    watch.told(answer(0, 1), (0, held(1)))
    assert watch.repair(now_s), "equal once: the next drift is repaired at once"


@pytest.mark.parametrize("watermark", [None, Watermark(7, b"d" * 16)])
def test_a_feed_is_saved_whole(watermark: Watermark | None) -> None:
    feed = Feed(Source("w", 3), "m", "tcp://a:1", "tcp://a:2", 9, "t", "sql", "s", single_group=True, block_size=16)
    saved = SavedFeed.decode(SavedFeed.of(feed, watermark, by_hand=True).encode())
    assert (saved.feed(), saved.resume_from(), saved.by_hand) == (feed, watermark, True)


def test_bytes_of_something_else_are_refused() -> None:
    for data in (b"", b"\xc1", b"\x81\xa1a\x01"):
        with pytest.raises(ValueError):
            SavedFeed.decode(data)


def test_an_answer_that_cannot_be_compared_is_counted() -> None:
    watch = DriftWatch(1.0)
    watch.asked((0, held(1)))
    for sequence in range(1, KEPT_BATCHES + 5):
        watch.applied(sequence, held(sequence))
    assert watch.told(answer(KEPT_BATCHES + 2, 9), (KEPT_BATCHES + 4, held(1))) is None
    assert (watch.compared_total, watch.missed_total) == (0, 1)
