"""What can be known to be wrong with a worker's settings before anything is started. Never imports torch."""

from __future__ import annotations

import os

from kvmesh.config import ConfigError, WorkerSettings
from kvmesh.config.startup import refuse_impossible, refuse_unsupported
from kvmesh.config.transfer_backend import (
    ServerFacts,
    TransceiverConfigError,
    nixl_is_installed,
    refuse_unbuilt,
    resolve,
)
from kvmesh.models.config import read_config
from kvmesh.models.store import ModelSource

__all__ = ["check_model", "check_settings"]


def check_settings(settings: WorkerSettings) -> None:
    """Refuse settings that no model makes possible.

    Raises:
        ConfigError: the message names the fields and says what to do.
    """
    refuse_unsupported(settings)
    transfers = settings.cache_transceiver_config
    # With 'auto' the engine may still find a GPU: what only then is wrong, it says itself.
    facts = ServerFacts(pool_device="cuda" if settings.device == "cuda" else "cpu", nixl_installed=nixl_is_installed())
    try:
        resolved = resolve(transfers, os.environ, facts)
        if resolved is not None:
            refuse_unbuilt(transfers, resolved)
    except TransceiverConfigError as error:
        raise ConfigError(str(error)) from error
    if resolved is not None and not settings.cluster_secret:
        raise ConfigError(
            f"cache_transceiver_config.backend {transfers.backend} needs a cluster secret: set KVMESH_CLUSTER_SECRET "
            "or cluster_secret_file to the same on all servers, or leave backend out where nothing is transferred"
        )


def check_model(settings: WorkerSettings, source: ModelSource) -> None:
    """Refuse settings that are impossible with this model; only the checkpoint's head is read.

    Raises:
        ConfigError: the message names the fields and says what to do.
        ModelError: the model is not supported.
    """
    config = read_config(source)
    limit = settings.max_seq_len or config.max_seq_len
    if limit > config.max_seq_len:
        raise ConfigError(
            f"max_seq_len {limit} exceeds the {config.max_seq_len} tokens that {source.name} takes; "
            "lower it, or leave it out"
        )
    refuse_impossible(settings, max_seq_len=limit)
