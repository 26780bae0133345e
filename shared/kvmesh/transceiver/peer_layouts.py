"""The page layout that a peer states of itself: checked before a byte is addressed by it.

A layout is more than its layers and ranks: sizes, offsets and pools follow from them. So one is believed only if
:meth:`kvmesh.cache.layout.PageLayout.build` would have made it, and if its blocks hold what those of this engine hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, LayerGroupLayout, LayoutError, PageLayout

__all__ = ["read_layout"]

_decoder: Final = msgspec.msgpack.Decoder(PageLayout)


def read_layout(encoded: bytes, mine: PageLayout) -> PageLayout:
    """The layout of a peer.

    Args:
        encoded: msgpack of it.
        mine: this engine's.

    Raises:
        LayoutError: it cannot be read, contradicts itself, or its blocks hold something else.
    """
    try:
        theirs = _decoder.decode(encoded)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise LayoutError(f"it cannot be read: {error}") from error
    layers = tuple(layer for group in theirs.groups for layer in _layers_of(group))
    if PageLayout.build(CacheRequirements(layers), theirs.tokens_per_block) != theirs:
        raise LayoutError("its sizes, offsets or pools are not those of its layers")
    if theirs.digest("") != mine.digest(""):
        raise LayoutError(f"a block of it is something else: {theirs.summary()}")
    return theirs


def _layers_of(group: LayerGroupLayout) -> Iterator[LayerCacheSpec]:
    for layer in group.layers:
        try:
            buffer = group.buffer(layer, "state" if group.kind == "state" else "k")
        except KeyError as error:
            raise LayoutError(error.args[0]) from error
        if buffer.num_kv_heads < 1:
            raise LayoutError(f"layer {layer} has {buffer.num_kv_heads} heads")
        yield LayerCacheSpec(
            layer_index=layer,
            kind=group.kind,
            num_kv_heads=buffer.num_kv_heads,
            head_dim=buffer.head_dim,
            dtype=buffer.dtype,
            window=group.window,
            rank=group.rank,
            first_kv_head=buffer.first_kv_head,
            state_bytes=buffer.nbytes if group.kind == "state" else None,
        )
