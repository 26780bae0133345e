"""What a model is, read from GGUF metadata or config.json without loading weights. Never imports torch."""

from __future__ import annotations

from kvmesh.models.config_directory import config_of_directory
from kvmesh.models.config_gguf import config_of_gguf
from kvmesh.models.errors import ModelError
from kvmesh.models.model_config import Activation, ModelConfig, RopeConfig, RopeKind
from kvmesh.models.store import ModelSource

__all__ = ["Activation", "ModelConfig", "RopeConfig", "RopeKind", "read_config"]


def read_config(source: ModelSource) -> ModelConfig:
    """The configuration of a checkpoint.

    Raises:
        ModelError: a file is missing or damaged, or the model needs something that is not supported.
    """
    config = config_of_gguf(source.path) if source.format == "gguf" else config_of_directory(source.path)
    if config.num_heads % config.num_kv_heads:
        raise ModelError(
            f"{source.path} has {config.num_heads} query heads, which {config.num_kv_heads} KV heads do not divide."
        )
    return config
