"""The most pages that a sequence ever has, against walking through its life."""

from __future__ import annotations

import pytest
from fake_cache import FakeCacheManager
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.reservation import PeakPages, fits, longest_fitting


def walk(manager: FakeCacheManager, start: int, length: int, chunk: int) -> list[int]:
    """Pages at every step of a prefill whose chunks have ``chunk`` tokens, the first ending at ``start + chunk``."""
    most = [0] * len(manager.totals)
    while start < length:
        end = min(start + chunk, length)
        most = [max(pair) for pair in zip(most, manager.pages_needed(history=start, capacity=end), strict=True)]
        start = end
    return most


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=3, unique=True),
    block=st.sampled_from([1, 2, 4, 8]),
    length=st.integers(1, 120),
    chunk=st.integers(1, 40),
    start=st.integers(0, 119),
    smaller=st.integers(1, 40),
)
def test_no_way_through_a_sequence_needs_more_than_the_peak(
    windows: list[int | None], block: int, length: int, chunk: int, start: int, smaller: int
) -> None:
    """§3.3, §3.8: whatever is cached at the start, and however the chunks fall."""
    manager = FakeCacheManager([1] * len(windows), windows=windows, block=block)
    peak = PeakPages(manager.pages_needed, block, chunk)
    of_context = peak.of_context(length)
    assert fits(walk(manager, min(start, length - 1), length, min(chunk, smaller)), of_context)
    assert fits(walk(manager, 0, length, chunk), of_context)
    # It is no more than some way really needs.
    ways = [walk(manager, first, length, chunk) for first in range(min(chunk, length))]
    assert [max(of_pool) for of_pool in zip(*ways, strict=True)] == of_context


@given(prompt=st.integers(1, 60), answer=st.integers(1, 60), window=st.one_of(st.none(), st.integers(1, 30)))
def test_completion_is_the_prompt_in_chunks_and_then_token_after_token(
    prompt: int, answer: int, window: int | None
) -> None:
    manager = FakeCacheManager([1], windows=[window])
    peak = PeakPages(manager.pages_needed, manager.block, 16)
    [most] = peak.to_completion(prompt, prompt + answer)
    [prefill], [decode] = walk(manager, 0, prompt, 16), walk(manager, prompt, prompt + answer, 1)
    assert most >= max(prefill, decode)
    assert most <= -(-(prompt + answer) // manager.block)


@pytest.mark.parametrize(
    ("windows", "pages", "expected"),
    [
        ((None,), [10], 40),
        # A window of 8 and a chunk of 8 take five blocks of 4 at most: the full group decides.
        ((None, 8), [10, 5], 40),
        # With four the window bounds it: up to 16 tokens no block has to be given back.
        ((None, 8), [10, 4], 16),
        ((8,), [5], 200),
        ((None,), [0], 0),
    ],
)
def test_the_longest_sequence_that_fits(windows: tuple[int | None, ...], pages: list[int], expected: int) -> None:
    manager = FakeCacheManager(pages, windows=windows)
    peak = PeakPages(manager.pages_needed, manager.block, 8)
    assert longest_fitting(peak.of_context, manager.reservable_pages(), 200) == expected


def test_answers_are_remembered_in_bounded_memory() -> None:
    calls = 0

    def pages_needed(*, history: int, capacity: int) -> list[int]:
        nonlocal calls
        calls += 1
        return [capacity - history // 2]

    peak = PeakPages(pages_needed, 4, 8)
    peak.of_context(100)
    once = calls
    peak.of_context(100)
    assert calls == once
    for length in range(1, 2 * PeakPages.REMEMBERED):
        peak.of_context(length)
    assert len(peak._known) <= PeakPages.REMEMBERED
