"""Who holds which prefix: an index fed with the records of many workers, usable in any process.

``tree`` keeps the blocks of a scope as a tree with a bit for each worker, ``residency`` turns a worker's records into
its bit, ``search`` finds how far each bit reaches along a prompt, ``index`` puts them together.
"""

from __future__ import annotations

from kvmesh.events.index.index import PrefixIndex
from kvmesh.events.index.scope import DEFAULT_TENANT, Scope, Source
from kvmesh.events.index.statistics import IndexStatistics

__all__ = ["DEFAULT_TENANT", "IndexStatistics", "PrefixIndex", "Scope", "Source"]
