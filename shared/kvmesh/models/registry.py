"""From a checkpoint to a model that runs: pick the architecture, check and load the weights."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import cast

import torch

from kvmesh.kernels.ops import QuantizedWeight
from kvmesh.models.architectures import ARCHITECTURES
from kvmesh.models.attention_windows import effective_windows
from kvmesh.models.base import ArchitectureModule, CausalLM, RankLinks
from kvmesh.models.checkpoint import fingerprint
from kvmesh.models.config import ModelConfig, read_config
from kvmesh.models.errors import ModelError
from kvmesh.models.files import cache_root
from kvmesh.models.parameters import (
    ModelWeights,
    check_parameters,
    cut_parameters,
    load_cuts,
    load_parameters,
    shared_parameters,
)
from kvmesh.models.quantized import quantized_parameters
from kvmesh.models.sharding import ModelShard, shard_of
from kvmesh.models.store import ModelSource
from kvmesh.models.weights import Checkpoint, GgufCheckpoint, SafetensorsCheckpoint

__all__ = ["default_dtype", "load_model"]


def default_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of ``dtype: auto``: float32 on a CPU, else the checkpoint's own 16-bit dtype, else bfloat16."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def load_model(
    source: ModelSource,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    max_seq_len: int | None = None,
    max_attention_window: Sequence[int] | None = None,
    shard: ModelShard | None = None,
    links: RankLinks | None = None,
) -> CausalLM:
    """Load a checkpoint, or a rank's part of it.

    Args:
        source: the checkpoint.
        device: where its parameters go.
        dtype: of parameters, activations and KV cache; None is :func:`default_dtype`.
        max_seq_len: longest sequence to prepare for; None is the model's own limit.
        max_attention_window: as :func:`kvmesh.models.attention_windows.effective_windows` takes it.
        shard: which part; None: the whole model.
        links: to the other ranks, where there are any.

    Raises:
        ModelError: the checkpoint is damaged, incomplete or not supported, ``max_seq_len`` exceeds its limit, or
            ``max_attention_window`` does not suit its layers.
    """
    config = read_config(source)
    device = torch.device(device)
    dtype = dtype or default_dtype(config, device)
    max_seq_len = max_seq_len or config.max_seq_len
    if max_seq_len > config.max_seq_len:
        raise ModelError(f"max_seq_len {max_seq_len} exceeds the {config.max_seq_len} tokens {source.name} can take.")
    windows = effective_windows(config.windows, max_attention_window, max_seq_len)
    module = _module_of(config)
    specs = module.parameters(config)
    checkpoint: Checkpoint = (
        GgufCheckpoint(source.path, module.gguf_names(config))
        if source.format == "gguf"
        else SafetensorsCheckpoint(source.path)
    )
    check_parameters(checkpoint, specs, module.IGNORED_TENSORS)
    on_cpu = device.type == "cpu" and dtype == torch.float32
    shard = shard or shard_of(config)
    cuts = None if shard.is_whole else module.cuts(config, shard)
    quantized: dict[str, QuantizedWeight] = quantized_parameters(checkpoint, specs, cuts) if on_cpu else {}
    if on_cpu and (source.format == "gguf" or config.dtype != "float32"):
        dense = shared_parameters(checkpoint, specs, cache_root() / "derived", source.name, fingerprint(source.path))
        dense = dense if cuts is None else cut_parameters(dense, cuts)
    elif cuts is None:
        dense = load_parameters(checkpoint, specs, device, dtype)
    else:
        dense = load_cuts(checkpoint, specs, cuts, device, dtype)
    return module.create(config, ModelWeights(dense, quantized), max_seq_len, windows, shard, links)


def _module_of(config: ModelConfig) -> ArchitectureModule:
    row = next(row for row in ARCHITECTURES if row.name == config.architecture)
    module: object = importlib.import_module(row.module)
    return cast("ArchitectureModule", module)
