"""Block tables of one step: for each layer group, or for each layer of groups that use scratch slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvmesh.cache.base import Scratch
from kvmesh.models.base import GroupTables

__all__ = ["NoPageError", "TokenPlaces", "group_tables", "split_tables"]

NO_PAGE = -1


class NoPageError(RuntimeError):
    """A token of a step has no page to go to: the cache has not been asked for it, or has given it back too early."""


class TokenPlaces:
    """Where in their sequences the tokens of a step are.

    Args:
        rows: int64 ``[T]``: the sequence of each token, by its row in the step's tables.
        positions: int32 ``[T]``: index of each token in its sequence.
        tokens_per_block: tokens of one page.
        width: blocks of the longest sequence of the step.
    """

    __slots__ = ("blocks", "offsets", "rows", "tokens_per_block", "width")

    def __init__(self, rows: np.ndarray, positions: np.ndarray, tokens_per_block: int, width: int) -> None:
        self.rows = rows
        self.blocks = positions // tokens_per_block
        self.offsets = positions % tokens_per_block
        self.tokens_per_block = tokens_per_block
        self.width = width


def group_tables(
    group: int, table: np.ndarray, slots: np.ndarray, places: TokenPlaces, device: torch.device
) -> GroupTables:
    """The tables of a group whose layers share one.

    Args:
        group: its id, for the message.
        table: int32 ``[B, max_blocks]``: pages by sequence and block, -1 where there is none.
        slots: int64 ``[T]``, written to.
        places: of the step's tokens.
        device: where the model runs.

    Raises:
        NoPageError: one of the tokens would go to a block without a page.
    """
    np.multiply(table[places.rows, places.blocks], places.tokens_per_block, out=slots, casting="unsafe")
    slots += places.offsets
    if slots.size and int(slots.min()) < 0:
        raise NoPageError(f"layer group {group}: a token of this step has no page")
    return GroupTables(_on(device, table), _on(device, slots))


def split_tables(
    group: int,
    table: np.ndarray,
    num_layers: int,
    scratch: Sequence[tuple[int, Scratch]],
    places: TokenPlaces,
    device: torch.device,
) -> list[GroupTables]:
    """The tables of a group whose layers have one each, because blocks of this step use scratch slots (semantics §3.7).

    Layer ``j`` of ``L`` finds a page of slot ``s`` at ``s * L + j``, and the ``i``-th scratch block of a sequence at
    ``slots[i // L] * L + i % L``, which is the same for all layers, since one is computed after the other.

    Args:
        group: its id, for the message.
        table: int32 ``[B, max_blocks]``: slots by sequence and block, -1 where there is none.
        num_layers: ``L``.
        scratch: rows of the table that use scratch slots, and those.
        places: of the step's tokens.
        device: where the model runs.

    Raises:
        NoPageError: one of the tokens would go to a block without a page.
    """
    used = torch.from_numpy(table[:, : places.width])
    # As wide as the group's own table: kernels may divide their work by that, and results must not depend on it.
    by_layer = torch.full((num_layers, *table.shape), NO_PAGE, dtype=torch.int32)
    narrow = by_layer[:, :, : places.width]
    torch.add(used * num_layers, torch.arange(num_layers, dtype=torch.int32)[:, None, None], out=narrow)
    narrow.masked_fill_(used < 0, NO_PAGE)
    for row, (begin, end, slots) in scratch:
        index = np.arange(end - begin)
        pages = slots[index // num_layers] * num_layers + index % num_layers
        by_layer[:, row, begin:end] = torch.from_numpy(pages.astype(np.int32))
    tokens = by_layer[:, torch.from_numpy(places.rows), torch.from_numpy(places.blocks).long()].long()
    if tokens.numel() and int(tokens.min()) < 0:
        raise NoPageError(f"layer group {group}: a token of this step has no page and no scratch slot")
    tokens = tokens * places.tokens_per_block + torch.from_numpy(places.offsets)
    tables, slots_by_layer = by_layer.to(device), tokens.to(device)
    return [GroupTables(tables[layer], slots_by_layer[layer]) for layer in range(num_layers)]


def _on(device: torch.device, array: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
