"""Which layer group's blocks are streamed (semantics §4.3)."""

from __future__ import annotations

import pytest

from kvmesh.cache.layout import CacheKind, LayerGroupLayout
from kvmesh.events.target import NoTargetGroupError, TargetGroup, target_group


def groups(*kinds_and_windows: tuple[CacheKind, int | None]) -> list[LayerGroupLayout]:
    return [
        LayerGroupLayout(group_id=i, kind=kind, window=window, layers=(i,), pool=0, page_bytes=64, buffers=())
        for i, (kind, window) in enumerate(kinds_and_windows)
    ]


@pytest.mark.parametrize(
    ("layout", "target"),
    [
        ([("attention", None)], TargetGroup(0, "full_attention", None)),
        ([("attention", 128), ("attention", None), ("attention", None)], TargetGroup(1, "full_attention", None)),
        ([("attention", 64), ("attention", 128), ("attention", 128)], TargetGroup(1, "sliding_window", 128)),
        ([("state", None), ("attention", 64)], TargetGroup(1, "sliding_window", 64)),
        ([("mla", None)], TargetGroup(0, "mla_attention", None)),
        ([("mla", 32)], TargetGroup(0, "sliding_window_mla", 32)),
    ],
)
def test_4_3_target_group(layout: list[tuple[CacheKind, int | None]], target: TargetGroup) -> None:
    assert target_group(groups(*layout)) == target


def test_4_3_without_an_attention_group_there_is_nothing_to_tell() -> None:
    with pytest.raises(NoTargetGroupError):
        target_group(groups(("state", None)))
