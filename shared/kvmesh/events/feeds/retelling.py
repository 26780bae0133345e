"""What a publisher had told before a snapshot, asked for once more for observers: the index has no tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import zmq

from kvmesh.events.decoding import BatchError, decode_batch
from kvmesh.events.feeds.feed import Feed
from kvmesh.events.items import Batch
from kvmesh.events.keyed import KeyRingPart
from kvmesh.events.owners import Owners
from kvmesh.events.replay import REPLAY_SILENCE_S, ReplayFailedError, ReplayRequest
from kvmesh.net.curve import CurveSecurity
from kvmesh.telemetry import get_logger

__all__ = ["told_again"]

_log = get_logger("events.feeds")


async def told_again(
    feed: Feed,
    last: int,
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    security: CurveSecurity | None = None,
    keys: KeyRingPart | None = None,
) -> AsyncGenerator[Batch, None]:
    """What a publisher has told up to batch ``last``: all that it holds, of foreign engines the batches they keep.

    All that it holds may be as of a later batch. Those between are then told once more, which ends in the same state.
    It stops where an answer breaks off; the subscription that follows finds out what that means.

    Raises:
        zmq.ZMQError: the replay endpoint cannot be connected to.
    """
    if feed.replay_endpoint is None:
        return
    before, owners = -1, Owners(feed.owner)
    request = ReplayRequest(
        context, feed.replay_endpoint, 0, REPLAY_SILENCE_S, security=security, with_state=feed.in_mesh
    )
    try:
        async with request as replay:
            while (kept := await replay.next()) is not None:
                if kept.sequence <= before or (kept.sequence > last and not feed.in_mesh):
                    return
                before = kept.sequence
                records = owners.resolve(decode_batch(kept.payload, keys))
                yield Batch(kept.sequence, kept.topic.decode(errors="replace"), records, replayed=True)
    except (BatchError, ReplayFailedError) as error:
        _log.warning(
            "what a snapshot had of a worker cannot be told again",
            instance_id=feed.source.instance_id,
            error=str(error),
        )
