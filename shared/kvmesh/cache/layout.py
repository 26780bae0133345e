"""What a KV cache page is made of: the one place where page bytes and buffer offsets are derived.

A model states :class:`CacheRequirements`; :meth:`PageLayout.build` turns them into layer groups and pools. Layers whose
pages live and die together (same kind, same window) form a layer group, numbered in layer order of first occurrence.
Groups whose pages have the same size share one pool; a pool is an array of equal slots, and a slot holds one page: the
buffers of all layers of one group for ``tokens_per_block`` consecutive tokens.

Inside a page every layer has its K buffer, then its V buffer, each a contiguous
``[num_kv_heads, tokens_per_block, head_dim]``, 64-byte aligned. A page of a state group holds the recurrent state of
all its layers after some number of tokens: a sequence has one, and the tree keeps snapshots.

In an engine of several ranks (:mod:`kvmesh.cache.sharding`) a rank's part of a page is a layer group of its own, in a
pool of that rank: heads are the outermost axis of a buffer, so that a rank's heads are one run of its bytes.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

__all__ = [
    "LAYOUT_VERSION",
    "BufferSpec",
    "CacheKind",
    "CacheRequirements",
    "LayerCacheSpec",
    "LayerGroupLayout",
    "LayoutError",
    "PageLayout",
    "PoolLayout",
    "dtype_bytes",
]

LAYOUT_VERSION = 1
"""Raised whenever the bytes of a page change their meaning; servers of different versions do not pair."""

BUFFER_ALIGNMENT = 64
"""A cache line, and the widest vector load of the kernels."""

CacheKind = Literal["attention", "mla", "cross", "state"]
Role = Literal["k", "v", "state"]

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class LayoutError(ValueError):
    """The model asks for a cache that cannot be laid out; the message says why."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``.

    Raises:
        LayoutError: the cache cannot store this dtype.
    """
    try:
        return _DTYPE_BYTES[dtype]
    except KeyError:
        raise LayoutError(f"not supported yet: KV cache dtype {dtype!r} (known: {', '.join(_DTYPE_BYTES)})") from None


class LayerCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one layer of a model wants to keep per token."""

    layer_index: int
    kind: CacheKind = "attention"
    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    """Attention window in tokens, None for full attention."""
    rank: int = 0
    """The engine rank that keeps it; a layer has an entry for each of its ranks."""
    first_kv_head: int = 0
    """Which of the layer's heads these are: ``first_kv_head`` and those that follow."""
    state_bytes: int | None = None
    """Kind ``state`` only: bytes of the layer's recurrent state; heads, head_dim and dtype then say nothing."""


class CacheRequirements(msgspec.Struct, frozen=True):
    """A model's cache needs, one entry for each layer that has a cache."""

    layers: tuple[LayerCacheSpec, ...]


class BufferSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One contiguous ``[num_kv_heads, tokens_per_block, head_dim]`` buffer inside a page, or one layer's state."""

    role: Role
    layer: int
    offset_bytes: int
    """From the start of the page."""
    nbytes: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    first_kv_head: int = 0
    """The first of the layer's heads that it holds."""


class LayerGroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose pages are allocated and freed together."""

    group_id: int
    kind: CacheKind
    window: int | None
    layers: tuple[int, ...]
    pool: int
    """Index of the pool whose slots hold this group's pages."""
    page_bytes: int
    buffers: tuple[BufferSpec, ...]
    rank: int = 0
    """The engine rank that computes with these pages."""

    @property
    def has_every_page(self) -> bool:
        """Whether a cached block always has a page in this group: no window lets go of it."""
        return self.kind == "attention" and self.window is None

    def buffer(self, layer: int, role: Role) -> BufferSpec:
        """The buffer of ``layer`` with ``role``.

        Raises:
            KeyError: the layer is not in this group.
        """
        for buffer in self.buffers:
            if buffer.layer == layer and buffer.role == role:
                return buffer
        raise KeyError(f"layer group {self.group_id} has no {role} buffer of layer {layer}")


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """An array of equal slots in the memory of one rank, shared by its layer groups whose pages have this size."""

    page_bytes: int
    groups: tuple[int, ...]
    rank: int = 0


class PageLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of every page of one model's cache; what two servers must agree on before pages may travel."""

    tokens_per_block: int
    groups: tuple[LayerGroupLayout, ...]
    pools: tuple[PoolLayout, ...]
    version: int = LAYOUT_VERSION

    @classmethod
    def build(cls, requirements: CacheRequirements, tokens_per_block: int) -> PageLayout:
        """Lay out the pages of a model.

        Raises:
            LayoutError: a layer appears twice on a rank, a size is not positive, or a kind or dtype is not supported.
        """
        if tokens_per_block < 1:
            raise LayoutError(f"tokens_per_block must be positive, not {tokens_per_block}")
        if not requirements.layers:
            raise LayoutError("the model states no layer with a cache")
        members: dict[tuple[int, CacheKind, int | None], list[LayerCacheSpec]] = {}
        seen: set[tuple[int, int]] = set()
        for layer in requirements.layers:
            _check_layer(layer, seen)
            members.setdefault((layer.rank, layer.kind, layer.window), []).append(layer)

        groups: list[LayerGroupLayout] = []
        pool_of_size: dict[tuple[int, int], int] = {}
        pool_groups: list[list[int]] = []
        for group_id, ((rank, kind, window), layers) in enumerate(members.items()):
            buffers, page_bytes = _place_buffers(layers, tokens_per_block)
            pool = pool_of_size.setdefault((rank, page_bytes), len(pool_of_size))
            if pool == len(pool_groups):
                pool_groups.append([])
            pool_groups[pool].append(group_id)
            groups.append(
                LayerGroupLayout(
                    group_id=group_id,
                    kind=kind,
                    window=window,
                    layers=tuple(layer.layer_index for layer in layers),
                    pool=pool,
                    page_bytes=page_bytes,
                    buffers=buffers,
                    rank=rank,
                )
            )
        pools = tuple(
            PoolLayout(page_bytes=page_bytes, groups=tuple(pool_groups[pool]), rank=rank)
            for (rank, page_bytes), pool in pool_of_size.items()
        )
        return cls(tokens_per_block=tokens_per_block, groups=tuple(groups), pools=pools)

    @property
    def bytes_per_block(self) -> int:
        """Device bytes that one block (``tokens_per_block`` tokens, all layers) takes over all pools."""
        return sum(group.page_bytes for group in self.groups)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.tokens_per_block)

    @property
    def num_ranks(self) -> int:
        """Ranks that keep a part of each block."""
        return 1 + max(group.rank for group in self.groups)

    def digest(self, model_id: str) -> str:
        """Hex SHA-256 of everything that two servers must agree on: the model, and what a block of its cache holds.

        How ranks share that among them is not part of it: peers may differ there (:mod:`kvmesh.transceiver.routes`).

        Args:
            model_id: the same for the same weights only, such as :func:`kvmesh.models.checkpoint.fingerprint`.
        """
        heads: dict[tuple[int, Role], int] = {}
        facts: dict[tuple[int, Role], tuple[object, ...]] = {}
        for group in self.groups:
            for buffer in group.buffers:
                key = (buffer.layer, buffer.role)
                heads[key] = max(heads.get(key, 0), buffer.first_kv_head + buffer.num_kv_heads)
                state_bytes = buffer.nbytes if buffer.role == "state" else 0
                facts[key] = (group.kind, group.window, buffer.head_dim, buffer.dtype, state_bytes)
        content = [(*key, heads[key], *facts[key]) for key in sorted(facts)]
        whole = {"version": self.version, "tokens_per_block": self.tokens_per_block, "content": content}
        return hashlib.sha256(msgspec.json.encode({"layout": whole, "model": model_id})).hexdigest()

    def summary(self) -> str:
        """One readable line of this layout, for the message of a refused pairing."""
        groups = "; ".join(
            f"group {group.group_id}{f' of rank {group.rank}' if group.rank else ''}: "
            f"{len(group.layers)} {group.kind} layers, "
            f"window {'full' if group.window is None else group.window}, "
            f"{_shapes(group)}, {group.page_bytes} bytes a page"
            for group in self.groups
        )
        return f"layout v{self.version}, {self.tokens_per_block} tokens a block; {groups}"


def _check_layer(layer: LayerCacheSpec, seen: set[tuple[int, int]]) -> None:
    if (layer.rank, layer.layer_index) in seen:
        raise LayoutError(f"layer {layer.layer_index} states its cache twice")
    seen.add((layer.rank, layer.layer_index))
    if layer.rank < 0 or layer.first_kv_head < 0:
        raise LayoutError(f"layer {layer.layer_index}: rank and first_kv_head must not be negative")
    if layer.kind == "state":
        if not layer.state_bytes or layer.state_bytes < 1 or layer.window is not None:
            raise LayoutError(f"layer {layer.layer_index}: a state has a positive size and no window")
        return
    if layer.kind != "attention":
        raise LayoutError(f"not supported yet: cache kind {layer.kind!r} (layer {layer.layer_index})")
    if layer.num_kv_heads < 1 or layer.head_dim < 1 or (layer.window is not None and layer.window < 1):
        raise LayoutError(f"layer {layer.layer_index}: heads, head_dim and window must be positive")


def _place_buffers(layers: list[LayerCacheSpec], tokens_per_block: int) -> tuple[tuple[BufferSpec, ...], int]:
    buffers: list[BufferSpec] = []
    offset = 0
    for layer in layers:
        roles: tuple[Role, ...] = ("k", "v")
        if layer.kind == "state":
            assert layer.state_bytes is not None
            roles, nbytes = ("state",), layer.state_bytes
        else:
            nbytes = layer.num_kv_heads * tokens_per_block * layer.head_dim * dtype_bytes(layer.dtype)
        for role in roles:
            buffers.append(
                BufferSpec(
                    role=role,
                    layer=layer.layer_index,
                    offset_bytes=offset,
                    nbytes=nbytes,
                    num_kv_heads=layer.num_kv_heads,
                    head_dim=layer.head_dim,
                    dtype=layer.dtype,
                    first_kv_head=layer.first_kv_head,
                )
            )
            offset += -(-nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
    return tuple(buffers), offset


def _shapes(group: LayerGroupLayout) -> str:
    if group.kind == "state":
        return "states of " + " + ".join(f"{buffer.nbytes}" for buffer in group.buffers) + " bytes"
    shapes = dict.fromkeys(
        f"{buffer.num_kv_heads} KV heads x {buffer.head_dim} {buffer.dtype}" for buffer in group.buffers
    )
    return " + ".join(shapes)
