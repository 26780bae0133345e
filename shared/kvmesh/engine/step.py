"""One step as plain arrays, and the computation of a rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvmesh.cache.base import Scratch
from kvmesh.engine.tables import StepPlaces, group_tables, split_tables
from kvmesh.models.base import CausalLM, ForwardBatch, GroupTables, KvPools

__all__ = ["StepComputer", "StepInputs"]


class StepInputs(NamedTuple):
    """What a step computes: ``T`` tokens of ``B`` sequences, packed as :class:`kvmesh.models.base.ForwardBatch` has it.

    The arrays are valid until the next step.
    """

    token_ids: np.ndarray
    """int32 ``[T]``."""
    positions: np.ndarray
    """int32 ``[T]``."""
    query_start: np.ndarray
    """int32 ``[B + 1]``."""
    context_lens: np.ndarray
    """int32 ``[B]``."""
    logits_rows: np.ndarray
    """int64 ``[R]``."""
    tables: Mapping[int, np.ndarray]
    """By layer group, int32 ``[B, max_blocks]``: slots by sequence and block, -1 where there is none."""
    scratch: Mapping[int, Sequence[tuple[int, Scratch]]]
    """By layer group, the rows that use scratch slots in this step."""
    places: StepPlaces


class StepComputer:
    """Runs a rank's part of steps.

    Args:
        model: the loaded model, or the rank's part of it.
        pools: its view of the KV pages.
        split_pools: the same pages with the groups split that may use scratch slots (semantics §3.7), for the steps
            that do; None where the cache gives no scratch slots.
        max_num_tokens: most tokens in one step.
        device: where the model runs.
    """

    def __init__(
        self,
        model: CausalLM,
        pools: KvPools,
        split_pools: KvPools | None,
        *,
        max_num_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pools = pools
        self._split_pools = split_pools
        self._device = device
        self._slots = [np.zeros(max_num_tokens, dtype=np.int64) for _ in pools.groups]

    def compute(self, step: StepInputs) -> torch.Tensor:
        """Write the step's K and V to their pages.

        Returns:
            What :meth:`kvmesh.models.base.CausalLM.forward` does.
        """
        pools = self._pools
        if self._split_pools is not None and any(group in step.scratch for group in pools.groups):
            pools = self._split_pools
        groups: list[GroupTables] = []
        for group, num_layers, slots in zip(pools.groups, pools.split, self._slots, strict=True):
            table = step.tables[group]
            if num_layers:
                groups += split_tables(table, num_layers, step.scratch.get(group, ()), step.places, self._device)
            else:
                groups.append(group_tables(table, slots[: len(step.positions)], step.places, self._device))
        batch = ForwardBatch(
            token_ids=self._tensor(step.token_ids),
            positions=self._tensor(step.positions),
            query_start=self._tensor(step.query_start),
            context_lens=self._tensor(step.context_lens),
            groups=groups,
            logits_rows=self._tensor(step.logits_rows),
        )
        return self._model.forward(batch, pools)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)
