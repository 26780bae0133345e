"""The version that every message crossing a process border carries."""

from __future__ import annotations

PROTOCOL_VERSION = 1
"""Raised whenever a message changes in a way that an older process cannot read."""
