"""Follows every publisher of a mesh and fills an index: the indexer does, and a router that keeps its own index.

``feed`` says what is followed, ``feeds`` follows it.
"""

from __future__ import annotations

from kvmesh.events.feeds.feed import Feed, feeds_of
from kvmesh.events.feeds.feeds import FeedObserver, Feeds

__all__ = ["Feed", "FeedObserver", "Feeds", "feeds_of"]
