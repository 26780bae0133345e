"""Finds servers that do not register themselves, and keeps them members for as long as they answer.

Sources (a list, DNS, EndpointSlices) say at which addresses servers are; the prober asks those what they are and
admits who passes to the coordinator's registry. Whoever registers itself is left alone.
"""

from __future__ import annotations

from kvmesh.coordinator.discovery.finder import Finder
from kvmesh.coordinator.discovery.make import make_sources

__all__ = ["Finder", "make_sources"]
