"""The indexer as a service: HTTP faces beside the match socket, fed by the membership."""

from __future__ import annotations

import os
import socket
import time
import uuid

import anyio
import msgspec
import zmq
from anyio.abc import TaskGroup, TaskStatus

from kvmesh.config import IndexerSettings
from kvmesh.events.feeds import Feeds
from kvmesh.events.index import PrefixIndex
from kvmesh.events.keyed import KeyRing
from kvmesh.indexer.matching import MatchServer
from kvmesh.indexer.merged import MergedStream
from kvmesh.indexer.routes import Routes
from kvmesh.net.auth import ApiKeys, KeyMetrics
from kvmesh.net.curve import CurveSecurity
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.http import api_key_middleware
from kvmesh.net.service import Health, Service
from kvmesh.net.tls import Tls
from kvmesh.net.zap import ZapServer
from kvmesh.protocol.errors import unavailable
from kvmesh.protocol.members import Member

__all__ = ["IndexerService"]


class IndexerService(Service):
    """See :mod:`kvmesh.indexer`.

    Args:
        settings: of the indexer.
    """

    def __init__(self, settings: IndexerSettings) -> None:
        keys = self._api_keys = ApiKeys(settings.api_keys_file)
        super().__init__(
            "indexer", middleware=[api_key_middleware(keys)], drain_s=settings.drain_s, tls=Tls(settings.tls)
        )
        self._settings = settings
        self._instance_id = f"indexer-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.index = PrefixIndex(settings.max_memory_bytes)
        self._security = CurveSecurity.load(settings.curve)
        self._keys = KeyRing.load(settings.event_key_file, "event_key_file")
        self.matching = MatchServer(self.index, settings.match_endpoint, security=self._security, keys=self._keys)
        self.merged = _merged(settings, self._security)
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._feeds: Feeds | None = None
        self._coordinator: CoordinatorClient | None = None
        self.metrics.collect_statistics("kvmesh_indexer", self.statistics)
        self.metrics.collect(KeyMetrics(keys))
        Routes(self.index, self._started, self.merged, keys=self._keys).add_to(self.app.router)

    async def start(self, tasks: TaskGroup, url: str) -> None:
        """Bind the match socket, follow the membership, and join it.

        Raises:
            OSError: the match endpoint is taken.
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
        if self._scope is not None:
            self._scope.cancel()
            await self._ended.wait()

    async def _work(self, *, task_status: TaskStatus[Feeds]) -> None:
        """Answer and follow; every socket is closed at the end."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        zap = None if self._security is None else ZapServer(context, self._security)
        try:
            self.matching.bind(context)
            if self.merged is not None:
                self.merged.bind(context)
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                tasks.start_soon(self.matching.serve)
                if zap is not None:
                    tasks.start_soon(zap.serve)
                if self.merged is not None:
                    tasks.start_soon(self.merged.serve)
                task_status.started(
                    Feeds(self.index, tasks, context, observer=self.merged, security=self._security, keys=self._keys)
                )
        finally:
            self.matching.close()
            if self.merged is not None:
                self.merged.close()
            if zap is not None:
                zap.close()
            context.term()
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
            "malformed_match_requests_total": self.matching.malformed_total,
            **({} if self._feeds is None else self._feeds.statistics()),
            **({} if self.merged is None else self.merged.statistics()),
        }

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
