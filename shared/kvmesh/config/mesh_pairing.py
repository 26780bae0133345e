"""Which context and generation servers of one mesh can never hand a cache on to one another, as settings tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvmesh.config.errors import ConfigError
from kvmesh.config.worker import WorkerSettings

__all__ = ["refuse_unpairable"]


def refuse_unpairable(workers: Iterable[WorkerSettings]) -> None:
    """Refuse a mesh whose two halves read different pages; such a mesh never becomes ready.

    What only a model decides (its windows, the data type of ``auto``) the servers compare themselves.

    Args:
        workers: of the mesh, as they will be told.

    Raises:
        ConfigError: one sentence with every difference and what to do.
    """
    sections = {worker.role: worker for worker in workers}
    context, generation = sections.get("context"), sections.get("generation")
    if context is None or generation is None:
        return
    if problems := list(_problems(context, generation)):
        raise ConfigError(
            f"context and generation servers could never work together: {'; '.join(problems)}; give both the same"
        )


def _problems(context: WorkerSettings, generation: WorkerSettings) -> Iterator[str]:
    for path, left, right in _compared(context, generation):
        if left != right:
            yield f"context.{path} is {left} and generation.{path} is {right}"
    for section, worker in (("context", context), ("generation", generation)):
        if worker.cache_transceiver_config.backend is None:
            yield f"{section}.cache_transceiver_config.backend is null, with which nothing is transferred"


def _compared(context: WorkerSettings, generation: WorkerSettings) -> Iterator[tuple[str, Any, Any]]:
    """What must be equal where both are known: the field and its two values."""
    ours, theirs = context.kv_cache_config, generation.kv_cache_config
    yield "kv_cache_config.tokens_per_block", ours.tokens_per_block, theirs.tokens_per_block
    for path, left, right in (
        ("kv_cache_config.dtype", ours.dtype, theirs.dtype),
        ("dtype", context.dtype, generation.dtype),
    ):
        if "auto" not in (left, right):
            yield path, left, right
    windows, others = ours.max_attention_window, theirs.max_attention_window
    # Windows are repeated over the layers; where one side has none, only the model's length tells.
    if windows is not None and others is not None:
        repeated = len(windows) * len(others)
        if _repeated(windows, repeated) != _repeated(others, repeated):
            yield "kv_cache_config.max_attention_window", windows, others
    if context.served_model_name is not None and generation.served_model_name is not None:
        yield "served_model_name", context.served_model_name, generation.served_model_name


def _repeated(windows: list[int], length: int) -> list[int]:
    return [windows[index % len(windows)] for index in range(length)]
