"""Block tables of one step: for each layer group, or for each layer of groups that use scratch slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvmesh.cache.base import Scratch
from kvmesh.models.base import GroupTables

__all__ = ["NoPageError", "StepPlaces", "group_tables", "split_tables", "with_scratch"]

NO_PAGE = -1


class NoPageError(RuntimeError):
    """A block that a step writes to or reads has no page: it was never asked for, or given back too early."""


class StepPlaces:
    """Where in their sequences the tokens of a step are, and which blocks it touches.

    Args:
        rows: int64 ``[T]``: the sequence of each token, by its row in the step's tables.
        positions: int32 ``[T]``: index of each token in its sequence.
        query_start: int32 ``[B + 1]``: the first token of each sequence, at least one each.
        context_lens: int32 ``[B]``: tokens of each sequence, those of the step included.
        tokens_per_block: tokens of one page.
    """

    __slots__ = ("_ends", "_starts", "blocks", "offsets", "rows", "tokens_per_block", "width")

    def __init__(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        query_start: np.ndarray,
        context_lens: np.ndarray,
        tokens_per_block: int,
    ) -> None:
        self.rows = rows
        self.blocks = positions // tokens_per_block
        self.offsets = positions % tokens_per_block
        self.tokens_per_block = tokens_per_block
        self._starts = positions[query_start[:-1]]
        self._ends = (context_lens + (tokens_per_block - 1)) // tokens_per_block
        self.width = int(self._ends.max(initial=0))
        """Blocks of the longest sequence."""

    def require_pages(self, group: int, table: np.ndarray, window: int | None) -> None:
        """Check that every block that the step touches has a page.

        A missing page must not become an address: attention would read what lies in front of the pool. One comparison
        a block is nothing beside reading the block.

        Args:
            group: the layer group, for the message.
            table: int32 ``[B, max_blocks]``: pages by sequence and block, -1 where there is none.
            window: of the group; blocks that it has left at a sequence's first token of this step are not touched.

        Raises:
            NoPageError: one has none.
        """
        holes = table[:, : self.width] < 0
        if not holes.any():
            return
        columns = np.arange(self.width)
        holes &= columns < self._ends[:, None]
        if window is not None:
            holes &= columns >= (np.maximum(self._starts + (1 - window), 0) // self.tokens_per_block)[:, None]
        if holes.any():
            row, block = (int(index[0]) for index in np.nonzero(holes))
            raise NoPageError(f"layer group {group}: block {block} of sequence {row} of this step has no page")


def group_tables(table: np.ndarray, slots: np.ndarray, places: StepPlaces, device: torch.device) -> GroupTables:
    """The tables of a group whose layers share one.

    Args:
        table: int32 ``[B, max_blocks]``: pages by sequence and block, -1 where there is none.
        slots: int64 ``[T]``, written to.
        places: of the step's tokens.
        device: where the model runs.
    """
    np.multiply(table[places.rows, places.blocks], places.tokens_per_block, out=slots, casting="unsafe")
    slots += places.offsets
    return GroupTables(_on(device, table), _on(device, slots))


def split_tables(
    table: np.ndarray,
    num_layers: int,
    scratch: Sequence[tuple[int, Scratch]],
    places: StepPlaces,
    device: torch.device,
) -> list[GroupTables]:
    """The tables of a group whose layers have one each, because blocks of this step use scratch slots (semantics §3.7).

    Layer ``j`` of ``L`` finds a page of slot ``s`` at ``s * L + j``, and the ``i``-th scratch block of a sequence at
    ``slots[i // L] * L + i % L``, which is the same for all layers, since one is computed after the other.

    Args:
        table: int32 ``[B, max_blocks]``: slots by sequence and block, -1 where there is none.
        num_layers: ``L``.
        scratch: rows of the table that use scratch slots, and those.
        places: of the step's tokens.
        device: where the model runs.
    """
    used = torch.from_numpy(table[:, : places.width])
    # As wide as the group's own table: kernels may divide their work by that, and results must not depend on it.
    by_layer = torch.empty((num_layers, *table.shape), dtype=torch.int32)
    narrow = by_layer[:, :, : places.width]
    torch.add(used * num_layers, torch.arange(num_layers, dtype=torch.int32)[:, None, None], out=narrow)
    narrow.masked_fill_(used < 0, NO_PAGE)
    for row, (begin, end, slots) in scratch:
        index = np.arange(end - begin)
        pages = slots[index // num_layers] * num_layers + index % num_layers
        by_layer[:, row, begin:end] = torch.from_numpy(pages.astype(np.int32))
    tokens = by_layer[:, torch.from_numpy(places.rows), torch.from_numpy(places.blocks).long()].long()
    tokens = tokens * places.tokens_per_block + torch.from_numpy(places.offsets)
    tables, slots_by_layer = by_layer.to(device), tokens.to(device)
    return [GroupTables(tables[layer], slots_by_layer[layer]) for layer in range(num_layers)]


def with_scratch(table: np.ndarray, scratch: Sequence[tuple[int, Scratch]]) -> np.ndarray:
    """``table`` with scratch blocks marked as having a place, for :meth:`StepPlaces.require_pages`."""
    marked = table.copy()
    for row, (begin, end, slots) in scratch:
        marked[row, begin:end] = slots[0]
    return marked


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
