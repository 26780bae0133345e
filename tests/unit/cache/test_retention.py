"""Retention settings, block by block (§3.1)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.retention import block_priorities, touched_blocks, validate
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention


def retain(start: int, end: int | None, priority: int, duration_ms: int | None = None) -> TokenRangeRetention:
    return TokenRangeRetention(token_start=start, token_end=end, priority=priority, duration_ms=duration_ms)


def config(*ranges: TokenRangeRetention, decode: int = 35, decode_ms: int | None = None) -> RetentionConfig:
    return RetentionConfig(
        token_range_retention_configs=ranges, decode_retention_priority=decode, decode_duration_ms=decode_ms
    )


def test_a_range_touches_two_blocks_of_16_with_17_tokens() -> None:
    """§3.1: range [0, 17) with block size 16 affects two blocks."""
    priorities, durations = block_priorities(config(retain(0, 17, 80, 1500)), 64, 0, 4, 16)
    assert priorities.dtype == np.uint8
    assert priorities.tolist() == [80, 80, 35, 35]
    assert durations.tolist() == [1.5, 1.5, math.inf, math.inf]


def test_a_range_that_ends_at_a_block_boundary_touches_no_further_block() -> None:
    assert block_priorities(config(retain(0, 16, 80)), 64, 0, 2, 16)[0].tolist() == [80, 35]


def test_earlier_ranges_win() -> None:
    priorities, durations = block_priorities(config(retain(8, 9, 90), retain(0, None, 10, 2000)), 12, 0, 3, 4)
    assert priorities.tolist() == [10, 10, 90]
    assert durations.tolist() == [2.0, 2.0, math.inf]


def test_ranges_apply_to_prompt_tokens_only() -> None:
    """§3.1: generated blocks have the decode priority; the block in which the prompt ends is a prompt block."""
    settings = config(retain(4, 1000, 90), decode=20, decode_ms=500)
    priorities, durations = block_priorities(settings, 6, 0, 4, 4)
    assert priorities.tolist() == [35, 90, 20, 20]
    assert durations.tolist() == [math.inf, math.inf, 0.5, 0.5]


def test_a_range_past_the_prompt_has_no_effect() -> None:
    assert block_priorities(config(retain(6, None, 90), retain(7, 8, 91)), 6, 0, 3, 4)[0].tolist() == [35, 35, 35]


def test_no_settings_mean_the_default_for_ever() -> None:
    priorities, durations = block_priorities(None, 6, 3, 5, 4)
    assert priorities.tolist() == [35, 35]
    assert durations.tolist() == [math.inf, math.inf]


@given(
    ranges=st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(1, 20), st.integers(0, 100)), max_size=4),
    prompt_len=st.integers(1, 40),
    begin=st.integers(0, 12),
    count=st.integers(0, 12),
    size=st.sampled_from([1, 4, 8]),
)
def test_blocks_agree_with_a_token_by_token_reading(
    ranges: list[tuple[int, int | None, int]], prompt_len: int, begin: int, count: int, size: int
) -> None:
    settings = config(*(retain(a, None if n is None else a + n, p) for a, n, p in ranges), decode=99)
    validate(settings)
    expected, expected_touched = [], []
    for block in range(begin, begin + count):
        tokens = range(block * size, min((block + 1) * size, prompt_len))
        touching = [p for a, n, p in ranges if any(a <= t and (n is None or t < a + n) for t in tokens)]
        expected_touched.append(bool(touching))
        expected.append(99 if block * size >= prompt_len else touching[0] if touching else 35)
    assert block_priorities(settings, prompt_len, begin, begin + count, size)[0].tolist() == expected
    assert touched_blocks(settings, prompt_len, begin, begin + count, size).tolist() == expected_touched


@pytest.mark.parametrize(
    "bad",
    [
        config(retain(0, 4, 101)),
        config(retain(0, 4, -1)),
        config(decode=101),
        config(decode=-1),
        config(retain(-1, 4, 50)),
        config(retain(4, 4, 50)),
        config(retain(0, 4, 50, -1)),
        config(decode_ms=-1),
    ],
)
def test_invalid_settings_are_refused(bad: RetentionConfig) -> None:
    """§3.1: priorities outside 0..100 are invalid."""
    with pytest.raises(ValueError, match="retention"):
        validate(bad)


def test_the_bounds_are_valid() -> None:
    validate(config(retain(0, None, 0, 0), retain(0, 1, 100), decode=0, decode_ms=0))
