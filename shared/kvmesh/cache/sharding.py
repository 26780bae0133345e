"""How the ranks of an engine share a model's cache: whole KV heads over tensor ranks, whole layers over stages.

Rank ``stage * tp_size + t`` keeps, of the layers of its stage, the heads of tensor rank ``t``. With more tensor ranks
than KV heads, several ranks keep the same head.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvmesh.cache.layout import CacheRequirements, LayerCacheSpec, LayoutError

__all__ = ["HeadRange", "kv_heads_of", "layers_of_stage", "shard_requirements"]


class HeadRange(NamedTuple):
    """Heads ``first .. first + length`` of a layer."""

    first: int
    length: int


def kv_heads_of(tensor_rank: int, tp_size: int, num_kv_heads: int) -> HeadRange:
    """The KV heads that a tensor rank computes with.

    Raises:
        LayoutError: neither of the two numbers divides the other.
    """
    if num_kv_heads % tp_size == 0:
        length = num_kv_heads // tp_size
        return HeadRange(tensor_rank * length, length)
    if tp_size % num_kv_heads == 0:
        return HeadRange(tensor_rank // (tp_size // num_kv_heads), 1)
    raise LayoutError(
        f"tensor_parallel_size {tp_size} does not fit {num_kv_heads} KV heads: one must be a multiple of the other"
    )


def layers_of_stage(stage: int, pp_size: int, num_layers: int) -> range:
    """The layers of a pipeline stage; earlier stages get one more where they cannot be equal.

    Raises:
        LayoutError: there are more stages than layers.
    """
    if pp_size > num_layers:
        raise LayoutError(f"pipeline_parallel_size {pp_size} is more than the {num_layers} layers of the model")
    least, extra = divmod(num_layers, pp_size)
    first = stage * least + min(stage, extra)
    return range(first, first + least + (stage < extra))


def shard_requirements(requirements: CacheRequirements, tp_size: int, pp_size: int) -> CacheRequirements:
    """What every rank keeps, in order of ranks; layers are counted by their position among those with a cache.

    Raises:
        LayoutError: heads or layers cannot be shared so.
    """
    if tp_size == pp_size == 1:
        return requirements
    layers = sorted(requirements.layers, key=lambda layer: layer.layer_index)
    if any(layer.kind != "attention" for layer in layers):
        raise LayoutError("only attention layers can be shared between ranks")
    sharded: list[LayerCacheSpec] = []
    for stage in range(pp_size):
        for tensor_rank in range(tp_size):
            for position in layers_of_stage(stage, pp_size, len(layers)):
                heads = kv_heads_of(tensor_rank, tp_size, layers[position].num_kv_heads)
                sharded.append(
                    msgspec.structs.replace(
                        layers[position],
                        rank=stage * tp_size + tensor_rank,
                        first_kv_head=heads.first,
                        num_kv_heads=heads.length,
                    )
                )
    return CacheRequirements(tuple(sharded))
