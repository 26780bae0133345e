"""Follows every publisher of a mesh and fills an index: the indexer does, and a router that keeps its own index.

``feed`` says what is followed, ``following`` follows one, ``feeds`` all of them (``running`` has what each is and has
counted), ``listening`` those that connect; ``drift`` finds out whether the index agrees with a publisher; ``saved`` is
what a snapshot keeps, ``gate`` lets it be written, ``restored`` is what the next process begins with and ``retelling``
tells it again; ``predictions`` are of prompts that were just sent somewhere.
"""

from __future__ import annotations

from kvmesh.events.feeds.feed import Feed, feeds_of
from kvmesh.events.feeds.feeds import Feeds
from kvmesh.events.feeds.following import FeedObserver
from kvmesh.events.feeds.gate import Gate

__all__ = ["Feed", "FeedObserver", "Feeds", "Gate", "feeds_of"]
