"""Computes the chunks of one step, so that whatever raises ends none but its own request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from kvmesh.engine.plan import Chunk
from kvmesh.engine.ranks.errors import RanksLostError
from kvmesh.engine.sampler import Sampled, Sampler
from kvmesh.net.faults import fault_point
from kvmesh.telemetry import get_logger

__all__ = ["Computed", "ModelRunner", "compute"]

_log = get_logger("engine.computing")


class ModelRunner(Protocol):
    """Computes chunks; see :class:`kvmesh.engine.runner.BatchRunner`."""

    def run(self, chunks: list[Chunk]) -> torch.Tensor:
        """Logits ``[R, vocab]`` float32, one row for each chunk that is sampled, in order."""
        ...


class Computed(NamedTuple):
    """Chunks that were computed together, or one that could not be."""

    chunks: list[Chunk]
    sampled: list[tuple[Chunk, Sampled]] | None
    """The choice for each chunk that is sampled; None: the model raised, and nothing has changed."""


def compute(runner: ModelRunner, sampler: Sampler, chunks: list[Chunk]) -> Iterator[Computed]:
    """Compute a step. When the batch raises, each of its chunks is tried alone, once: only the culprit fails.

    Computing a chunk again is safe: it writes the same values to the same pages, and no history has grown.
    """
    together = _attempt(runner, sampler, chunks)
    if together.sampled is not None or len(chunks) == 1:
        yield together
        return
    for chunk in chunks:
        yield _attempt(runner, sampler, [chunk])


def _attempt(runner: ModelRunner, sampler: Sampler, chunks: list[Chunk]) -> Computed:
    wanted = [chunk for chunk in chunks if chunk.sample]
    try:
        fault_point("engine.batch")
        logits = runner.run(chunks)
        choices = sampler.sample(logits, [chunk.seq.state for chunk in wanted])
    except RanksLostError:
        raise  # Nothing will ever be computed again: the engine must end.
    except Exception:
        # The border of error isolation.
        _log.exception("batch failed", requests=[chunk.seq.request_id for chunk in chunks])
        return Computed(chunks, None)
    return Computed(chunks, list(zip(wanted, choices, strict=True)))
