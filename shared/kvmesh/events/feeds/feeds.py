"""One subscription for each publisher, from the membership or registered by hand; fills the index."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing

import anyio
import anyio.lowlevel
import zmq
from anyio.abc import TaskGroup

from kvmesh.events.endpoints import EndpointError
from kvmesh.events.feeds.feed import Feed, feeds_of
from kvmesh.events.feeds.following import FeedObserver, Following
from kvmesh.events.feeds.gate import Gate
from kvmesh.events.feeds.listening import named_by_topic
from kvmesh.events.feeds.predictions import Predictions
from kvmesh.events.feeds.restored import RestoredFeeds
from kvmesh.events.feeds.running import Running, Totals, described
from kvmesh.events.feeds.saved import SavedFeed
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.items import Batch
from kvmesh.events.keyed import KeyRing
from kvmesh.events.listener import Admission, EventListener, StreamName
from kvmesh.events.reading import Reading
from kvmesh.net.address import BindError
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.curve import CurveSecurity
from kvmesh.protocol.match import MAX_DP_RANK
from kvmesh.protocol.members import Member, MemberEvent
from kvmesh.telemetry import get_logger

__all__ = ["Feeds"]

UPKEEP_S = 0.5
"""How often predictions that are over are dropped."""

SILENT_S = 60.0
"""How long a publisher that connected by itself is remembered after its connection has ended."""

MAX_ANNOUNCED = 4096
"""Publishers that have only their own word for who they are."""

MAX_UNWANTED = 65_536

_log = get_logger("events.feeds")


class Feeds:
    """Starts, replaces and ends subscriptions; all of them live in ``tasks``. Run :meth:`upkeep` beside it.

    Args:
        index: to fill.
        tasks: of the service.
        context: of the sockets.
        clock: of predictions and rests.
        gate: of the index, where snapshots of it are written; None: they are not.
        observer: sees what goes in.
        security: keys of the publishers that belong to the mesh; None: they are plain.
        keys: of workers that tell keyed names instead of tokens.
        listen_endpoint: to bind for publishers that connect to this side; None: there are none.
        predicted_ttl_s: how long a prediction that does not say counts.
        approximate_ttl_s: how long one of a worker without events counts.
        anti_entropy_interval_s: how often each publisher is asked for its digests; 0: never.
    """

    def __init__(
        self,
        index: PrefixIndex,
        tasks: TaskGroup,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        clock: Clock | None = None,
        gate: Gate | None = None,
        observer: FeedObserver | None = None,
        security: CurveSecurity | None = None,
        keys: KeyRing | None = None,
        listen_endpoint: str | None = None,
        predicted_ttl_s: float = 5.0,
        approximate_ttl_s: float = 120.0,
        anti_entropy_interval_s: float = 0.0,
    ) -> None:
        self._index = index
        self._tasks = tasks
        self._context = context
        self._clock = clock or SystemClock()
        self._gate = gate or Gate(self._clock)
        self._observer = observer
        self._security = security
        self._keys = keys
        self.predictions = Predictions(
            index, self._gate, predicted_ttl_s=predicted_ttl_s, approximate_ttl_s=approximate_ttl_s
        )
        self._anti_entropy_interval_s = anti_entropy_interval_s
        self._listen_endpoint = listen_endpoint
        self._listener: EventListener | None = None
        self._unwanted: dict[StreamName, None] = {}
        """Who was unregistered, and may go on sending."""
        if listen_endpoint is not None:
            self._listener = EventListener(listen_endpoint, self._admit, context=context)
            tasks.start_soon(self._listen, self._listener)
        self._running: dict[Source, Running] = {}
        self._listened: dict[StreamName, Source] = {}
        """Who connects to this side."""
        self._restored = RestoredFeeds(index, self._clock)
        self._totals = Totals()
        self._tidying = False

    def hear(self, event: MemberEvent) -> None:
        """A change of the membership."""
        member = event.member
        if event.kind in ("left", "dead"):
            self._gone(member)
            return
        try:
            feeds = feeds_of(member)
        except EndpointError as error:
            _log.warning("a worker's events cannot be followed", instance_id=member.instance_id, error=str(error))
            return
        for feed in feeds:
            self.follow(feed)

    def follow(self, feed: Feed, *, by_hand: bool = False) -> bool:
        """Follow a publisher; one that is followed already goes on undisturbed, an older life of its source ends.

        False when a later life is followed, which goes on.
        """
        running = self._running.get(feed.source)
        if running is not None:
            if running.feed == feed or running.feed.epoch > feed.epoch:
                return running.feed == feed
            self._end(running)
        if feed.topic is not None:
            self._unwanted.pop(StreamName(feed.topic, feed.source.dp_rank), None)
        resume_from = self._restored.take_over(feed, observed=self._observer is not None)
        self._index.add(
            feed.source,
            model=feed.model,
            tenant=feed.tenant,
            lora=feed.lora,
            salt=feed.salt,
            single_group=feed.single_group,
        )
        following = None
        if not feed.approximate:
            following = Following(
                feed,
                self._index,
                self._context,
                self._clock,
                gate=self._gate,
                tidy=self._tidy,
                observer=self._observer,
                security=self._security if feed.in_mesh else None,
                keys=self._keys,
                listener=self._listener,
                anti_entropy_interval_s=self._anti_entropy_interval_s,
                resume_from=resume_from,
            )
        running = self._running[feed.source] = Running(feed, following, by_hand=by_hand)
        if following is not None:
            if feed.topic is not None:
                self._listened[StreamName(feed.topic, feed.source.dp_rank)] = feed.source
            self._tasks.start_soon(self._run, following, running.scope)
        return True

    def stop(self, instance_id: str, dp_rank: int | None = None) -> list[Feed]:
        """Stop following a worker, or one of its ranks, and forget its blocks at once; gives what was followed."""
        ending = [
            running
            for source, running in self._running.items()
            if source.instance_id == instance_id and dp_rank in (None, source.dp_rank)
        ]
        for running in ending:
            if running.feed.topic is not None:
                self._unwanted[StreamName(running.feed.topic, running.feed.source.dp_rank)] = None
                if len(self._unwanted) > MAX_UNWANTED:
                    del self._unwanted[next(iter(self._unwanted))]
            self._end(running)
        return [running.feed for running in ending]

    def saved(self) -> dict[Source, bytes]:
        """What a snapshot keeps of every feed that publishes or was registered, the index's blocks being as of now."""
        return {
            source: SavedFeed.of(
                running.feed,
                None if running.following is None else running.following.stream.watermark,
                by_hand=running.by_hand,
            ).encode()
            for source, running in self._running.items()
            if running.following is not None or running.by_hand
        }

    def restored(self, saved: Mapping[Source, bytes]) -> None:
        """The index has been restored from a snapshot with what :meth:`saved` gave.

        Its blocks are not matched until their worker is followed and has proved to be the same. Workers that were
        registered by hand are followed now, the others when the membership tells of them.
        """
        for feed in self._restored.restored(saved):
            self.follow(feed, by_hand=True)

    async def upkeep(self) -> None:
        """Drop what is over, until cancelled."""
        while True:
            await self._clock.sleep(UPKEEP_S)
            if self._gate.closed:
                continue
            self._index.expire()
            self._end_the_silent()
            self._restored.expire()
            self._tidy()

    def feed(self, source: Source) -> Feed | None:
        """What is followed of a source."""
        running = self._running.get(source)
        return None if running is None else running.feed

    def subscribers(self) -> Iterator[tuple[Source, Reading]]:
        """The subscriptions, by source."""
        for source, running in self._running.items():
            if running.following is not None:
                yield source, running.following.stream

    async def told_again(self) -> AsyncGenerator[tuple[Feed, Batch | None], None]:
        """Each publisher with None, and then with batches of what it holds, where it is there to be asked."""
        for source, running in list(self._running.items()):
            if running.following is None or self._running.get(source) is not running:
                continue
            yield running.feed, None
            async with aclosing(running.following.told_again()) as batches:
                async for batch in batches:
                    yield running.feed, batch

    def dialects(self) -> dict[str, int]:
        """Events by the dialect they were written in, since the start."""
        return self._totals.dialects(self._followed())

    def describe(self) -> list[Mapping[str, object]]:
        """Who is followed, and how it goes."""
        return [described(running, self._index.num_held(source)) for source, running in self._running.items()]

    def statistics(self) -> dict[str, float]:
        """Sums over all subscriptions, those that are over included."""
        followed = self._followed()
        return {
            "feeds": len(followed),
            "feeds_connected": sum(following.stream.connected for following in followed),
            "feeds_approximate": len(self._running) - len(followed),
            "feeds_restored": len(self._restored),
            **self._totals.statistics(followed),
            "predictions_total": self.predictions.total,
            "predictions_refused_total": self.predictions.refused_total,
        }

    @property
    def listens(self) -> bool:
        """Whether publishers can connect to this side."""
        return self._listener is not None

    @property
    def listen_endpoint(self) -> str:
        """Where publishers connect to; empty until it is bound."""
        return "" if self._listener is None else self._listener.bound_endpoint

    async def _listen(self, listener: EventListener) -> None:
        try:
            await listener.run()
        except zmq.ZMQError as error:
            raise BindError("listen_endpoint", self._listen_endpoint, error.errno or 0) from error

    def _admit(self, name: StreamName) -> Admission | None:
        """How a publisher that connects is followed: as registered, or else as its topic says who it is."""
        known = self._listened.get(name)
        if known is not None and (following := self._running[known].following) is not None:
            return following.admission()
        named = None if name in self._unwanted else named_by_topic(name.topic)
        if named is None or name.rank > MAX_DP_RANK or len(self._listened) >= MAX_ANNOUNCED:
            return None
        source = Source(named[0], name.rank)
        if source in self._running:
            return None  # it is followed in another way
        self.follow(Feed(source, named[1], self.listen_endpoint, topic=name.topic))
        following = self._running[source].following
        return None if following is None else following.admission()

    def _end_the_silent(self) -> None:
        """Publishers that came by themselves and have been gone for long: nobody else will say that they are."""
        before_s = self._clock.monotonic_s() - SILENT_S
        for running in list(self._running.values()):
            following = running.following
            if running.feed.topic is None or running.by_hand or following is None or following.stream.connected:
                continue
            if following.disconnected_at_s < before_s:
                self._end(running)

    def _followed(self) -> list[Following]:
        return [running.following for running in self._running.values() if running.following is not None]

    async def _run(self, following: Following, scope: anyio.CancelScope) -> None:
        with scope:
            await following.run()

    def _gone(self, member: Member) -> None:
        for source, running in list(self._running.items()):
            if source.instance_id == member.instance_id and running.feed.epoch <= member.epoch:
                self._end(running)
        self._restored.gone(member)

    def _end(self, running: Running) -> None:
        running.scope.cancel()
        if running.following is not None:
            running.following.end()
        del self._running[running.feed.source]
        if running.following is not None:
            self._totals.ended(running.following)
            if running.feed.topic is not None and self._listener is not None:
                stream = StreamName(running.feed.topic, running.feed.source.dp_rank)
                if self._listened.get(stream) == running.feed.source:
                    del self._listened[stream]
                self._listener.retire(stream)
        self._index.remove(running.feed.source)
        if self._observer is not None and running.following is not None:
            self._observer.cleared(running.feed)
            self._observer.hidden(running.feed, hidden=False)
        self._tidy()

    def _tidy(self) -> None:
        """Take what has departed out of the index's trees, a little at a time."""
        if self._index.reclaimable and not self._tidying and not self._gate.closed:
            self._tidying = True
            self._tasks.start_soon(self._reclaim)

    async def _reclaim(self) -> None:
        while not self._gate.closed and self._index.reclaim():
            await anyio.lowlevel.checkpoint()
        self._tidying = False
