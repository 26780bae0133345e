"""How long the cached blocks of one request are worth keeping: TensorRT-LLM's ``KvCacheRetentionConfig``."""

from __future__ import annotations

import msgspec

__all__ = ["DEFAULT_PRIORITY", "MAX_PRIORITY", "RetentionConfig", "TokenRangeRetention"]

DEFAULT_PRIORITY = 35
"""TensorRT-LLM's middle of 0 (first to go) to 100."""

MAX_PRIORITY = 100


class TokenRangeRetention(msgspec.Struct, frozen=True, kw_only=True):
    """Priority of the prompt blocks that a range of tokens touches; where ranges overlap, the earlier one wins."""

    token_start: int
    token_end: int | None = None
    """First token after the range; None: to the end of the prompt."""
    priority: int
    """0 (first to go) to 100."""
    duration_ms: int | None = None
    """Counted from when a block is first released; then its priority falls back to the default. None: for ever."""


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Eviction priorities of one request's blocks."""

    token_range_retention_configs: tuple[TokenRangeRetention, ...] = ()
    """Prompt tokens only."""
    decode_retention_priority: int = DEFAULT_PRIORITY
    """Of blocks that hold generated tokens."""
    decode_duration_ms: int | None = None
