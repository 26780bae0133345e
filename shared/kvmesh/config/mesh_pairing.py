"""Which context and generation servers of one mesh can never hand a cache on to one another, as settings tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvmesh.config.errors import ConfigError
from kvmesh.config.router import ScheduleStyle
from kvmesh.config.transfer_backend import Resolved, TransceiverConfigError, resolve
from kvmesh.config.transfer_facts import server_facts
from kvmesh.config.worker import WorkerSettings

__all__ = ["refuse_unpairable"]


def refuse_unpairable(
    workers: Iterable[WorkerSettings],
    *,
    schedule_style: ScheduleStyle,
    environment: Mapping[str, str],
    may_have_gpu: bool,
) -> None:
    """Refuse a mesh whose two halves read different pages; such a mesh never becomes ready.

    What only a model decides (its windows, the data type of ``auto``) the servers compare themselves.

    Args:
        workers: of the mesh, as they will be told.
        schedule_style: of the router.
        environment: of the servers; it may select the backend.
        may_have_gpu: whether ``device: auto`` may turn out to be CUDA.

    Raises:
        ConfigError: one sentence with every difference and what to do.
    """
    sections = {worker.role: worker for worker in workers}
    context, generation = sections.get("context"), sections.get("generation")
    if context is None or generation is None:
        return
    if schedule_style == "context_first" and context.cache_transceiver_config.enable_pipelined_transfer:
        raise ConfigError(
            "context.cache_transceiver_config.enable_pipelined_transfer needs router.schedule_style generation_first, "
            "not context_first; set it, or turn pipelined transfers off"
        )
    problems = list(_problems(context, generation))
    if not problems and (ways := _ways(context, generation, environment, may_have_gpu)) is not None:
        problems.append(
            f"context.cache_transceiver_config comes to backend {_shown(ways[0])} and "
            f"generation.cache_transceiver_config to {_shown(ways[1])}"
        )
    if problems:
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


def _ways(
    context: WorkerSettings, generation: WorkerSettings, environment: Mapping[str, str], may_have_gpu: bool
) -> tuple[Resolved, Resolved] | None:
    """The two ways of moving pages where they differ whatever the devices turn out to be; None where they may agree."""
    found = None
    for gpu in (False, True) if may_have_gpu else (False,):
        try:
            ours, theirs = (_resolved(worker, environment, gpu) for worker in (context, generation))
        except TransceiverConfigError:
            continue  # each server says by itself what is wrong with it
        if ours is None or theirs is None or ours[:2] == theirs[:2]:
            return None
        found = found or (ours, theirs)
    return found


def _resolved(worker: WorkerSettings, environment: Mapping[str, str], gpu: bool) -> Resolved | None:
    on_cuda = worker.device == "cuda" or (worker.device == "auto" and gpu)
    return resolve(worker.cache_transceiver_config, environment, server_facts(worker, "cuda" if on_cuda else "cpu"))


def _shown(way: Resolved) -> str:
    backend = "DEFAULT (the built-in plane)" if way.backend == "BUILTIN" else way.backend
    return f"{backend} with runtime {way.runtime}"


def _repeated(windows: list[int], length: int) -> list[int]:
    return [windows[index % len(windows)] for index in range(length)]
