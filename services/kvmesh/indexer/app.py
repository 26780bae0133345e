"""The indexer as a service: HTTP faces beside the match socket, fed by the membership."""

from __future__ import annotations

import os
import socket
import time
import uuid

import anyio
import anyio.to_thread
import msgspec
import zmq
from anyio.abc import TaskGroup, TaskStatus

from kvmesh.config import IndexerSettings
from kvmesh.events.feeds import Feeds, Gate
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.keyed import KeyRing
from kvmesh.events.sockets import make_context
from kvmesh.hashing import TokenIds
from kvmesh.indexer.matching import MatchServer
from kvmesh.indexer.merged import MergedStream
from kvmesh.indexer.metrics import FeedCollector
from kvmesh.indexer.routes import Routes
from kvmesh.indexer.snapshots import SnapshotFile
from kvmesh.net.auth import ApiKeys, KeyMetrics
from kvmesh.net.clock import Clock, SystemClock
from kvmesh.net.curve import CurveSecurity
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.http import api_key_middleware
from kvmesh.net.service import Health, Service
from kvmesh.net.tls import Tls
from kvmesh.net.zap import ZapServer
from kvmesh.protocol.errors import unavailable
from kvmesh.protocol.match import Routed
from kvmesh.protocol.members import Member

__all__ = ["IndexerService"]

LAST_SNAPSHOT_S = 10.0
"""How long a stopping indexer may still write."""


