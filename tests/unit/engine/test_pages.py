"""What the engine tells the cache of a sequence, and asks of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_cache import FakeCacheManager
from scheduling import SchedulerBench

from kvmesh.cache.base import MatchInfo
from kvmesh.protocol.retention import RetentionConfig


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of every creation."""
    found: list[dict[str, Any]] = []
    create = FakeCacheManager.create

    def noted(manager: FakeCacheManager, *arguments: Any, **settings: Any) -> Any:
        found.append({**settings, "num_tokens": len(arguments[1])})
        return create(manager, *arguments, **settings)

    monkeypatch.setattr(FakeCacheManager, "create", noted)
    return found


def test_a_request_s_own_settings_reach_its_cache(told: list[dict[str, Any]]) -> None:
    bench = SchedulerBench(20)
    seq = bench.add("a", 9)
    seq.retention, seq.conversation_id = RetentionConfig(decode_retention_priority=80), "c"
    bench.step()
    [one] = told
    assert (one["retention"], one["conversation_id"]) == (seq.retention, "c")
    assert (one["num_tokens"], one["prompt_length"], one["reuse_limit"], one["reuse"]) == (9, 9, None, True)


def test_what_was_generated_is_no_prompt_when_a_sequence_starts_anew(told: list[dict[str, Any]]) -> None:
    bench = SchedulerBench(5, max_num_tokens=32)
    bench.add("a", 8, max_tokens=12)
    b = bench.add("b", 6, max_tokens=12, first=50)
    bench.run()
    again = told[-1]
    assert again["num_tokens"] > again["prompt_length"] == b.history.prompt_length == 6
    first, *later = [one["again"] for one in told if one["prompt_length"] == 6]
    assert not first
    assert later
    assert all(later)


def test_a_sequence_that_never_computed_a_step_is_as_new(told: list[dict[str, Any]]) -> None:
    bench = SchedulerBench(20)
    seq = bench.add("a", 9)
    for _ in range(2):
        assert bench.pages.open(seq)
        bench.pages.discard(seq)
    assert bench.pages.open(seq)
    assert bench.pages.grow(seq, 9)
    bench.pages.advance(seq, 9)
    bench.pages.discard(seq)
    assert bench.pages.open(seq)
    assert [one["again"] for one in told] == [False, False, False, True]


def test_a_receiver_takes_whole_blocks_only(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied part of a block would be in the way of the peer that sends the block whole."""
    bench = SchedulerBench(40, max_num_tokens=32)
    bench.add("a", 8, max_tokens=1)
    bench.run()
    # Two blocks and two tokens of a third one are cached.
    monkeypatch.setattr(bench.manager, "match", lambda *_arguments, **_settings: MatchInfo(10, 2))
    receiver = bench.add("r", 13, received=True)
    bench.step()
    assert (told[-1]["reuse_limit"], told[-1]["prompt_length"]) == (8, 13)
    assert receiver.num_computed == 8
    assert bench.pages.first_missing_blocks(receiver) == [2]


def test_a_receiver_that_has_everything_asks_for_nothing(told: list[dict[str, Any]]) -> None:
    bench = SchedulerBench(40, max_num_tokens=32)
    bench.add("a", 12, max_tokens=1)
    bench.run()
    receiver = bench.add("r", 12, received=True)
    bench.step()
    assert told[-1]["reuse_limit"] is None
    assert bench.pages.first_missing_blocks(receiver) == [3]


@pytest.mark.parametrize(
    ("prompt", "window", "expected"),
    [(30, 8, 5), (32, 8, 6), (33, 8, 6), (7, 8, 0), (30, 1, 7), (32, 1, 8), (32, 100, 0)],
)
def test_blocks_that_the_window_has_passed_are_not_asked_for(prompt: int, window: int, expected: int) -> None:
    """§3.3: the first block that the token after the prompt attends to."""
    bench = SchedulerBench(FakeCacheManager([40, 40], windows=(None, window)))
    receiver = bench.add("r", prompt, received=True)
    bench.step()
    assert bench.pages.first_missing_blocks(receiver) == [0, expected]
    assert receiver.cache is not None
    kept = receiver.cache.pages[1]  # type: ignore[attr-defined]
    assert [block for block, page in enumerate(kept) if page is not None] == list(range(expected, len(kept)))


def test_a_decode_takes_whole_blocks_and_a_chunk_what_it_computes() -> None:
    """§3.7: scratch blocks are those behind the chunk's end, so that a chunk's capacity must be its end."""
    bench = SchedulerBench(20, max_num_tokens=6)
    seq = bench.add("a", 11)
    capacities = []
    for _ in range(4):
        bench.step()
        assert seq.cache is not None
        capacities.append(seq.cache.capacity)
    assert capacities == [6, 11, 12, 16]
    assert np.array_equal(seq.history.slice(0, 11), np.arange(11))
