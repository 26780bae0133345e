"""One stream of the events of every worker, for whoever wants a single feed (``kvmesh.protocol.mesh_events``)."""

from __future__ import annotations

import time
from collections import deque

import anyio
import anyio.lowlevel
import msgspec
import zmq

from kvmesh.events.encoding import END_SEQUENCE, STATE_REQUEST, PackedTokens
from kvmesh.events.feeds import Feed
from kvmesh.events.index import Source
from kvmesh.events.polling import readable, receive
from kvmesh.events.records import Cleared, EventRecord, Removed, Stored
from kvmesh.events.subscriber import Batch
from kvmesh.indexer.merged_state import StateAnswers, ToldAgain
from kvmesh.net.address import BindError, choose_family, reachable_endpoint
from kvmesh.net.curve import CurveSecurity
from kvmesh.protocol.events import AllBlocksCleared, BlockRemoved
from kvmesh.protocol.mesh_events import TIER_MEDIA, MeshBatch, MeshEvent, MeshOrigin, MeshStored, mesh_topic
from kvmesh.telemetry import get_logger

__all__ = ["MergedStream"]

QUEUE = 100_000
"""Messages that a slow reader may be behind; it loses what is above, and sees the gap."""

REPLAYED_A_TURN = 64
"""Kept batches sent before other tasks get a turn."""

_log = get_logger("indexer.merged")


class _Kept:
    __slots__ = ("payload", "sequence", "topic")

    def __init__(self, sequence: int, topic: bytes, payload: bytes) -> None:
        self.sequence = sequence
        self.topic = topic
        self.payload = payload


