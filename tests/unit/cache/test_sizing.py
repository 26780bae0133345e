"""How many pages fit (semantics §2 and §2.2)."""

from __future__ import annotations

import pytest

from kvmesh.cache.settings import CacheSettings
from kvmesh.cache.sizing import SizingError, device_quota_bytes, plan_pages
from kvmesh.config import KvCacheConfig


def test_the_smallest_limit_wins() -> None:
    # §2.2 CHECK: fraction .5 of 1000 B, max_gpu_total_bytes 300 B, max_tokens -> 400 B.
    assert device_quota_bytes(fraction_bytes=500, max_bytes=300, token_bytes=400) == 300
    assert device_quota_bytes(fraction_bytes=None, max_bytes=None, token_bytes=400) == 400
    with pytest.raises(SizingError, match="quota not set"):
        device_quota_bytes(fraction_bytes=None, max_bytes=None, token_bytes=None)


def test_max_tokens_can_be_resumed(make_layout) -> None:
    # §2 max_tokens CHECK: 1000 tokens, blocks of 32, utilisation .95: 1000 tokens are still resumable.
    layout = make_layout(32)
    config = KvCacheConfig(max_tokens=1000, free_gpu_memory_fraction=None)
    (pages,) = plan_pages(config, layout, free_bytes=1 << 30)
    assert pages == 34
    assert layout.num_blocks(1000) / pages <= config.max_util_for_resume


def test_limits_of_bytes(make_layout) -> None:
    layout = make_layout(4)
    block = layout.bytes_per_block
    assert plan_pages(KvCacheConfig(free_gpu_memory_fraction=0.5), layout, free_bytes=20 * block) == [10]
    assert plan_pages(KvCacheConfig(max_gpu_total_bytes=3 * block + 1), layout, free_bytes=20 * block) == [3]
    config = KvCacheConfig(free_gpu_memory_fraction=None, max_gpu_total_bytes=100 * block)
    assert plan_pages(config, layout, free_bytes=20 * block) == [20]


def test_every_group_gets_as_many_blocks(make_layout) -> None:
    layout = make_layout(4, windows=(None, 16, None, 8))
    assert [len(pool.groups) for pool in layout.pools] == [1, 2]
    assert plan_pages(KvCacheConfig(free_gpu_memory_fraction=1.0), layout, free_bytes=10 * layout.bytes_per_block) == [
        10,
        20,
    ]


def test_no_room_is_a_clear_error(make_layout) -> None:
    with pytest.raises(SizingError, match="no room for one block of 4 tokens"):
        plan_pages(KvCacheConfig(), make_layout(4), free_bytes=100)
    with pytest.raises(SizingError, match="quota not set"):
        plan_pages(KvCacheConfig(free_gpu_memory_fraction=None), make_layout(4), free_bytes=100)


def test_settings_from_the_public_configuration() -> None:
    config = KvCacheConfig.model_validate(
        {"enable_partial_reuse": False, "max_util_for_resume": 0.5, "block_reuse_config": {"policy": "per_request"}}
    )
    assert CacheSettings.from_config(config) == CacheSettings(True, False, 0.5, "per_request")
    assert CacheSettings.from_config(KvCacheConfig()) == CacheSettings()
    other = KvCacheConfig.model_validate({"block_reuse_config": {"policy": "per_conversation"}})
    with pytest.raises(ValueError, match="not supported yet"):
        CacheSettings.from_config(other)
