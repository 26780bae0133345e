"""What a snapshot keeps of a feed, so that the next process follows it from where this one stood."""

from __future__ import annotations

import msgspec

from kvmesh.events.feeds.feed import Feed
from kvmesh.events.index import Source
from kvmesh.events.records import LoraKey
from kvmesh.events.subscriber import Watermark

__all__ = ["SavedFeed"]


class SavedFeed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A feed and how far it was followed."""

    instance_id: str
    dp_rank: int = 0
    model: str
    endpoint: str | None = None
    replay_endpoint: str | None = None
    epoch: int = 0
    tenant: str
    lora: LoraKey = None
    salt: str | None = None
    single_group: bool = False
    block_size: int = 0
    topic: str | None = None
    in_mesh: bool = False
    by_hand: bool = False
    """Registered over HTTP: nobody will tell of it again."""
    watermark: bytes = b""
    """Of the last batch that was applied; empty: none was."""

    @classmethod
    def of(cls, feed: Feed, watermark: Watermark | None, *, by_hand: bool) -> SavedFeed:
        """What to keep of a feed."""
        source, *_ = feed
        return cls(
            instance_id=source.instance_id,
            dp_rank=source.dp_rank,
            **{name: getattr(feed, name) for name in Feed._fields if name != "source"},
            by_hand=by_hand,
            watermark=b"" if watermark is None else watermark.encode(),
        )

    def feed(self) -> Feed:
        """The feed."""
        own = {name: getattr(self, name) for name in Feed._fields if name != "source"}
        return Feed(Source(self.instance_id, self.dp_rank), **own)

    def resume_from(self) -> Watermark | None:
        """Where to go on.

        Raises:
            ValueError: the watermark is none.
        """
        return Watermark.decode(self.watermark) if self.watermark else None

    def encode(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> SavedFeed:
        """Undo :meth:`encode`.

        Raises:
            ValueError: this is none.
        """
        return msgspec.msgpack.decode(data, type=cls)
