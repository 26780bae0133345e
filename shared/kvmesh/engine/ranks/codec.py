"""A step on its way from the leader to its followers: a fixed header, then the raw arrays."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from kvmesh.cache.base import Scratch
from kvmesh.engine.step import StepInputs
from kvmesh.engine.tables import StepPlaces

__all__ = ["StepDecoder", "encode_common", "encode_tables"]

# Tokens, sequences, rows of logits, blocks of the longest sequence; of the rank: layer groups, uses of scratch slots.
_COMMON = struct.Struct("<4i")
_OWN = struct.Struct("<2i")
_USE = struct.Struct("<5i")


def encode_common(step: StepInputs) -> bytes:
    """What all ranks need of a step."""
    counts = _COMMON.pack(len(step.token_ids), len(step.context_lens), len(step.logits_rows), step.places.width)
    arrays = (step.logits_rows, step.token_ids, step.positions, step.query_start, step.context_lens)
    return b"".join((counts, *(array.tobytes() for array in arrays)))


def encode_tables(step: StepInputs, groups: Sequence[int]) -> bytes:
    """What the rank with these layer groups needs beside it: their tables, as wide as the longest sequence."""
    uses = [(group, row, scratch) for group in groups for row, scratch in step.scratch.get(group, ())]
    parts = [_OWN.pack(len(groups), len(uses))]
    parts += (step.tables[group][:, : step.places.width].tobytes() for group in groups)
    for group, row, (begin, end, slots) in uses:
        parts += (_USE.pack(group, row, begin, end, len(slots)), slots.astype(np.int32).tobytes())
    return b"".join(parts)


class StepDecoder:
    """Reads steps of one rank.

    Tables are as wide as the leader's, whatever a step needs: kernels may divide their work by that, and results must
    not depend on it.

    Args:
        groups: the rank's layer groups, in the order in which they are sent.
        tokens_per_block: tokens in one page.
        max_batch_size: most sequences in one step.
        max_seq_len: longest sequence, in tokens.
    """

    def __init__(self, groups: Sequence[int], *, tokens_per_block: int, max_batch_size: int, max_seq_len: int) -> None:
        self._tokens_per_block = tokens_per_block
        blocks = -(-max_seq_len // tokens_per_block)
        self._tables = {group: np.zeros((max_batch_size, blocks), dtype=np.int32) for group in groups}
        self._all_rows = np.arange(max_batch_size, dtype=np.int64)

    def decode(self, message: bytearray | memoryview) -> StepInputs:
        """The step in a message of both parts, one after the other; valid while the message is."""
        tokens, sequences, wanted, width = _COMMON.unpack_from(message)
        cursor = _Cursor(message, _COMMON.size)
        logits_rows = cursor.take(wanted, np.int64)
        token_ids, positions = cursor.take(tokens), cursor.take(tokens)
        query_start, context_lens = cursor.take(sequences + 1), cursor.take(sequences)
        num_groups, num_uses = cursor.unpack(_OWN)
        assert num_groups == len(self._tables), "leader and follower disagree about the rank's layer groups"
        tables = {group: table[:sequences] for group, table in self._tables.items()}
        for table in tables.values():
            table[:, :width] = cursor.take(sequences * width).reshape(sequences, width)
        scratch: dict[int, list[tuple[int, Scratch]]] = {}
        for _ in range(num_uses):
            group, row, begin, end, num_slots = cursor.unpack(_USE)
            scratch.setdefault(group, []).append((row, Scratch(begin, end, cursor.take(num_slots))))
        rows = np.repeat(self._all_rows[:sequences], np.diff(query_start))
        places = StepPlaces(rows, positions, query_start, context_lens, self._tokens_per_block)
        return StepInputs(token_ids, positions, query_start, context_lens, logits_rows, tables, scratch, places)


class _Cursor:
    def __init__(self, message: bytearray | memoryview, offset: int) -> None:
        self._message = message
        self._offset = offset

    def take(self, count: int, dtype: type[np.int32 | np.int64] = np.int32) -> np.ndarray:
        array = np.frombuffer(self._message, dtype, count, self._offset)
        self._offset += array.nbytes
        return array

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        values: tuple[int, ...] = form.unpack_from(self._message, self._offset)
        self._offset += form.size
        return values
