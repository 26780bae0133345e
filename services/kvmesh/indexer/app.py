"""The indexer as a service: HTTP faces beside the match socket, fed by the membership."""

from __future__ import annotations

import os
import socket
import time
import uuid
from itertools import islice

import anyio
import msgspec
import numpy as np
import zmq
from aiohttp import web
from anyio.abc import TaskGroup, TaskStatus

from kvmesh.config import IndexerSettings
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.hashing import as_token_ids
from kvmesh.indexer.faces import HashQuery, Query, RegisterBody, Unregister, dumped_block, query_reply
from kvmesh.indexer.feeds import Feed, Feeds
from kvmesh.indexer.matching import MatchServer
from kvmesh.net.auth import ApiKeys
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.http import api_key_middleware, json_response, read_json
from kvmesh.net.service import Health, Service
from kvmesh.protocol.errors import bad_request, unavailable
from kvmesh.protocol.members import Member

__all__ = ["IndexerService"]

MAX_DUMPED_BLOCKS = 100_000
"""Of one source; some ten megabytes of JSON."""

_HASH_MASK = 2**64 - 1


class IndexerService(Service):
    """See :mod:`kvmesh.indexer`.

    Args:
        settings: of the indexer.
    """

    def __init__(self, settings: IndexerSettings) -> None:
        keys = ApiKeys(settings.api_keys_file)
        super().__init__("indexer", middleware=[api_key_middleware(keys)], drain_s=settings.drain_s)
        self._settings = settings
        self._instance_id = f"indexer-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.index = PrefixIndex(settings.max_memory_bytes)
        self.matching = MatchServer(self.index, settings.match_endpoint)
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._feeds: Feeds | None = None
        self._coordinator: CoordinatorClient | None = None
        self.metrics.collect_statistics("kvmesh_indexer", self.statistics)
        routes = self.app.router
        routes.add_post("/register", self._register)
        routes.add_post("/unregister", self._unregister)
        routes.add_post("/query", self._query)
        routes.add_post("/query_by_hash", self._query_by_hash)
        routes.add_get("/dump", self._dump)
        routes.add_get("/workers", self._workers)

    async def start(self, tasks: TaskGroup, url: str) -> None:
        """Bind the match socket, follow the membership, and join it.

        Raises:
            OSError: the match endpoint is taken.
        """
        feeds = self._feeds = await tasks.start(self._work)
        if self._settings.coordinator_url is None:
            return
        self._coordinator = CoordinatorClient(self._settings.coordinator_url)
        await self._coordinator.start(tasks)
        self._coordinator.subscribe(feeds.hear)
        self._coordinator.announce(
            Member(
                instance_id=self._instance_id,
                role="indexer",
                url=url,
                match_endpoint=self.matching.endpoint,
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
        try:
            self.matching.bind(context)
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                tasks.start_soon(self.matching.serve)
                task_status.started(Feeds(self.index, tasks, context))
        finally:
            self.matching.close()
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
        }

    async def _register(self, request: web.Request) -> web.Response:
        body = await read_json(request, RegisterBody)
        for name, endpoint in (("endpoint", body.endpoint), ("replay_endpoint", body.replay_endpoint)):
            if endpoint is not None and not endpoint.startswith(("tcp://", "ipc://")):
                raise bad_request(f"{name} is {endpoint!r}; write tcp://HOST:PORT or ipc://PATH.", param=name)
        self._started().follow(
            Feed(
                Source(body.instance_id, body.dp_rank),
                body.modelname,
                body.endpoint,
                body.replay_endpoint,
                tenant=body.tenant_id,
                lora=body.lora_name,
                salt=body.additionalsalt,
                single_group=body.single_group,
            )
        )
        return json_response({"status": "ok"})

    async def _unregister(self, request: web.Request) -> web.Response:
        body = await read_json(request, Unregister)
        known = self._started().stop(body.instance_id, body.dp_rank)
        return json_response({"status": "ok", "known": known})

    async def _query(self, request: web.Request) -> web.Response:
        body = await read_json(request, Query)
        try:
            tokens = as_token_ids(body.token_ids)
        except OverflowError:
            raise bad_request("A token id does not fit 32 bits.", param="token_ids") from None
        matches = self.index.match(
            tokens,
            model=body.model,
            tenant=body.tenant_id,
            lora=body.lora,
            cache_salt=body.cache_salt,
            block_size=body.block_size,
        )
        return json_response(query_reply(matches, body.tenant_id, body.instance_id))

    async def _query_by_hash(self, request: web.Request) -> web.Response:
        body = await read_json(request, HashQuery)
        matches = self.index.match_hashes(
            np.array([value & _HASH_MASK for value in body.seq_hashes], dtype=np.uint64),
            model=body.model,
            tenant=body.tenant_id,
            lora=body.lora,
            cache_salt=body.cache_salt,
            block_size=body.block_size,
        )
        return json_response(query_reply(matches, body.tenant_id, body.instance_id))

    async def _dump(self, request: web.Request) -> web.Response:
        return json_response(
            [
                {
                    "instance_id": source.instance_id,
                    "dp_rank": source.dp_rank,
                    "num_blocks": self.index.num_held(source),
                    "blocks": [dumped_block(block) for block in islice(self.index.dump(source), MAX_DUMPED_BLOCKS)],
                }
                for source in self.index.sources(request.query.get("instance_id"))
            ]
        )

    async def _workers(self, _request: web.Request) -> web.Response:
        return json_response(self._started().describe())

    def _started(self) -> Feeds:
        if self._feeds is None:
            raise unavailable("The indexer is still starting; try again in a moment.")
        return self._feeds
