"""The environment that UCX reads when it is loaded, by NIXL, by ucxx or by MPICH."""

from __future__ import annotations

import ipaddress
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

__all__ = ["INFINIBAND", "is_loopback", "prepare_ucx"]

INFINIBAND: Final = Path("/sys/class/infiniband")
"""There where InfiniBand can be."""


def prepare_ucx(environment: MutableMapping[str, str], *, bind_host: str, infiniband: bool) -> None:
    """Set what UCX reads; what is set already stays.

    Without InfiniBand its module is left out: it loads a second libnl beside the system's and crashes the process at
    exit. On a loopback address UCX must not listen on other interfaces, as its protocol has no authentication. Crash
    signals stay with this program.
    """
    environment.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    environment.setdefault("UCX_ERROR_SIGNALS", "")
    if not infiniband:
        environment.setdefault("UCX_MODULES", "^ib")
    if is_loopback(bind_host):
        environment.setdefault("UCX_NET_DEVICES", "lo")


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an address of the loopback interface, or its usual name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
