"""What the mesh says about itself: logs, traces and metrics."""

from __future__ import annotations

from kvmesh.telemetry.logs import configure_logging, get_logger

__all__ = ["configure_logging", "get_logger"]
