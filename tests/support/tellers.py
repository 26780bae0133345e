"""Publishers of KV events that know what they have told, as a worker does, and keep a digest of it."""

from __future__ import annotations

import numpy as np

from kvmesh.events.published import PublishedSet
from kvmesh.events.publisher import ZmqPublisher
from kvmesh.events.records import Tier
from kvmesh.hashing import ReuseScope
from kvmesh.protocol.events import BlockRemoved, BlockStored

__all__ = ["BLOCK", "Teller", "tokens"]

BLOCK = 4

_COMMON = ReuseScope()


class Teller:
    """Blocks are numbers: block ``n`` has ``n`` as every token and as its hash.

    Args:
        endpoints: to bind, stream and replay.
        digests: whether it answers with digests.
        buffer_steps: batches kept for replay.
    """

    def __init__(self, *endpoints: str, digests: bool = True, buffer_steps: int = 10_000) -> None:
        self.published = PublishedSet() if digests else None
        self.publisher = ZmqPublisher(
            *(endpoints or ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")),
            buffer_steps=buffer_steps,
            published=self.published,
        )
        self.publisher.start()

    @property
    def endpoints(self) -> tuple[str, str]:
        """Stream and replay."""
        assert self.publisher.endpoint is not None
        assert self.publisher.replay_endpoint is not None
        return self.publisher.endpoint, self.publisher.replay_endpoint

    def store(self, *numbers: int, parent: int | None = None) -> None:
        """Tell of a run of blocks in one batch."""
        if self.published is not None:
            self.published.stored(Tier.DEVICE, _COMMON, np.array(numbers, np.uint64))
        self.publisher.publish(
            [
                BlockStored(
                    block_hashes=list(numbers),
                    parent_block_hash=parent,
                    token_ids=tokens(*numbers),
                    block_size=BLOCK,
                )
            ]
        )

    def remove(self, *numbers: int) -> None:
        """Take blocks back."""
        if self.published is not None:
            self.published.removed(Tier.DEVICE, np.array(numbers, np.uint64))
        self.publisher.publish([BlockRemoved(block_hashes=list(numbers))])

    def close(self) -> None:
        """Free the ports."""
        self.publisher.shutdown()


def tokens(*numbers: int) -> list[int]:
    """The tokens of blocks."""
    return [number for number in numbers for _ in range(BLOCK)]
