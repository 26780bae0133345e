"""The version that every message crossing a process border carries, and that of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["PROTOCOL_VERSION", "package_version"]

PROTOCOL_VERSION = 2
"""Raised whenever a message changes in a way that an older process cannot read."""


def package_version() -> str:
    """The installed version of KVMesh; ``0+source`` where the sources run without having been installed."""
    try:
        return version("kvmesh")
    except PackageNotFoundError:
        return "0+source"