class IndexerService(Service):
    """See :mod:`kvmesh.indexer`.

    Args:
        settings: of the indexer.
        clock: of predictions, rests and snapshots.
    """

    def __init__(self, settings: IndexerSettings, *, clock: Clock | None = None) -> None:
        keys = self._api_keys = ApiKeys(settings.api_keys_file)
        super().__init__(
            "indexer", middleware=[api_key_middleware(keys)], drain_s=settings.drain_s, tls=Tls(settings.tls)
        )
        self._settings = settings
        self._instance_id = f"indexer-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._clock = clock or SystemClock()
        self._index_gate = Gate(self._clock)
        self.index = PrefixIndex(settings.max_memory_bytes, clock=self._index_gate)
        self._security = CurveSecurity.load(settings.curve)
        self._keys = KeyRing.load(settings.event_key_file, "event_key_file")
        self.matching = MatchServer(
            self.index, settings.match_endpoint, on_routed=self._routed, security=self._security, keys=self._keys
        )
        self.merged = _merged(settings, self._security)
        path = settings.snapshot_path
        self.snapshots = None if path is None else SnapshotFile(path, self.index, self._index_gate, self._clock)
        if self.snapshots is not None:
            self.snapshots.prepare()
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._feeds: Feeds | None = None
        self._coordinator: CoordinatorClient | None = None
        self.metrics.collect_statistics("kvmesh_indexer", self.statistics)
        self.metrics.collect(KeyMetrics(keys))
        self.metrics.collect(FeedCollector(self.index, lambda: self._feeds))
        faces = Routes(self.index, self._started, self.merged, keys=self._keys)
        faces.add_to(self.app.router)
        if not keys.asked:
            self.quick_posts = {"/query": faces.answer_query}

    async def start(self, tasks: TaskGroup, url: str) -> None:
        """Bind the match socket, follow the membership, and join it.

        Raises:
            BindError: an endpoint that it binds is taken.
        """
        feeds = self._feeds = await tasks.start(self._work)
        if self._settings.coordinator_url is None:
            return
        self._coordinator = CoordinatorClient(self._settings.coordinator_url, tls=self.tls, keys=self._api_keys)
        await self._coordinator.start(tasks)
        self._coordinator.subscribe(feeds.hear)
        self._coordinator.announce(
            Member(
                instance_id=self._instance_id,
                role="indexer",
                url=url,
                match_endpoint=self.matching.endpoint,
                events_endpoint=None if self.merged is None else self.merged.endpoint,
                replay_endpoint=None if self.merged is None else self.merged.replay_endpoint,
                started_unix_ms=time.time_ns() // 1_000_000,
                pid=os.getpid(),
            )
        )

    async def stop(self) -> None:
        """Leave the membership and close every socket."""
        if self._coordinator is not None:
            await self._coordinator.stop()
        if self.snapshots is not None and self._feeds is not None:
            with anyio.move_on_after(LAST_SNAPSHOT_S):
                await self.snapshots.write(self._feeds.saved)
        if self._scope is not None:
            self._scope.cancel()
            await self._ended.wait()

    async def _work(self, *, task_status: TaskStatus[Feeds]) -> None:
        """Answer and follow; every socket is closed at the end."""
        context = make_context()
        zap = None if self._security is None else ZapServer(context, self._security)
        saved = {} if self.snapshots is None else await anyio.to_thread.run_sync(self.snapshots.read)
        try:
            self.matching.bind(context)
            if self.merged is not None:
                self.merged.bind(context)
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                tasks.start_soon(self.matching.serve)
                if zap is not None:
                    tasks.start_soon(zap.serve)
                feeds = self._make_feeds(tasks, context)
                if self.merged is not None:
                    tasks.start_soon(self.merged.serve, feeds.told_again)
                feeds.restored(saved)
                tasks.start_soon(feeds.upkeep)
                if self.snapshots is not None and self._settings.snapshot_interval_s:
                    tasks.start_soon(self.snapshots.write_every, self._settings.snapshot_interval_s, feeds.saved)
                task_status.started(feeds)
        finally:
            self.matching.close()
            if self.merged is not None:
                self.merged.close()
            if zap is not None:
                zap.close()
            context.destroy(linger=0)  # term() would wait for a socket that a failure has left open
            self._ended.set()

    def health(self) -> Health:
        """Healthy means that questions can be asked."""
        return Health(True) if self.matching.bound else Health(False, "the indexer is starting")

    def statistics(self) -> dict[str, float]:
        """The index's, the match socket's and the feeds' numbers."""
        return {
            **super().statistics(),
            **msgspec.structs.asdict(self.index.statistics()),
            "memory_bytes": self.index.memory_bytes,
            "match_requests_total": self.matching.answered_total,
            "routed_total": self.matching.routed_total,
            "malformed_match_requests_total": self.matching.malformed_total,
            "failed_match_requests_total": self.matching.failed_total,
            **({} if self._feeds is None else self._feeds.statistics()),
            **({} if self.merged is None else self.merged.statistics()),
            **({} if self.snapshots is None else msgspec.structs.asdict(self.snapshots.statistics)),
        }

    def _make_feeds(self, tasks: TaskGroup, context: zmq.Context[zmq.Socket[bytes]]) -> Feeds:
        settings = self._settings
        return Feeds(
            self.index,
            tasks,
            context,
            clock=self._clock,
            gate=self._index_gate,
            observer=self.merged,
            security=self._security,
            keys=self._keys,
            listen_endpoint=settings.listen_endpoint,
            predicted_ttl_s=settings.predicted_ttl_s,
            approximate_ttl_s=settings.approximate_ttl_s,
            anti_entropy_interval_s=settings.anti_entropy_interval_s,
        )

    def _routed(self, routed: Routed, tokens: TokenIds) -> None:
        if self._feeds is not None:
            self._feeds.predictions.predict(
                self._feeds.feed(Source(routed.instance_id, routed.dp_rank)),
                tokens,
                model=routed.model,
                lora=routed.lora_id,
                cache_salt=routed.cache_salt,
                ttl_s=routed.ttl_s,
            )

    def _started(self) -> Feeds:
        if self._feeds is None:
            raise unavailable("The indexer is still starting; try again in a moment.")
        return self._feeds


def _merged(settings: IndexerSettings, security: CurveSecurity | None) -> MergedStream | None:
    if settings.publish_endpoint is None:
        return None
    return MergedStream(
        settings.publish_endpoint,
        settings.publish_replay_endpoint,
        buffer_bytes=settings.publish_buffer_bytes,
        security=security,
    )
