"""Environment variables that are meant for settings and name none."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.config.coordinator import CoordinatorSettings
from kvmesh.config.errors import ConfigError
from kvmesh.config.indexer import IndexerSettings
from kvmesh.config.mesh import MeshSettings
from kvmesh.config.nearest import nearest_key
from kvmesh.config.router import RouterSettings
from kvmesh.config.sources import ENV_PREFIX
from kvmesh.config.worker import WorkerSettings

__all__ = ["refuse_misspelt"]

_SIMILARITY_CUTOFF = 0.75
"""A swap of two letters in a name of four. Whatever is further away may be anybody's variable."""

_OTHERS = frozenset({"api_key", "coordinator_port", "indexer_port", "models"})
"""Of the commands and of Compose, which come near to settings."""

_SETTINGS = frozenset(
    name
    for settings in (CoordinatorSettings, IndexerSettings, MeshSettings, RouterSettings, WorkerSettings)
    for name in settings.model_fields
)


def refuse_misspelt(variables: Iterable[str]) -> None:
    """Refuse a ``KVMESH_`` variable that no service knows and that is nearly one that some service does.

    Raises:
        ConfigError: there are such; the message names the nearest right one of each.
    """
    problems = []
    for variable in sorted(variables):
        if not variable.startswith(ENV_PREFIX):
            continue
        name, *rest = variable.removeprefix(ENV_PREFIX).lower().split("__")
        if name in _SETTINGS or name in _OTHERS:
            continue
        meant = nearest_key(name, _SETTINGS, _SIMILARITY_CUTOFF)
        if meant is not None:
            right = "__".join((ENV_PREFIX + meant.upper(), *(part.upper() for part in rest)))
            problems.append(f"the environment variable {variable} names no setting; did you mean {right}?")
    if problems:
        raise ConfigError("; ".join(problems))
