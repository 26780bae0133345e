"""§2 fp8_context_mla_kv_len_cap: the effective value."""

from __future__ import annotations

import msgspec
import pytest

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, PageLayout
from kvmesh.engine.context_cap import context_kv_cap, has_context_workspace


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (100, 200),  # §2 CHECK: never below max_seq_len
        (500, 500),
        (None, 4 * 200),  # the smaller of batch and tokens, times the length
        (10_000, 4 * 200),  # more would bound nothing
    ],
)
def test_effective_cap(cap: int | None, expected: int) -> None:
    assert context_kv_cap(cap, max_batch_size=4, max_num_tokens=64, max_seq_len=200) == expected
    assert context_kv_cap(cap, max_batch_size=64, max_num_tokens=4, max_seq_len=200) == expected


def test_only_mla_layers_have_the_workspace() -> None:
    layer = LayerCacheSpec(layer_index=0, kind="attention", num_kv_heads=1, head_dim=8, dtype="float32")
    layout = PageLayout.build(CacheRequirements((layer,)), 4)
    assert not has_context_workspace(layout)
    latent = msgspec.structs.replace(layout.groups[0], kind="mla")
    assert has_context_workspace(msgspec.structs.replace(layout, groups=(*layout.groups, latent)))
