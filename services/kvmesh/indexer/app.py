"""The indexer as a service: HTTP faces beside the match socket, fed by the membership."""

from __future__ import annotations

import socket
import uuid

import msgspec
import numpy as np
from aiohttp import web
from anyio.abc import TaskGroup

from kvmesh.config import IndexerSettings
from kvmesh.hashing import salt_id
from kvmesh.indexer.faces import DEFAULT_TENANT, HashQuery, Query, RegisterBody, Unregister, query_reply
from kvmesh.indexer.feeds import Feed, Feeds
from kvmesh.indexer.index import PrefixIndex
from kvmesh.indexer.matching import MatchServer
from kvmesh.net.auth import ApiKeys
from kvmesh.net.discovery import CoordinatorClient
from kvmesh.net.http import api_key_middleware, json_response, read_json
from kvmesh.net.service import Service
from kvmesh.protocol.errors import bad_request, unavailable
from kvmesh.protocol.members import Member

__all__ = ["IndexerService"]


class IndexerService(Service):
    """See :mod:`kvmesh.indexer`."""

    def __init__(self, settings: IndexerSettings) -> None:
        keys = ApiKeys(settings.api_keys_file)
        super().__init__("indexer", middleware=[api_key_middleware(keys)], drain_s=settings.drain_s)
        self._settings = settings
        self._instance_id = f"indexer-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.index = PrefixIndex(settings.max_memory_bytes)
        self.matching = MatchServer(self.index, settings.match_endpoint)
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
        """Bind the match socket, follow the membership, and join it."""
        self.matching.bind()
        tasks.start_soon(self.matching.serve)
        self._feeds = Feeds(self.index, tasks)
        if self._settings.coordinator_url is not None:
            self._coordinator = CoordinatorClient(self._settings.coordinator_url)
            await self._coordinator.start(tasks)
            self._coordinator.subscribe(self._feeds.hear)
            member = Member(
                instance_id=self._instance_id, role="indexer", url=url, match_endpoint=self.matching.endpoint
            )
            self._coordinator.announce(member)

    async def stop(self) -> None:
        """Leave the membership and close the match socket."""
        if self._coordinator is not None:
            await self._coordinator.stop()
        self.matching.close()

    def statistics(self) -> dict[str, float]:
        """The index's and the feeds' numbers."""
        feeds = {} if self._feeds is None else {f"feed_{key}": value for key, value in self._feeds.statistics().items()}
        return {
            **super().statistics(),
            **msgspec.structs.asdict(self.index.statistics()),
            "malformed_match_requests_total": self.matching.malformed_total,
            **feeds,
        }

    async def _register(self, request: web.Request) -> web.Response:
        body = await read_json(request, RegisterBody)
        if body.lora_name is not None or body.additionalsalt is not None or body.tenant_id != DEFAULT_TENANT:
            raise bad_request("not supported yet: 'lora_name', 'additionalsalt' and 'tenant_id' of a registration")
        if not body.endpoint.startswith(("tcp://", "ipc://")):
            raise bad_request(f"'endpoint' is {body.endpoint!r}; write tcp://HOST:PORT or ipc://PATH", param="endpoint")
        self._started().follow(Feed(body.instance_id, body.modelname, body.endpoint, body.replay_endpoint))
        return json_response({"status": "ok"})

    async def _unregister(self, request: web.Request) -> web.Response:
        body = await read_json(request, Unregister)
        return json_response({"status": "ok", "known": self._started().stop(body.instance_id)})

    async def _query(self, request: web.Request) -> web.Response:
        body = await read_json(request, Query)
        try:
            tokens = np.asarray(body.token_ids, dtype=np.int32)
        except OverflowError:
            raise bad_request("A token id does not fit 31 bits.", param="token_ids") from None
        matches = self.index.match(
            tokens,
            model=body.model,
            lora=body.lora_name if body.lora_name is not None else body.lora_id,
            salt=None if body.cache_salt is None else salt_id(body.cache_salt),
        )
        return json_response(query_reply(matches, body.tenant_id, body.instance_id))

    async def _query_by_hash(self, request: web.Request) -> web.Response:
        body = await read_json(request, HashQuery)
        found = self.index.match_prefixes(body.seq_hashes, model=body.model)
        return json_response(
            [
                {"instance_id": source.instance_id, "dp_rank": source.dp_rank, "matched_blocks": blocks}
                for source, blocks in found.items()
            ]
        )

    async def _dump(self, request: web.Request) -> web.Response:
        wanted = request.query.get("instance_id")
        return json_response(
            [
                {
                    "instance_id": source.instance_id,
                    "dp_rank": source.dp_rank,
                    "blocks": [
                        {"scope": scope._asdict(), "seq_hash": prefix, "tiers": tiers}
                        for scope, prefix, tiers in self.index.dump(source)
                    ],
                }
                for source in self.index.sources(wanted)
            ]
        )

    async def _workers(self, _request: web.Request) -> web.Response:
        return json_response(
            [
                {
                    **feed._asdict(),
                    "ranks": {
                        str(source.dp_rank): self.index.held_blocks(source)
                        for source in self.index.sources(feed.instance_id)
                    },
                }
                for feed in self._started().feeds()
            ]
        )

    def _started(self) -> Feeds:
        if self._feeds is None:
            raise unavailable("The indexer is still starting; try again in a moment.")
        return self._feeds
