"""Loading NIXL with the environment that it needs, and naming its errors."""

from __future__ import annotations

import importlib
import ipaddress
import os
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Final

from kvmesh.transceiver.planes.base import PlaneError

__all__ = ["NIXL_MODULES", "load_nixl", "nixl_errors", "prepare_environment"]

NIXL_MODULES: Final = ("nixl_cu13", "nixl_cu12")
"""In order of preference; both work without a GPU."""

_INFINIBAND: Final = Path("/sys/class/infiniband")


def prepare_environment(environment: MutableMapping[str, str], *, bind_host: str, infiniband: bool) -> None:
    """Set what UCX and NIXL read when they are loaded; what is set already stays.

    Without InfiniBand its module is left out: it loads a second libnl beside the system's and crashes the process at
    exit. On a loopback address UCX must not listen on other interfaces, as its protocol has no authentication. Crash
    signals stay with this program.
    """
    environment.setdefault("NIXL_LOG_LEVEL", "ERROR")
    environment.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    environment.setdefault("UCX_ERROR_SIGNALS", "")
    if not infiniband:
        environment.setdefault("UCX_MODULES", "^ib")
    if bind_host == "localhost" or _is_loopback(bind_host):
        environment.setdefault("UCX_NET_DEVICES", "lo")


def load_nixl(bind_host: str) -> ModuleType:
    """Import NIXL.

    Raises:
        PlaneError: it is not installed.
    """
    prepare_environment(os.environ, bind_host=bind_host, infiniband=_INFINIBAND.exists())
    for name in NIXL_MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise PlaneError("NIXL is not installed; run `pip install 'kvmesh[engine]'`")


def nixl_errors(module: ModuleType) -> tuple[type[Exception], ...]:
    """Every exception that NIXL raises; they have no base of their own."""
    bindings = importlib.import_module(f"{module.__name__}._bindings")
    return tuple(value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
