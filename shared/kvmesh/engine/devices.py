"""On which device an engine computes and keeps its pages, and how much of it is its own."""

from __future__ import annotations

import torch

from kvmesh.cache.cuda_device import CudaDevice
from kvmesh.cache.device import CpuDevice, Device
from kvmesh.config import ConfigError, WorkerSettings
from kvmesh.config.worker import DEFAULT_CPU_MEMORY_BYTES
from kvmesh.protocol.ranks import DpSeat

__all__ = ["cache_device", "choose_device", "with_share_of_device"]


def choose_device(settings: WorkerSettings, seat: DpSeat) -> torch.device:
    """Where the engine of this attention data-parallel rank computes; ranks take turns with the GPUs.

    Raises:
        ConfigError: ``device`` is cuda, and there is none.
    """
    if settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise ConfigError("device is cuda, but this machine has no usable CUDA GPU; set device to cpu or auto")
        return torch.device("cuda", seat.rank % torch.cuda.device_count())
    return torch.device("cpu")


def with_share_of_device(settings: WorkerSettings, device: torch.device, seat: DpSeat) -> WorkerSettings:
    """The settings with a part of the free memory where a GPU has several ranks; each of them takes its part."""
    if device.type != "cuda" or seat.size == 1:
        return settings
    sharing = len(range(device.index, seat.size, torch.cuda.device_count()))
    cache = settings.kv_cache_config
    fraction = None if cache.free_gpu_memory_fraction is None else cache.free_gpu_memory_fraction / sharing
    return settings.model_copy(
        update={"kv_cache_config": cache.model_copy(update={"free_gpu_memory_fraction": fraction})}
    )


def cache_device(settings: WorkerSettings, device: torch.device) -> Device:
    """The same device as the cache sees it; of a CPU, the memory that the settings state."""
    if device.type == "cuda":
        return CudaDevice(device.index or 0)
    return CpuDevice(settings.device_memory_bytes or DEFAULT_CPU_MEMORY_BYTES)
