"""What a request's retention settings mean block by block (semantics §3.1); pure functions over arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmesh.protocol.retention import DEFAULT_PRIORITY, MAX_PRIORITY, RetentionConfig, TokenRangeRetention

__all__ = ["block_priorities", "touched_blocks", "validate"]

_MS_PER_S = 1000.0


def validate(config: RetentionConfig) -> None:
    """Check what the types cannot say.

    Raises:
        ValueError: a priority is not in 0..100, a range is empty or begins before the prompt, or a duration is
            negative; the message names the value.
    """
    for retention in config.token_range_retention_configs:
        start, end = retention.token_start, retention.token_end
        if start < 0 or (end is not None and end <= start):
            raise ValueError(f"retention range [{start}, {end}) must be a non-empty range of prompt tokens")
        _check(retention.priority, retention.duration_ms)
    _check(config.decode_retention_priority, config.decode_duration_ms)


def block_priorities(
    config: RetentionConfig | None, prompt_len: int, begin_block: int, end_block: int, tokens_per_block: int
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Priority of the blocks ``begin_block .. end_block - 1``, and how long it lasts.

    A block that begins inside the prompt is a prompt block: the first range in the list that touches one of its prompt
    tokens decides, and without one it has the default priority. Any later block holds generated tokens only and has the
    decode priority.

    Args:
        config: valid settings; None: the default priority for ever.
        prompt_len: tokens of the prompt; ranges end there at the latest.
        begin_block: number of the first block.
        end_block: number after the last block.
        tokens_per_block: tokens of a block.

    Returns:
        uint8 ``[n]`` priorities and float64 ``[n]`` durations in seconds from a block's release, inf for no end.
    """
    count = end_block - begin_block
    priorities: NDArray[np.uint8] = np.full(count, DEFAULT_PRIORITY, dtype=np.uint8)
    durations_s: NDArray[np.float64] = np.full(count, np.inf)
    if config is None:
        return priorities, durations_s
    generated = slice(max(-(-prompt_len // tokens_per_block) - begin_block, 0), count)
    priorities[generated] = config.decode_retention_priority
    durations_s[generated] = _seconds(config.decode_duration_ms)
    for retention in reversed(config.token_range_retention_configs):
        touched = _touched(retention, prompt_len, begin_block, end_block, tokens_per_block)
        priorities[touched] = retention.priority
        durations_s[touched] = _seconds(retention.duration_ms)
    return priorities, durations_s


def touched_blocks(
    config: RetentionConfig, prompt_len: int, begin_block: int, end_block: int, tokens_per_block: int
) -> NDArray[np.bool_]:
    """Which of the blocks ``begin_block .. end_block - 1`` a range of ``config`` touches: bool ``[n]``."""
    touched: NDArray[np.bool_] = np.zeros(end_block - begin_block, dtype=np.bool_)
    for retention in config.token_range_retention_configs:
        touched[_touched(retention, prompt_len, begin_block, end_block, tokens_per_block)] = True
    return touched


def _touched(
    retention: TokenRangeRetention, prompt_len: int, begin_block: int, end_block: int, tokens_per_block: int
) -> slice:
    """Indices, from ``begin_block`` on, of the blocks with a prompt token inside the range."""
    end = prompt_len if retention.token_end is None else min(retention.token_end, prompt_len)
    if end <= retention.token_start:
        return slice(0, 0)
    first, last = retention.token_start // tokens_per_block, min(-(-end // tokens_per_block), end_block)
    return slice(max(first - begin_block, 0), max(last - begin_block, 0))


def _seconds(duration_ms: int | None) -> float:
    return np.inf if duration_ms is None else duration_ms / _MS_PER_S


def _check(priority: int, duration_ms: int | None) -> None:
    if not 0 <= priority <= MAX_PRIORITY:
        raise ValueError(f"retention priority {priority} is not in 0..{MAX_PRIORITY}")
    if duration_ms is not None and duration_ms < 0:
        raise ValueError(f"retention duration of {duration_ms} ms is negative")
