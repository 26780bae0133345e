"""How ranks share a model's cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, LayoutError, PageLayout
from kvmesh.cache.sharding import HeadRange, kv_heads_of, layers_of_stage, shard_requirements


def _requirements(num_layers: int, heads: int, windows: tuple[int | None, ...] = (None,)) -> CacheRequirements:
    return CacheRequirements(
        tuple(
            LayerCacheSpec(
                layer_index=i, num_kv_heads=heads, head_dim=16, dtype="float32", window=windows[i % len(windows)]
            )
            for i in range(num_layers)
        )
    )


def test_heads_are_split_or_duplicated() -> None:
    assert [kv_heads_of(rank, 2, 4) for rank in range(2)] == [HeadRange(0, 2), HeadRange(2, 2)]
    assert [kv_heads_of(rank, 4, 2) for rank in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    with pytest.raises(LayoutError, match="tensor_parallel_size 2 does not fit 3 KV heads"):
        kv_heads_of(0, 2, 3)


@given(st.integers(1, 40), st.integers(1, 8))
def test_stages_cover_all_layers_in_order(num_layers: int, pp_size: int) -> None:
    if pp_size > num_layers:
        with pytest.raises(LayoutError, match="more than"):
            layers_of_stage(0, pp_size, num_layers)
        return
    stages = [layers_of_stage(stage, pp_size, num_layers) for stage in range(pp_size)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_ranks_have_groups_and_pools_of_their_own() -> None:
    layout = PageLayout.build(shard_requirements(_requirements(4, 4, (None, 8)), 2, 2), 4)
    assert [(group.rank, group.window, group.layers) for group in layout.groups] == [
        (0, None, (0,)), (0, 8, (1,)), (1, None, (0,)), (1, 8, (1,)),
        (2, None, (2,)), (2, 8, (3,)), (3, None, (2,)), (3, 8, (3,)),
    ]  # fmt: skip
    assert [pool.rank for pool in layout.pools] == [0, 1, 2, 3]
    assert layout.groups[2].buffer(0, "v").first_kv_head == 2
    assert layout.num_ranks == 4


def test_the_digest_says_nothing_of_ranks_and_everything_of_the_content() -> None:
    whole = PageLayout.build(_requirements(4, 4), 4).digest("model")
    for tp_size, pp_size in ((2, 1), (1, 2), (4, 4), (8, 1)):
        sharded = PageLayout.build(shard_requirements(_requirements(4, 4), tp_size, pp_size), 4)
        assert sharded.digest("model") == whole
    assert PageLayout.build(_requirements(4, 2), 4).digest("model") != whole
    assert PageLayout.build(_requirements(3, 4), 4).digest("model") != whole
    assert PageLayout.build(_requirements(4, 4, (8,)), 4).digest("model") != whole
    assert PageLayout.build(_requirements(4, 4), 8).digest("model") != whole


def test_states_are_not_shared() -> None:
    state = LayerCacheSpec(layer_index=0, kind="state", num_kv_heads=1, head_dim=1, dtype="float32", state_bytes=64)
    with pytest.raises(LayoutError, match="only attention layers"):
        shard_requirements(CacheRequirements((state,)), 2, 1)
