"""The model contract: what a step hands to a model, where its KV pages are, and what comes back."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvmesh.cache.layout import CacheRequirements, LayerGroupLayout, LayoutError, PageLayout
from kvmesh.kernels.ops import PagedKv
from kvmesh.models.config import ModelConfig
from kvmesh.models.parameters import ModelWeights, ParameterSpec
from kvmesh.models.sharding import Cut, ModelShard
from kvmesh.models.weights import GgufName

__all__ = ["ArchitectureModule", "CausalLM", "ForwardBatch", "GroupTables", "KvPools", "RankLinks"]


class GroupTables(NamedTuple):
    """Where the pages of a layer group, or of one layer, are, for the sequences of a batch."""

    block_table: Tensor
    """int32 ``[B, max_blocks]``: page ids by sequence. Entries past a sequence's length are never read, nor are those
    of blocks that the layer's window has left behind at the first of this step's tokens; such may be -1."""
    slot_mapping: Tensor
    """int64 ``[T]``: page * tokens_per_block + offset that each token's K and V go to; -1 stores nothing."""


@dataclass(slots=True)
class ForwardBatch:
    """One step's tokens, of any mix of prefill chunks and decodes, packed without padding.

    ``T`` tokens, ``B`` sequences, ``R`` rows of logits wanted. All tensors live on the model's device.
    """

    token_ids: Tensor
    """int32 ``[T]``."""
    positions: Tensor
    """int32 ``[T]``: index of each token in its sequence."""
    query_start: Tensor
    """int32 ``[B + 1]``: sequence ``b`` has the rows ``query_start[b]:query_start[b + 1]``."""
    context_lens: Tensor
    """int32 ``[B]``: KV length of each sequence, this step's tokens included."""
    groups: Sequence[GroupTables]
    """As :attr:`KvPools.table_of_layer` numbers them: in order of the rank's groups, where no group is split."""
    logits_rows: Tensor
    """int64 ``[R]``: rows whose logits are wanted, ascending."""
    embeddings: Tensor | None = None
    """``[T, hidden]``: used instead of looking ``token_ids`` up."""
    adapter_ids: Tensor | None = None
    """int32 ``[B]``: LoRA adapter by sequence."""
    state_slots: Tensor | None = None
    """int32 ``[B]``: recurrent-state slot by sequence."""


class KvPools(NamedTuple):
    """The KV pages as a rank's layers see them. Build once; it stays valid while the pools' memory does."""

    layers: tuple[PagedKv, ...]
    """In order of the rank's layers."""
    table_of_layer: tuple[int, ...]
    """In order of the rank's layers: which of :attr:`ForwardBatch.groups` addresses the layer's pages."""
    groups: tuple[int, ...]
    """The layer group ids that are the rank's, ascending."""
    split: tuple[int, ...]
    """By group of the rank: for how many layers it has a table each; 0: one table for all of them."""
    windows: tuple[int | None, ...]
    """By group of the rank: how many latest tokens its pages are kept for; None: all."""

    @classmethod
    def build(
        cls,
        layout: PageLayout,
        pool_addresses: Sequence[int] | Mapping[int, int],
        split_groups: Collection[int] = (),
        rank: int = 0,
    ) -> KvPools:
        """Views of every attention layer of ``rank`` in ``layout``.

        Args:
            layout: the page layout built from the model's own requirements.
            pool_addresses: by pool of the layout, the address of its page 0 in its device's address space; those of
                the rank's pools are enough.
            split_groups: layer groups whose layers get a table each. To the ``j``-th of ``L`` such layers a page is
                what it keeps in one slot: a page number is ``slot * L + j``, and the place of any of the others can
                be addressed too.
            rank: of the engine.

        Raises:
            LayoutError: the layers of a group to be split differ in their bytes.
        """
        views: dict[int, tuple[PagedKv, int]] = {}
        num_tables = 0
        groups = [group for group in layout.groups if group.rank == rank]
        for group in groups:
            split = group.group_id in split_groups
            parts = len(group.layers) if split else 1
            if split:
                _check_equal_layers(group)
            for position, layer in enumerate(group.layers):
                key, value = group.buffer(layer, "k"), group.buffer(layer, "v")
                start = key.offset_bytes if split else 0
                view = PagedKv(
                    base=pool_addresses[group.pool],
                    page_stride_bytes=group.page_bytes // parts,
                    k_offset_bytes=key.offset_bytes - start,
                    v_offset_bytes=value.offset_bytes - start,
                    num_kv_heads=key.num_kv_heads,
                    tokens_per_block=layout.tokens_per_block,
                    head_dim=key.head_dim,
                    dtype=getattr(torch, key.dtype),
                )
                views[layer] = (view, num_tables + (position if split else 0))
            num_tables += parts
        ordered = [views[layer] for layer in sorted(views)]
        return cls(
            tuple(view for view, _ in ordered),
            tuple(table for _, table in ordered),
            tuple(group.group_id for group in groups),
            tuple(len(group.layers) if group.group_id in split_groups else 0 for group in groups),
            tuple(group.window for group in groups),
        )


