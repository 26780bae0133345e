"""From the settings of a server with attention data-parallel ranks to those of each rank's engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvmesh.config.endpoints import tcp_port
from kvmesh.config.worker import DEFAULT_CPU_MEMORY_BYTES, WorkerSettings
from kvmesh.protocol.ranks import DpSeat, rank_instance_id

__all__ = ["attention_dp_problems", "rank_memory_bytes", "rank_settings"]


def rank_settings(settings: WorkerSettings, seat: DpSeat, *, cpu_count: int) -> WorkerSettings:
    """What the engine of one rank is told: it is an engine of one rank, with a name and a share of its own.

    The ranks of a server share what is the machine's: its threads, and the memory of a CPU device. What
    ``kv_cache_config`` states holds for each rank, as in TensorRT-LLM, whose ranks have a GPU each.

    Args:
        settings: the server's, its ``instance_id`` settled.
        seat: which rank; ``size`` is the server's ``dp_size``.
        cpu_count: cores that all engines of the server may use where ``num_threads`` is not set.
    """
    if not settings.enable_attention_dp:
        return settings
    alone: dict[str, Any] = {"tensor_parallel_size": 1, "enable_attention_dp": False}
    if seat.size == 1:
        return settings.model_copy(update=alone)
    return settings.model_copy(
        update={
            "instance_id": rank_instance_id(settings.instance_id or "", seat),
            "num_threads": _share(settings.num_threads or cpu_count, seat),
            "device_memory_bytes": rank_memory_bytes(settings),
            **alone,
        }
    )


def rank_memory_bytes(settings: WorkerSettings) -> int:
    """Byte budget of the CPU device of one rank."""
    return (settings.device_memory_bytes or DEFAULT_CPU_MEMORY_BYTES) // settings.dp_size


def attention_dp_problems(settings: WorkerSettings) -> Iterator[str]:
    """Why these ranks cannot be, one sentence each."""
    if not settings.enable_attention_dp:
        return
    if settings.pipeline_parallel_size != 1:
        yield (
            "enable_attention_dp needs pipeline_parallel_size=1, not "
            f"{settings.pipeline_parallel_size}: each of its ranks has all layers"
        )
    events = settings.kv_cache_config.kv_events_config
    if settings.dp_size == 1 or events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(events, name)
        if endpoint is not None and endpoint.startswith("tcp://") and tcp_port(endpoint) is None:
            yield (
                f"kv_events_config.{name} {endpoint} needs a fixed port: that of rank 0, from which those of the "
                f"{settings.dp_size} attention data-parallel ranks count up"
            )


def _share(total: int, seat: DpSeat) -> int:
    """A rank's part of ``total``, the first ranks taking what does not divide; 1 at least."""
    each, left = divmod(total, seat.size)
    return max(1, each + (seat.rank < left))
