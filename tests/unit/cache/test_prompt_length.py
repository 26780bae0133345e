"""What a cache is told of its tokens: how many are the prompt, and how many may be taken from what is cached."""

from __future__ import annotations

import numpy as np
import pytest

from kvmesh.cache.manager import KvCacheManager
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.retention import RetentionConfig, TokenRangeRetention


@pytest.mark.parametrize(("limit", "expected"), [(None, 10), (8, 8), (4, 4), (0, 0), (9, 9), (100, 10)])
def test_no_more_is_reused_than_allowed(make_manager, limit: int | None, expected: int) -> None:
    manager: KvCacheManager = make_manager(16)
    tokens = np.arange(11, dtype=np.int32)
    first = manager.create(ReuseScope(), tokens, "a")
    assert first.resume()
    assert first.resize(11)
    first.commit(tokens)
    first.close()
    second = manager.create(ReuseScope(), tokens, "b", reuse_limit=limit)
    assert second.num_cached_tokens == expected
    second.close()


def test_generated_tokens_behind_a_prompt_are_not_the_prompt(make_manager) -> None:
    """§3.1: ranges apply to prompt tokens only; what was generated before has the decode priority."""
    manager: KvCacheManager = make_manager(16)
    retention = RetentionConfig(
        token_range_retention_configs=(TokenRangeRetention(token_start=0, priority=80),), decode_retention_priority=10
    )
    cache = manager.create(ReuseScope(), np.arange(16, dtype=np.int32), "a", retention=retention, prompt_length=8)
    assert cache.resume()
    assert cache.resize(16)
    pages = cache.used_pages(0)[0]
    assert manager.store.tables[0].priority[pages].tolist() == [80, 80, 10, 10]
    cache.close()


def test_per_request_commits_once_the_prompt_is_done(make_manager) -> None:
    """§1.3: the prompt alone decides, not the tokens that follow it."""
    manager: KvCacheManager = make_manager(16, policy="per_request")
    tokens = np.arange(16, dtype=np.int32)
    cache = manager.create(ReuseScope(), tokens, "a", prompt_length=8)
    assert cache.resume()
    assert cache.resize(16)
    cache.commit(tokens[:4])
    assert manager.match(ReuseScope(), tokens).num_tokens == 0
    cache.commit(tokens[4:8])
    assert manager.match(ReuseScope(), tokens).num_tokens == 8
    cache.close()
