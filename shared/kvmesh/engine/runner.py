"""The model runner: packs scheduled chunks into one batch and runs the model on it.

All host buffers are allocated once and filled in place; a step costs a handful of small array writes for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from kvmesh.cache.base import Scratch
from kvmesh.engine.scheduler import Chunk
from kvmesh.engine.step import StepComputer, StepInputs
from kvmesh.engine.tables import StepPlaces, with_scratch

__all__ = ["BatchRunner", "OtherRanks"]


class OtherRanks(Protocol):
    """The engine's ranks that compute every step along with this one."""

    def run(self, step: StepInputs, compute: Callable[[StepInputs], torch.Tensor]) -> torch.Tensor:
        """Have all ranks compute a step, this one with ``compute``; returns what that does."""
        ...


class BatchRunner:
    """Runs one step's chunks.

    Args:
        computer: runs this rank's part.
        windows: by layer group of all ranks, how many latest tokens its pages are kept for; None: all.
        scratch_groups: the layer groups that may use scratch slots.
        tokens_per_block: tokens in one page.
        max_batch_size: most sequences in one step.
        max_num_tokens: most tokens in one step.
        max_seq_len: longest sequence, in tokens.
        ranks: the other ranks of the engine, where there are any.
    """

    def __init__(
        self,
        computer: StepComputer,
        *,
        windows: Sequence[int | None],
        scratch_groups: Sequence[int] = (),
        tokens_per_block: int,
        max_batch_size: int,
        max_num_tokens: int,
        max_seq_len: int,
        ranks: OtherRanks | None = None,
    ) -> None:
        self._computer = computer
        self._windows = tuple(windows)
        self._scratch_groups = tuple(scratch_groups)
        self._tokens_per_block = tokens_per_block
        self._ranks = ranks
        blocks = -(-max_seq_len // tokens_per_block)
        self._token_ids = np.zeros(max_num_tokens, dtype=np.int32)
        self._positions = np.zeros(max_num_tokens, dtype=np.int32)
        self._rows = np.zeros(max_num_tokens, dtype=np.int64)
        self._query_start = np.zeros(max_batch_size + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_batch_size, dtype=np.int32)
        self._logits_rows = np.zeros(max_batch_size, dtype=np.int64)
        self._tables = [np.zeros((max_batch_size, blocks), dtype=np.int32) for _ in windows]
        self._all_positions = np.arange(max_seq_len, dtype=np.int32)

    def run(self, chunks: list[Chunk]) -> torch.Tensor:
        """Compute ``chunks``: their K and V go to their pages.

        Returns:
            float32 ``[R, vocab]`` logits of the chunks that are sampled, in order; valid until the next call.

        Raises:
            NoPageError: a block that is to be written to or read has no page.
            kvmesh.engine.ranks.errors.StepFailedError: another rank could not compute its part.
            kvmesh.engine.ranks.errors.RanksLostError: another rank is gone; the engine cannot go on.
        """
        step = self._inputs(chunks)
        if self._ranks is None:
            return self._computer.compute(step)
        return self._ranks.run(step, self._computer.compute)

    def _inputs(self, chunks: list[Chunk]) -> StepInputs:
        tokens, wanted = self._pack(chunks)
        places = StepPlaces(
            self._rows[:tokens],
            self._positions[:tokens],
            self._query_start[: len(chunks) + 1],
            self._context_lens[: len(chunks)],
            self._tokens_per_block,
        )
        scratch = self._scratch(chunks)
        tables: dict[int, np.ndarray] = {}
        for group, (whole, window) in enumerate(zip(self._tables, self._windows, strict=True)):
            table = tables[group] = whole[: len(chunks)]
            for row, chunk in enumerate(chunks):
                assert chunk.seq.cache is not None
                chunk.seq.cache.block_table_into(group, table[row])
            shared = scratch.get(group)
            places.require_pages(group, with_scratch(table, shared) if shared else table, window)
        return StepInputs(
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            query_start=self._query_start[: len(chunks) + 1],
            context_lens=self._context_lens[: len(chunks)],
            logits_rows=self._logits_rows[:wanted],
            tables=tables,
            scratch=scratch,
            places=places,
        )

    def _scratch(self, chunks: list[Chunk]) -> dict[int, list[tuple[int, Scratch]]]:
        """By layer group, the rows of ``chunks`` that use scratch slots in this step."""
        found: dict[int, list[tuple[int, Scratch]]] = {}
        for group in self._scratch_groups:
            for row, chunk in enumerate(chunks):
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
