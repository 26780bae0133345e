"""The indexer's HTTP routes: from bodies to the index and the feeds, and back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import Any

import anyio.lowlevel
import msgspec
from aiohttp import web

from kvmesh.events.endpoints import EndpointError, check_endpoint
from kvmesh.events.feeds import Feed, Feeds
from kvmesh.events.index import PrefixIndex, Source
from kvmesh.events.index.index import DumpedBlock
from kvmesh.events.keyed import KeyRing
from kvmesh.events.keyed_lookup import lookup_of
from kvmesh.events.records import Tier
from kvmesh.hashing import as_token_ids
from kvmesh.indexer.answers import dumped_block, query_reply
from kvmesh.indexer.faces import HashQuery, Prediction, RegisterBody, Unregister
from kvmesh.indexer.merged import MergedStream
from kvmesh.indexer.questions import read_question
from kvmesh.net.http import json_response, read_json, receiving
from kvmesh.protocol.errors import ApiError, bad_request
from kvmesh.protocol.mesh_events import TIER_MEDIA

__all__ = ["Routes"]

MAX_DUMPED_BLOCKS = 100_000
"""Of one source; some ten megabytes of JSON."""

DUMPED_A_TURN = 128
"""Blocks looked at before other tasks get a turn: about a millisecond."""

MAX_DIGITS = 18
"""Of a number in a query string."""

_WORKER_FILTERS = ("instance_id", "model_name", "tenant_id")


class Routes:
    """Adds its routes to an application.

    Args:
        index: to ask.
        feeds: to register with; raises a 503 while the service is starting.
        merged: the stream of all workers' events, None when there is none.
        keys: of workers that tell keyed names instead of tokens.
    """

    def __init__(
        self,
        index: PrefixIndex,
        feeds: Callable[[], Feeds],
        merged: MergedStream | None,
        *,
        keys: KeyRing | None = None,
    ) -> None:
        self._index = index
        self._match = lookup_of(index, keys)
        self._feeds = feeds
        self._merged = merged

    def add_to(self, routes: web.UrlDispatcher) -> None:
        """Register all routes."""
        routes.add_post("/register", self._register)
        routes.add_post("/unregister", self._unregister)
        routes.add_post("/query", self._query)
        routes.add_post("/query_by_hash", self._query_by_hash)
        routes.add_post("/predict", self._predict)
        routes.add_get("/dump", self._dump)
        routes.add_get("/workers", self._workers)
        routes.add_get("/stream", self._stream)

    async def _register(self, request: web.Request) -> web.Response:
        body = await read_json(request, RegisterBody)
        feeds = self._feeds()
        if body.bind and not feeds.listens:
            raise bad_request("This indexer binds nothing; set listen_endpoint.", param="bind")
        feed = _feed(body, feeds.listen_endpoint)
        if not feeds.follow(feed, by_hand=True):
            raise ApiError(
                409,
                f"{feed.source.instance_id!r} is a worker of the mesh and followed as the coordinator says; "
                "give the other one another instance_id.",
                code="worker_of_the_mesh",
            )
        return json_response({"status": "ok", "instance_id": feed.source.instance_id})

    async def _unregister(self, request: web.Request) -> web.Response:
        body = await read_json(request, Unregister)
        ended = self._feeds().stop(str(body.instance_id), body.dp_rank)
        removed = [f"{feed.source.instance_id}|{feed.tenant}|{feed.source.dp_rank}" for feed in ended]
        return json_response({"status": "ok", "known": bool(ended), "removed_instances": removed})

    def answer_query(self, body: bytes) -> bytes:
        """JSON of the answer to a body of ``POST /query``.

        Raises:
            ApiError: 400 for a body that is no query, 503 while the service is starting.
        """
        query, token_ids = read_question(body)
        self._feeds()
        matches = self._match(
            token_ids,
            model=query.model_named,
            tenant=query.tenant,
            lora=query.lora,
            cache_salt=query.salt,
            block_size=query.block_size,
        )
        return msgspec.json.encode(query_reply(matches, query.tenant, _only(query.instance_id)))

    async def _query(self, request: web.Request) -> web.Response:
        with receiving(request):
            body = await request.read()
        return web.Response(body=self.answer_query(body), content_type="application/json")

    async def _query_by_hash(self, request: web.Request) -> web.Response:
        body = await read_json(request, HashQuery)
        self._feeds()
        matches = self._index.match_hashes(
            body.prefix_hashes(),
            model=body.model_named,
            tenant=body.tenant,
            lora=body.lora,
            cache_salt=body.salt,
            block_size=body.block_size,
        )
        return json_response(query_reply(matches, body.tenant, _only(body.instance_id)))

    async def _predict(self, request: web.Request) -> web.Response:
        body = await read_json(request, Prediction)
        instance_id, rank = body.target()
        feeds = self._feeds()
        feed = feeds.feed(Source(instance_id, rank))
        if feed is None:
            raise _unknown_worker(instance_id, rank)
        known = feeds.predictions.predict(
            feed,
            _tokens(body.token_ids),
            model=body.model_named,
            lora=body.lora,
            cache_salt=body.salt,
            block_size=body.block_size,
            ttl_s=body.ttl_s,
        )
        if not known:
            raise bad_request(
                "The worker serves another model, or does not tell its block size: give 'block_size'.",
                param="block_size",
            )
        return json_response({"status": "ok"})

    async def _dump(self, request: web.Request) -> web.StreamResponse:
        wanted = _Wanted(request.query)
        self._feeds()
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        sources = [source for source in self._index.sources(wanted.instance_id) if wanted.source(source)]
        for number, source in enumerate(sources):
            head = {
                "instance_id": source.instance_id,
                "dp_rank": source.dp_rank,
                "num_blocks": self._index.num_held(source),
            }
            opening = b"," if number else b"["
            await response.write(opening + msgspec.json.encode(head)[:-1] + b',"blocks":[')
            async for part in self._dumped(source, wanted):
                await response.write(part)
            await response.write(b"]}")
        await response.write(b"]" if sources else b"[]")
        return response

    async def _dumped(self, source: Source, wanted: _Wanted) -> AsyncIterator[bytes]:
        """A source's blocks as JSON, without the brackets around them; others get their turn all the while."""
        blocks, left, opening = self._index.dump(source), wanted.limit, b""
        while left and (looked_at := list(islice(blocks, DUMPED_A_TURN))):
            found = list(islice(filter(wanted.block, looked_at), left))
            left -= len(found)
            if found:
                yield opening + msgspec.json.encode([dumped_block(block) for block in found])[1:-1]
                opening = b","
            await anyio.lowlevel.checkpoint()

    async def _workers(self, request: web.Request) -> web.Response:
        wanted = request.query
        return json_response(
            [
                worker
                for worker in self._feeds().describe()
                if all(worker[key] == wanted[key] for key in _WORKER_FILTERS if key in wanted)
            ]
        )

    async def _stream(self, _request: web.Request) -> web.Response:
        if self._merged is None:
            raise ApiError(
                404, "This indexer publishes no merged stream; set publish_endpoint.", code="no_merged_stream"
            )
        return json_response({"endpoint": self._merged.endpoint, "replay_endpoint": self._merged.replay_endpoint})


