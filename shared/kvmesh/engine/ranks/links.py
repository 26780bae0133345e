"""What the ranks of an engine say to each other during a step: gloo collectives in an order that the step settles.

A sum over tensor ranks gathers all parts and adds them up in the order of ranks, so that a token's result does not
depend on where in the batch it is (a ring's order of additions does). Every message carries a mark: 0, or 1 + the rank
that could not compute its part. A rank that fails goes through the rest of its messages all the same, marked, and so
do all that get a marked one: nobody waits for anybody that has left, and all ranks leave a failed step at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Work

from kvmesh.engine.ranks.errors import RanksLostError, StepFailedError
from kvmesh.models.config import ModelConfig
from kvmesh.models.sharding import ModelShard, Span, vocabulary_of
from kvmesh.net.faults import fault_point

__all__ = ["StepLinks"]

_RESIDUAL_TAG, _LOGITS_TAG = 1, 2

_Group = Any  # a ProcessGroupGloo, of whose methods torch's stubs know few

SUMS_PER_LAYER = 2
"""After attention's output and after the feed-forward part."""


class StepLinks:
    """A rank's :class:`kvmesh.models.base.RankLinks`.

    Args:
        config: of the whole model.
        shard: the rank's part of it.
        step_timeout_s: longest wait for another rank within a step.
    """

    def __init__(self, config: ModelConfig, shard: ModelShard, step_timeout_s: float) -> None:
        self._config = config
        self._shard = shard
        self._timeout = timedelta(seconds=step_timeout_s)
        self._all: _Group | None = None
        self._tensor_ranks: _Group | None = None
        self._dtype = torch.float32
        self._buffer = self._gathered = self._message = torch.empty(0)
        self._rows = self._wanted = 0
        self._sums_left = 0
        self._received = self._sent = self._collected = True
        self._mark = 0
        self._fault = f"engine.rank{shard.rank}.sum"

    def join(self, meeting_point: Path, timeout_s: float, dtype: torch.dtype) -> None:
        """Meet the other ranks; all must call this at about the same time.

        Args:
            meeting_point: a file that all ranks can write, and nobody else; it need not exist.
            timeout_s: longest wait.
            dtype: of the model's activations.

        Raises:
            RuntimeError: not all ranks have come in time.
        """
        shard, world_size = self._shard, self._shard.tp_size * self._shard.pp_size
        self._dtype = dtype
        self._buffer, self._gathered, self._message = (torch.empty(0, dtype=dtype) for _ in range(3))
        store = FileStore(str(meeting_point), world_size)
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        self._all = ProcessGroupGloo(PrefixStore("all", store), shard.rank, world_size, timeout)
        self._all._set_default_timeout(self._timeout)  # noqa: SLF001 - the only name it has
        if shard.tp_size > 1:
            stage = PrefixStore(f"stage{shard.stage}", store)
            self._tensor_ranks = ProcessGroupGloo(stage, shard.tensor_rank, shard.tp_size, timeout)
            self._tensor_ranks._set_default_timeout(self._timeout)  # noqa: SLF001

    def run(self, rows: int, wanted: int, compute: Callable[[], Tensor]) -> Tensor:
        """Take part in one step.

        Args:
            rows: its tokens.
            wanted: its rows of logits.
            compute: the rank's part; it calls the other methods.

        Raises:
            StepFailedError: another rank has failed; this one is through with the step.
            RanksLostError: another rank has gone.
            Exception: what ``compute`` raises; this rank is through with the step.
        """
        shard = self._shard
        self._rows, self._wanted, self._mark = rows, wanted, 0
        self._sums_left = SUMS_PER_LAYER * len(shard.layers) if shard.tp_size > 1 else 0
        self._received, self._sent, self._collected = shard.is_first, shard.is_last, False
        try:
            return compute()
        except RanksLostError:
            raise
        except Exception:
            with torch.inference_mode():
                self._abandon()
            raise

    def buffer(self, rows: int, width: int) -> Tensor:
        """See :class:`kvmesh.models.base.RankLinks`."""
        return self._flat(rows * width)[: rows * width].view(rows, width)

    def add_up(self, part: Tensor) -> None:
        """See :class:`kvmesh.models.base.RankLinks`."""
        fault_point(self._fault)
        if self._tensor_ranks is None:
            return
        parts = self._gather(part.numel())
        total = part.view(-1)
        torch.add(parts[0], parts[1], out=total)
        for other in parts[2:]:
            total.add_(other)

    def receive(self, residual: Tensor) -> None:
        """See :class:`kvmesh.models.base.RankLinks`."""
        residual.view(-1).copy_(self._receive_residual(residual.numel()))

    def send(self, residual: Tensor) -> None:
        """See :class:`kvmesh.models.base.RankLinks`."""
        count = residual.numel()
        message = self._flat(count)
        message[:count].copy_(residual.view(-1))
        self._send_residual(message)

    def collect(self, part: Tensor | None, rows: int) -> Tensor:
        """See :class:`kvmesh.models.base.RankLinks`."""
        shard, vocab_size = self._shard, self._config.vocab_size
        if shard.rank != 0:
            if part is not None:
                message = self._flat(part.numel())
                message[: part.numel()].copy_(part.reshape(-1))
                self._send_logits(message)
            self._collected = True
            return torch.empty((0, vocab_size), dtype=self._dtype)
        logits = torch.empty((rows, vocab_size), dtype=self._dtype)
        if part is not None:
            logits[:, shard.vocabulary.start : shard.vocabulary.stop] = part
        self._receive_logits(logits)
        return logits

    # Each of the following is one message, which is sent and received whether the step goes well or not.

    def _gather(self, count: int) -> list[Tensor]:
        assert self._tensor_ranks is not None
        size = self._shard.tp_size
        message = self._flat(count)
        message[count] = self._mark
        if self._gathered.numel() < size * (count + 1):
            self._gathered = torch.empty(size * (count + 1), dtype=self._dtype)
        gathered = self._gathered[: size * (count + 1)]
        self._sums_left -= 1
        self._finish(lambda group: group._allgather_base(gathered, message), self._tensor_ranks)  # noqa: SLF001
        table = gathered.view(size, count + 1)
        mark = int(table[:, count].max())
        if mark:
            self._sums_left = 0  # All of the stage have seen it.
        self._heed(mark)
        return [table[rank, :count] for rank in range(size)]

    def _receive_residual(self, count: int) -> Tensor:
        message = self._room(count)
        self._received = True
        self._finish(lambda group: group.recv([message], self._shard.rank - self._shard.tp_size, _RESIDUAL_TAG))
        self._heed(int(message[count]))
        return message[:count]

    def _send_residual(self, message: Tensor) -> None:
        message[-1] = self._mark
        self._sent = True
        self._finish(lambda group: group.send([message], self._shard.rank + self._shard.tp_size, _RESIDUAL_TAG))

    def _send_logits(self, message: Tensor) -> None:
        message[-1] = self._mark
        self._collected = True
        self._finish(lambda group: group.send([message], 0, _LOGITS_TAG))

    def _receive_logits(self, logits: Tensor) -> None:
        """Fill in the columns of other ranks. All messages are taken before a marked one is heeded."""
        self._collected = True
        mark = 0
        for rank, span in self._logits_from():
            count = logits.shape[0] * span.length
            message = self._room(count)
            self._finish(partial(_receive, message, rank))
            logits[:, span.start : span.stop] = message[:count].view(logits.shape[0], span.length)
            mark = max(mark, int(message[count]))
        self._heed(mark)

    def _abandon(self) -> None:
        """Go through the messages that are left of this step, marked."""
        shard, hidden = self._shard, self._config.hidden_size
        self._mark = self._mark or 1 + shard.rank
        if not self._received:
            with suppress(StepFailedError):
                self._receive_residual(self._rows * hidden)
        if self._sums_left:
            # The others leave their sums with this one. In the last stage the last two have the wanted rows only.
            narrow = shard.is_last and self._sums_left <= SUMS_PER_LAYER
            with suppress(StepFailedError):
                self._gather((min(self._rows, self._wanted) if narrow else self._rows) * hidden)
        if not self._sent:
            self._send_residual(self._flat(self._rows * hidden))
        if not self._collected:
            self._abandon_logits()

    def _abandon_logits(self) -> None:
        shard = self._shard
        if shard.rank == 0:
            with suppress(StepFailedError):
                self._receive_logits(torch.empty((self._wanted, self._config.vocab_size), dtype=self._dtype))
        elif shard.is_last:
            self._send_logits(self._flat(self._wanted * shard.vocabulary.length))

    def _logits_from(self) -> list[tuple[int, Span]]:
        """The ranks that send logits to rank 0, and their columns."""
        shard, vocab_size = self._shard, self._config.vocab_size
        first = (shard.pp_size - 1) * shard.tp_size
        return [
            (first + rank, vocabulary_of(rank, shard.tp_size, vocab_size))
            for rank in range(shard.tp_size)
            if first + rank
        ]

    def _heed(self, mark: int) -> None:
        if mark:
            self._mark = mark
            raise StepFailedError(f"rank {mark - 1} could not compute its part of a step; its log says why")

    def _flat(self, count: int) -> Tensor:
        """Room for ``count`` numbers and the mark; always the same memory."""
        if self._buffer.numel() <= count:
            self._buffer = torch.empty(count + 1, dtype=self._dtype)
        return self._buffer[: count + 1]

    def _room(self, count: int) -> Tensor:
        """The same, for what comes in."""
        if self._message.numel() <= count:
            self._message = torch.empty(count + 1, dtype=self._dtype)
        return self._message[: count + 1]

    def _finish(self, start: Callable[[_Group], Work], group: _Group | None = None) -> None:
        group = group or self._all
        assert group is not None, "the ranks have not met"
        try:
            start(group).wait(self._timeout)
        except RuntimeError as error:
            reason = str(error).splitlines()[0] if str(error) else "no reason given"
            raise RanksLostError(f"rank {self._shard.rank} cannot reach another rank: {reason}") from error


def _receive(message: Tensor, rank: int, group: _Group) -> Work:
    work: Work = group.recv([message], rank, _LOGITS_TAG)
    return work
