"""Page layout: groups, pools, offsets, digest."""

from __future__ import annotations

import msgspec
import pytest

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, LayoutError, PageLayout


def spec(layer: int, **changes: object) -> LayerCacheSpec:
    values: dict[str, object] = {"num_kv_heads": 3, "head_dim": 64, "dtype": "float32"}
    return msgspec.convert({"layer_index": layer} | values | changes, LayerCacheSpec)


def build(*layers: LayerCacheSpec, tokens_per_block: int = 32) -> PageLayout:
    return PageLayout.build(CacheRequirements(layers), tokens_per_block)


def test_page_bytes_of_the_default_model() -> None:
    # 30 layers, 3 KV heads of 64, float32, 32 tokens: 46,080 bytes a token.
    layout = build(*(spec(i) for i in range(30)))
    (group,) = layout.groups
    assert group.page_bytes == layout.bytes_per_block == 32 * 46_080
    assert group.layers == tuple(range(30))


def test_buffers_are_in_order_and_aligned() -> None:
    layout = build(spec(0, num_kv_heads=1, head_dim=3, dtype="float16"), spec(5), tokens_per_block=3)
    (group,) = layout.groups
    offsets = [(buffer.layer, buffer.role, buffer.offset_bytes, buffer.nbytes) for buffer in group.buffers]
    assert offsets == [(0, "k", 0, 18), (0, "v", 64, 18), (5, "k", 128, 2304), (5, "v", 2432, 2304)]
    assert group.page_bytes == 4736
    assert group.buffer(5, "v").offset_bytes == 2432
    with pytest.raises(KeyError):
        group.buffer(1, "k")


def test_groups_by_window_and_pools_by_size() -> None:
    # §3.2: ids in layer order of first occurrence; groups with the same slot layout share a pool.
    layout = build(spec(0, window=128), spec(1), spec(2, window=128), spec(3), spec(4, window=64))
    assert [(group.window, group.layers, group.pool) for group in layout.groups] == [
        (128, (0, 2), 0),
        (None, (1, 3), 0),
        (64, (4,), 1),
    ]
    assert [pool.groups for pool in layout.pools] == [(0, 1), (2,)]
    assert [group.group_id for group in layout.groups] == [0, 1, 2]


def test_digest_covers_what_must_agree() -> None:
    base = build(spec(0), spec(1))
    digests = {
        base.digest("m"),
        base.digest("other"),
        build(spec(0), spec(1), tokens_per_block=64).digest("m"),
        build(spec(0), spec(1, window=9)).digest("m"),
        build(spec(0), spec(1, dtype="float16")).digest("m"),
        build(spec(0), spec(1, num_kv_heads=1)).digest("m"),
    }
    assert len(digests) == 6
    assert base.digest("m") == build(spec(0), spec(1)).digest("m")
    assert len(base.digest("m")) == 64


def test_summary_is_one_readable_line() -> None:
    group = "1 attention layers, window {}, 3 KV heads x 64 float32, 49152 bytes a page"
    assert build(spec(0), spec(1, window=64)).summary() == (
        f"layout v1, 32 tokens a block; group 0: {group.format('full')}; group 1: {group.format(64)}"
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "no layer"),
        ((spec(0), spec(0)), "twice"),
        ((spec(0, kind="mla"),), "not supported yet: cache kind 'mla'"),
        ((spec(0, dtype="fp8"),), "not supported yet: KV cache dtype 'fp8'"),
        ((spec(0, head_dim=0),), "positive"),
        ((spec(0, window=0),), "positive"),
    ],
)
def test_what_cannot_be_laid_out(layers: tuple[LayerCacheSpec, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        build(*layers)
    with pytest.raises(LayoutError, match="tokens_per_block"):
        build(spec(0), tokens_per_block=0)
