"""Which layer group's blocks the stream tells: the one whose pages mean that a whole prefix can be reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.cache.layout import LayerGroupLayout

__all__ = ["FULL_ATTENTION", "NoTargetGroupError", "TargetGroup", "target_group"]

_FULL_KINDS = {"attention": "full_attention", "mla": "mla_attention"}
_WINDOWED_KINDS = {"attention": "sliding_window", "mla": "sliding_window_mla"}


class NoTargetGroupError(ValueError):
    """The model has no layer group whose blocks can be told."""


class TargetGroup(NamedTuple):
    """The layer group that is told, and what readers are told about it."""

    group_id: int
    kind: str | None = "full_attention"
    """``kv_cache_spec_kind``; None where readers have no word for it."""
    window: int | None = None
    """Attention window in tokens; None for full attention."""


FULL_ATTENTION = TargetGroup(0)
"""Of a model whose layers are all alike and attend to everything."""


def target_group(groups: Sequence[LayerGroupLayout]) -> TargetGroup:
    """The group with the smallest id among those with the largest window; full attention counts as the largest.

    Recurrent state is left out: a state is a single snapshot, not a block.

    Raises:
        NoTargetGroupError: there is nothing but recurrent state.
    """
    candidates = [group for group in groups if group.kind != "state"]
    if not candidates:
        raise NoTargetGroupError("KV events cannot be streamed: the model has no attention layer group")
    chosen = min(candidates, key=lambda group: (group.window is not None, -(group.window or 0), group.group_id))
    kinds = _FULL_KINDS if chosen.window is None else _WINDOWED_KINDS
    return TargetGroup(chosen.group_id, kinds.get(chosen.kind), chosen.window)
