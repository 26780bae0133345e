"""Who holds which prefix: an index fed with the records of many workers, usable in any process.

``index`` is the index; its core is native, ``csrc/ext/index_core.h`` says how it is built. ``scope`` says what prompts
must have in common to share blocks, ``identities`` what identifies a block beside its tokens, ``snapshot`` how the
index survives its process.
"""

from __future__ import annotations

from kvmesh.events.index.index import DumpedBlock, PrefixIndex
from kvmesh.events.index.scope import DEFAULT_TENANT, Scope, Source
from kvmesh.events.index.snapshot import SnapshotError
from kvmesh.events.index.statistics import IndexStatistics

__all__ = ["DEFAULT_TENANT", "DumpedBlock", "IndexStatistics", "PrefixIndex", "Scope", "SnapshotError", "Source"]