def _check_equal_layers(group: LayerGroupLayout) -> None:
    part_bytes, rest = divmod(group.page_bytes, len(group.layers))
    starts = [group.buffer(layer, "k").offset_bytes for layer in group.layers]
    if rest or starts != [position * part_bytes for position in range(len(group.layers))]:
        raise LayoutError(
            f"enable_swa_scratch_reuse needs layers of equal size in each windowed layer group, but those of group "
            f"{group.group_id} (window {group.window}, layers {', '.join(map(str, group.layers))}) differ; set it to "
            "false"
        )


class RankLinks(Protocol):
    """What a rank's model says to the other ranks of its engine during a step, in an order that the batch settles.

    Whatever fails on one rank raises on all those that would wait for it.
    """

    def buffer(self, rows: int, width: int) -> Tensor:
        """Where :meth:`add_up` works: ``[rows, width]`` in the model's dtype. The next call reuses the memory."""
        ...

    def add_up(self, part: Tensor) -> None:
        """Replace ``part``, the first rows of :meth:`buffer`, by the sum of all tensor ranks' in the order of ranks."""
        ...

    def receive(self, residual: Tensor) -> None:
        """Fill ``[T, hidden]`` with what the stage before has sent."""
        ...

    def send(self, residual: Tensor) -> None:
        """Hand ``[T, hidden]`` to the next stage."""
        ...

    def collect(self, part: Tensor | None, rows: int) -> Tensor:
        """The end of a step: ranks of the last stage give their columns of the logits, ``[rows, vocabulary part]``.

        Returns:
            On rank 0 all logits, ``[rows, vocab]``; elsewhere nothing, ``[0, vocab]``.
        """
        ...


class CausalLM(Protocol):
    """A loaded model, or a rank's part of one. Used by one thread at a time."""

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Longest sequence this instance can run, at most ``config.max_seq_len``."""
        ...

    def cache_requirements(self) -> CacheRequirements:
        """What each layer keeps per token; the cache's page layout is built from it."""
        ...

    def forward(self, batch: ForwardBatch, kv: KvPools) -> Tensor:
        """Run one step: write the batch's K and V into their slots and compute logits.

        Returns:
            float32 ``[R, vocab]`` for the wanted rows; none at all on ranks other than 0. The memory is reused by the
            next call.

        Raises:
            ValueError: the batch uses something that this architecture does not have.
        """
        ...


class ArchitectureModule(Protocol):
    """What a module named in :data:`kvmesh.models.architectures.ARCHITECTURES` offers."""

    IGNORED_TENSORS: re.Pattern[str]
    """Checkpoint tensors that may be there and are not used."""

    def parameters(self, config: ModelConfig) -> Sequence[ParameterSpec]:
        """Every parameter, each with the checkpoint tensors it consists of (Hugging Face names)."""
        ...

    def gguf_names(self, config: ModelConfig) -> Mapping[str, GgufName]:
        """Where GGUF keeps each Hugging Face tensor."""
        ...

    def cuts(self, config: ModelConfig, shard: ModelShard) -> Mapping[str, Cut]:
        """The parameters of a rank, by name, as parts of :meth:`parameters`."""
        ...

    def create(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        max_seq_len: int,
        cache_windows: Sequence[int | None],
        shard: ModelShard | None = None,
        links: RankLinks | None = None,
    ) -> CausalLM:
        """The model over its weights; by layer, its cache keeps the latest ``cache_windows`` tokens, None: all."""
        ...
