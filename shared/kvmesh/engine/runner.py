"""The model runner: packs scheduled chunks into one batch and runs the model on it.

All host buffers are allocated once and filled in place; a step costs a handful of small array writes for each sequence.
"""

from __future__ import annotations

import numpy as np
import torch

from kvmesh.cache.base import Scratch
from kvmesh.engine.scheduler import Chunk
from kvmesh.engine.tables import StepPlaces, group_tables, split_tables, with_scratch
from kvmesh.models.base import CausalLM, ForwardBatch, GroupTables, KvPools

__all__ = ["BatchRunner"]


class BatchRunner:
    """Runs one step's chunks.

    Args:
        model: the loaded model.
        pools: its view of the KV pages.
        split_pools: the same pages with the groups split that may use scratch slots (semantics §3.7), for the steps
            that do; None where the cache gives no scratch slots.
        num_groups: layer groups of the page layout.
        tokens_per_block: tokens in one page.
        max_batch_size: most sequences in one step.
        max_num_tokens: most tokens in one step.
        max_seq_len: longest sequence, in tokens.
        device: where the model runs.
    """

    def __init__(
        self,
        model: CausalLM,
        pools: KvPools,
        *,
        split_pools: KvPools | None = None,
        num_groups: int,
        tokens_per_block: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._pools = pools
        self._split_pools = split_pools
        self._tokens_per_block = tokens_per_block
        self._device = device
        blocks = -(-max_seq_len // tokens_per_block)
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int32)
        self._positions = np.zeros(max_num_tokens, dtype=np.int32)
        self._rows = np.zeros(max_num_tokens, dtype=np.int64)
        self._query_start = np.zeros(max_batch_size + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_batch_size, dtype=np.int32)
        self._logits_rows = np.zeros(max_batch_size, dtype=np.int64)
        self._tables = [np.zeros((max_batch_size, blocks), dtype=np.int32) for _ in range(num_groups)]
        self._slots = [np.zeros(max_num_tokens, dtype=np.int64) for _ in range(num_groups)]
        self._all_positions = np.arange(max_seq_len, dtype=np.int32)

    def run(self, chunks: list[Chunk]) -> torch.Tensor:
        """Compute ``chunks``: their K and V go to their pages.

        Returns:
            float32 ``[R, vocab]`` logits of the chunks that are sampled, in order; valid until the next call.

        Raises:
            NoPageError: a block that is to be written to or read has no page.
        """
        tokens, wanted = self._pack(chunks)
        places = StepPlaces(
            self._rows[:tokens],
            self._positions[:tokens],
            self._query_start[: len(chunks) + 1],
            self._context_lens[: len(chunks)],
            self._tokens_per_block,
        )
        scratch = {} if self._split_pools is None else self._scratch(chunks, self._split_pools.split)
        pools = self._split_pools if scratch and self._split_pools is not None else self._pools
        groups: list[GroupTables] = []
        for group, (whole, slots) in enumerate(zip(self._tables, self._slots, strict=True)):
            table = whole[: len(chunks)]
            for row, chunk in enumerate(chunks):
                assert chunk.seq.cache is not None
                chunk.seq.cache.block_table_into(group, table[row])
            shared = scratch.get(group, ())
            places.require_pages(group, with_scratch(table, shared) if shared else table, pools.windows[group])
            if num_layers := pools.split[group]:
                groups += split_tables(table, num_layers, shared, places, self._device)
            else:
                groups.append(group_tables(table, slots[:tokens], places, self._device))
        batch = ForwardBatch(
            token_ids=self._tensor(self._token_ids[:tokens]),
            positions=self._tensor(self._positions[:tokens]),
            query_start=self._tensor(self._query_start[: len(chunks) + 1]),
            context_lens=self._tensor(self._context_lens[: len(chunks)]),
            groups=groups,
            logits_rows=self._tensor(self._logits_rows[:wanted]),
        )
        return self._model.forward(batch, pools)

    def _scratch(self, chunks: list[Chunk], split: tuple[int, ...]) -> dict[int, list[tuple[int, Scratch]]]:
        """By layer group, the rows of ``chunks`` that use scratch slots in this step."""
        found: dict[int, list[tuple[int, Scratch]]] = {}
        for group, num_layers in enumerate(split):
            for row, chunk in enumerate(chunks if num_layers else ()):
                assert chunk.seq.cache is not None
                if (scratch := chunk.seq.cache.scratch(group)) is not None:
                    found.setdefault(group, []).append((row, scratch))
        return found

    def _pack(self, chunks: list[Chunk]) -> tuple[int, int]:
        """Fill the host buffers; returns the numbers of tokens and of wanted logits rows."""
        offset = wanted = 0
        for row, (seq, start, length, sample) in enumerate(chunks):
            stop = start + length
            end = offset + length
            self._token_ids[offset:end] = seq.history.slice(start, stop)
            self._positions[offset:end] = self._all_positions[start:stop]
            self._rows[offset:end] = row
            self._query_start[row + 1] = end
            self._context_lens[row] = stop
            if sample:
                self._logits_rows[wanted] = end - 1
                wanted += 1
            offset = end
        return offset, wanted

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)
