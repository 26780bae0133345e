"""Cache layouts with page sizes of choice, for tests of arithmetic: nothing can be stored in them."""

from __future__ import annotations

from typing import NamedTuple

from kvmesh.cache.layout import CacheKind, LayerGroupLayout, PageLayout, PoolLayout


class GroupOf(NamedTuple):
    """One layer group."""

    page_bytes: int
    window: int | None = None
    kind: CacheKind = "attention"


def layout_of(*groups: GroupOf, tokens_per_block: int = 4) -> PageLayout:
    """Groups of the same page size share a pool, as in a real layout."""
    pools: dict[int, list[int]] = {}
    for group_id, group in enumerate(groups):
        pools.setdefault(group.page_bytes, []).append(group_id)
    index = {page_bytes: pool for pool, page_bytes in enumerate(pools)}
    return PageLayout(
        tokens_per_block=tokens_per_block,
        groups=tuple(
            LayerGroupLayout(
                group_id=group_id,
                kind=group.kind,
                window=group.window,
                layers=(group_id,),
                pool=index[group.page_bytes],
                page_bytes=group.page_bytes,
                buffers=(),
            )
            for group_id, group in enumerate(groups)
        ),
        pools=tuple(PoolLayout(page_bytes=size, groups=tuple(members)) for size, members in pools.items()),
    )
