"""Loads the model of an engine's settings, whole or a rank's part of it, alike in every process of the engine."""

from __future__ import annotations

import os

import torch

from kvmesh.config import WorkerSettings
from kvmesh.kernels import ops
from kvmesh.models.base import CausalLM, RankLinks
from kvmesh.models.registry import load_model
from kvmesh.models.sharding import ModelShard
from kvmesh.models.store import ModelSource

__all__ = ["load", "take_threads"]


def load(
    settings: WorkerSettings,
    source: ModelSource,
    device: torch.device,
    shard: ModelShard | None = None,
    links: RankLinks | None = None,
) -> CausalLM:
    """The model that the settings name.

    Raises:
        ModelError: it cannot be loaded.
    """
    return load_model(
        source,
        device,
        None if settings.dtype == "auto" else getattr(torch, settings.dtype),
        max_seq_len=settings.max_seq_len,
        max_attention_window=settings.kv_cache_config.max_attention_window,
        shard=shard,
        links=links,
    )


def take_threads(settings: WorkerSettings, num_ranks: int = 1) -> int:
    """Let this process compute with its share of the engine's threads; returns how many, at least one."""
    threads = max(1, (settings.num_threads or len(os.sched_getaffinity(0))) // num_ranks)
    torch.set_num_threads(threads)
    ops.set_num_threads(threads)
    return threads
