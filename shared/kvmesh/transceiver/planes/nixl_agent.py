"""Loading NIXL with the environment that it needs, and naming its errors."""

from __future__ import annotations

import importlib
import os
from collections.abc import MutableMapping
from types import ModuleType
from typing import Final

from kvmesh.transceiver.planes.base import PlaneError
from kvmesh.transceiver.ucx_environment import INFINIBAND, prepare_ucx

__all__ = ["NIXL_MODULES", "load_nixl", "nixl_errors", "prepare_environment"]

NIXL_MODULES: Final = ("nixl_cu13", "nixl_cu12")
"""In order of preference; both work without a GPU."""


def prepare_environment(environment: MutableMapping[str, str], *, bind_host: str, infiniband: bool) -> None:
    """Set what UCX and NIXL read when they are loaded; what is set already stays."""
    environment.setdefault("NIXL_LOG_LEVEL", "ERROR")
    prepare_ucx(environment, bind_host=bind_host, infiniband=infiniband)


def load_nixl(bind_host: str) -> ModuleType:
    """Import NIXL.

    Raises:
        PlaneError: it is not installed.
    """
    prepare_environment(os.environ, bind_host=bind_host, infiniband=INFINIBAND.exists())
    for name in NIXL_MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise PlaneError("NIXL is not installed; run `make venv EXTRAS=engine`")


def nixl_errors(module: ModuleType) -> tuple[type[Exception], ...]:
    """Every exception that NIXL raises; they have no base of their own."""
    bindings = importlib.import_module(f"{module.__name__}._bindings")
    return tuple(value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception))