class _Wanted:
    """The filters of ``/dump``; those that are left out let everything through.

    Raises:
        ApiError: 400, a number that is none, or a tier that there is not.
    """

    def __init__(self, query: Any) -> None:
        self.instance_id: str | None = query.get("instance_id")
        self.limit = min(_number(query, "limit", MAX_DUMPED_BLOCKS), MAX_DUMPED_BLOCKS)
        self._rank = _number(query, "dp_rank", None)
        self._tier = _tier(query.get("tier"))
        self._scope = {key: query[key] for key in ("model", "tenant", "lora", "salt") if key in query}

    def source(self, source: Source) -> bool:
        """Whether a source is wanted."""
        return self._rank in (None, source.dp_rank)

    def block(self, block: DumpedBlock) -> bool:
        """Whether a block is wanted; an empty ``lora`` or ``salt`` means blocks without one."""
        if self._tier is not None and block.tier is not self._tier:
            return False
        scope = block.scope
        return all(str(_empty_if_none(getattr(scope, key))) == value for key, value in self._scope.items())


def _tier(name: str | None) -> Tier | None:
    """A tier by our name, or as events and ``/query`` call it."""
    if name is None:
        return None
    for tier in Tier:
        if name.lower() in (tier.name.lower(), TIER_MEDIA[tier].lower()):
            return tier
    raise bad_request(f"tier is {name[:100]!r}; write device, host or disk (or GPU, CPU, DISK).", param="tier")


def _empty_if_none(value: object) -> object:
    return "" if value is None else value


def _number(query: Any, key: str, default: Any) -> Any:
    text = query.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise bad_request(f"{key} is {text[:100]!r}; write a number.", param=key)
    return int(text)


def _feed(body: RegisterBody, listen_endpoint: str) -> Feed:
    """What a registration asks to follow.

    Args:
        body: of the registration.
        listen_endpoint: where publishers connect to.

    Raises:
        ApiError: 400, its endpoints do not fit.
    """
    none = body.events == "none"
    if none and body.block_size is None:
        raise bad_request("A worker without events needs 'block_size'.", param="block_size")
    if not none and not body.bind and not body.endpoint:
        raise bad_request('Give the \'endpoint\' of its stream, or "events": "none".', param="endpoint")
    for name, endpoint in (("endpoint", body.endpoint), ("replay_endpoint", body.replay_endpoint)):
        if not endpoint:
            continue
        try:
            check_endpoint(endpoint)
        except EndpointError as error:
            raise bad_request(f"{name}: {error}.", param=name) from None
    return Feed(
        Source(str(body.instance_id), body.dp_rank or 0),
        body.model_named,
        None if none else listen_endpoint if body.bind else body.endpoint,
        None if none else body.replay_endpoint or None,
        tenant=body.tenant,
        lora=body.lora_name or None,
        salt=body.salt,
        single_group=body.single_group,
        block_size=body.block_size or 0,
        topic=body.topic if body.bind and not none else None,
    )


def _tokens(token_ids: list[int]) -> Any:
    try:
        return as_token_ids(token_ids)
    except OverflowError:
        raise bad_request("A token id does not fit 32 bits.", param="token_ids") from None


def _only(instance_id: str | int | None) -> str | None:
    return None if instance_id is None else str(instance_id)


def _unknown_worker(instance_id: str, dp_rank: int) -> ApiError:
    """404: nobody has registered it, and no coordinator knows it."""
    return ApiError(
        404, f"No worker {instance_id!r} with rank {dp_rank} is known; register it first.", code="unknown_worker"
    )