class MergedStream:
    """A PUB socket for the stream and a ROUTER for replays; a :class:`kvmesh.events.feeds.FeedObserver`.

    Args:
        endpoint: what to bind for the stream.
        replay_endpoint: what to bind for replays, or None.
        buffer_bytes: of the latest batches, which can be replayed.
        security: keys of both sockets; None: they are plain.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, *, buffer_bytes: int, security: CurveSecurity | None = None
    ) -> None:
        self._bind, self._bind_replay = endpoint, replay_endpoint
        self._buffer_bytes = buffer_bytes
        self._security = security
        self.endpoint = endpoint
        """What to connect to, once bound."""
        self.replay_endpoint = replay_endpoint
        self._stream: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._sequence = 0
        self._published = 0
        self._failed = 0
        self._replays = 0
        self._broken_off = 0
        self._hidden: set[Source] = set()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_pack)

    def bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Bind both sockets.

        Raises:
            BindError: an endpoint is taken; :meth:`close` frees the other.
        """
        stream = self._stream = context.socket(zmq.PUB)
        stream.linger = 0
        stream.set_hwm(QUEUE)
        self.endpoint = self._bound(stream, self._bind, "publish_endpoint")
        if self._bind_replay is not None:
            replay = self._replay = context.socket(zmq.ROUTER)
            replay.linger = 0
            replay.sndhwm = QUEUE
            # Without it the rest of a replay would be thrown away and its end still promised.
            replay.router_mandatory = True
            self.replay_endpoint = self._bound(replay, self._bind_replay, "publish_replay_endpoint")

    async def serve(self, told_again: ToldAgain) -> None:
        """Answer requests for replays and for the state until cancelled.

        Args:
            told_again: of every publisher, what it holds.
        """
        socket = self._replay
        if socket is None:
            return
        states = StateAnswers(socket, told_again, self._state_batch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(states.serve)
            while True:
                frames = receive(socket)
                if frames is None:
                    await readable(socket)
                elif len(frames) == 3 and not frames[1]:
                    if len(frames[2]) == 8:
                        await self._answer(socket, frames[0], int.from_bytes(frames[2], "big"))
                    elif frames[2] == STATE_REQUEST:
                        states.ask(frames[0], self._sequence - 1)
                await anyio.lowlevel.checkpoint()  # whoever asks without an end gets one answer a turn

    def close(self) -> None:
        """Close both sockets; idempotent."""
        for socket in (self._stream, self._replay):
            if socket is not None:
                socket.close()
        self._stream = self._replay = None

    def applied(self, feed: Feed, batch: Batch) -> None:
        """See :class:`kvmesh.events.feeds.FeedObserver`."""
        if batch.records.records:
            self._publish(feed, batch.records.ts, _events(batch), batch.sequence)

    def cleared(self, feed: Feed) -> None:
        """See :class:`kvmesh.events.feeds.FeedObserver`."""
        self._publish(feed, time.time(), [AllBlocksCleared()], 0)

    def hidden(self, feed: Feed, *, hidden: bool) -> None:
        """See :class:`kvmesh.events.feeds.FeedObserver`."""
        if hidden != (feed.source in self._hidden):
            (self._hidden.add if hidden else self._hidden.discard)(feed.source)
            self._publish(feed, time.time(), [], 0)

    def statistics(self) -> dict[str, float]:
        """What was sent, and what can be replayed."""
        return {
            "merged_batches_total": self._published,
            "merged_send_failures_total": self._failed,
            "merged_replays_total": self._replays,
            "merged_kept_bytes": self._kept_bytes,
        }

    def _publish(self, feed: Feed, ts: float, events: list[MeshEvent], sequence: int) -> None:
        if self._stream is None:
            return
        kept = _Kept(self._sequence, *self._encoded(feed, ts, events, sequence))
        self._sequence += 1
        try:
            self._stream.send_multipart([kept.topic, kept.sequence.to_bytes(8, "big"), kept.payload], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._failed += 1  # a gap, which readers repair by replay
        self._published += 1
        self._kept.append(kept)
        self._kept_bytes += len(kept.payload)
        while self._kept_bytes > self._buffer_bytes:
            self._kept_bytes -= len(self._kept.popleft().payload)

    def _state_batch(self, feed: Feed, batch: Batch | None) -> tuple[bytes, bytes]:
        """Topic and payload of what a publisher holds, or of what comes before that: nothing is held."""
        if batch is None:
            return self._encoded(feed, time.time(), [AllBlocksCleared()], 0)
        return self._encoded(feed, batch.records.ts, _events(batch), batch.sequence)

    def _encoded(self, feed: Feed, ts: float, events: list[MeshEvent], sequence: int) -> tuple[bytes, bytes]:
        instance_id, rank = feed.source
        origin = MeshOrigin(
            instance_id=instance_id,
            dp_rank=rank,
            epoch=feed.epoch,
            model=feed.model,
            tenant=feed.tenant,
            lora=feed.lora,
            salt=feed.salt,
            sequence=sequence,
            block_size=feed.block_size,
            hidden=feed.source in self._hidden,
        )
        topic = mesh_topic(instance_id, rank, feed.model).encode()
        return topic, self._encoder.encode(MeshBatch(ts, events, rank, origin))

    def _bound(self, socket: zmq.Socket[bytes], endpoint: str, setting: str) -> str:
        if self._security is not None:
            self._security.apply_server(socket)
        choose_family(socket, endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise BindError(setting, endpoint, error.errno or 0) from error
        return reachable_endpoint(endpoint, str(socket.get_string(zmq.LAST_ENDPOINT)))

    async def _answer(self, socket: zmq.Socket[bytes], client: bytes, first: int) -> None:
        self._replays += 1
        wanted = [kept for kept in self._kept if kept.sequence >= first]
        try:
            for number, kept in enumerate(wanted, 1):
                socket.send_multipart(
                    [client, b"", kept.topic, kept.sequence.to_bytes(8, "big"), kept.payload], zmq.NOBLOCK
                )
                if number % REPLAYED_A_TURN == 0:
                    await anyio.lowlevel.checkpoint()
            socket.send_multipart([client, b"", b"", END_SEQUENCE.to_bytes(8, "big"), b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._broken_off += 1
            if self._broken_off & (self._broken_off - 1) == 0:
                _log.warning(
                    "replays of the merged stream broken off: the reader does not read, or has gone",
                    so_far=self._broken_off,
                    error=str(error),
                )


def _events(batch: Batch) -> list[MeshEvent]:
    return [_event(record) for record in batch.records.records]


def _event(record: EventRecord) -> MeshEvent:
    match record:
        case Stored():
            lora = record.lora
            return MeshStored(
                block_hashes=record.hashes,
                parent_block_hash=record.parent,
                token_ids=PackedTokens([record.token_ids]),
                block_size=record.block_size,
                lora_id=None if isinstance(lora, str) else lora,
                lora_name=lora if isinstance(lora, str) else None,
                medium=TIER_MEDIA[record.tier],
                extra_keys=msgspec.UNSET if record.extra_keys is None else record.extra_keys,
                group_idx=msgspec.UNSET if record.group is None else record.group,
                kv_cache_spec_kind=msgspec.UNSET if record.kind is None else record.kind,
                cache_salt=msgspec.UNSET if record.salt is None else record.salt,
                tenant_id=msgspec.UNSET if record.tenant is None else record.tenant,
                model_name=msgspec.UNSET if record.model is None else record.model,
            )
        case Removed():
            group = msgspec.UNSET if record.group is None else record.group
            return BlockRemoved(block_hashes=record.hashes, medium=TIER_MEDIA[record.tier], group_idx=group)
        case Cleared():
            return AllBlocksCleared()


def _pack(value: object) -> msgspec.Raw:
    if isinstance(value, PackedTokens):
        return value.pack()
    raise TypeError(f"cannot encode a {type(value).__name__}")
