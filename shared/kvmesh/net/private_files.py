"""Files that hold secrets: whether others on this machine may read them."""

from __future__ import annotations

import stat
from pathlib import Path

from kvmesh.telemetry import get_logger

__all__ = ["is_public", "warn_if_public"]

_log = get_logger("files")


def is_public(path: str | Path) -> bool:
    """Whether everybody on this machine may read the file, or its group may change it.

    Its group may read it: that is how Kubernetes gives a mounted Secret to a process that is not root.
    """
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False
    return bool(mode & (stat.S_IRWXO | stat.S_IWGRP))


def warn_if_public(setting: str, path: str | Path) -> None:
    """Say so in the log, with what to do."""
    if is_public(path):
        _log.warning("others may read a secret, or change it", setting=setting, remedy=f"chmod 600 {path}")
