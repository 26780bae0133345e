"""HTTP over the cluster storage, as TensorRT-LLM's workers and routers speak it.

Every answer is ``{"result": R}``, 200 if R is truthy and 400 otherwise: setting a key that exists, reading one that
does not and listing an empty prefix are all 400. ``GET /watch`` is ours: one JSON object a line for each change.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec
from aiohttp import web

from kvmesh.coordinator.queries import is_set
from kvmesh.coordinator.storage import NO_TTL, MemoryStore, StoreFullError
from kvmesh.net.http import json_response, read_json
from kvmesh.protocol.errors import ApiError, bad_request

__all__ = ["StorageFaces"]

WATCH_IDLE_S = 15.0
"""A silent watch sends an empty line this often, so that a dead reader is noticed."""


class _SetRequest(msgspec.Struct):
    """``POST /set``. ``expire_time`` belongs to the server; a client's is ignored."""

    key: str
    value: str | None = ""
    expire_time: float | None = -1
    ttl: float | None = NO_TTL
    overwrite_if_exists: bool | None = False


class StorageFaces:
    """Routes over a store.

    Args:
        store: the store.
        active: whether this process answers for it; watches of one that does not are ended.
        check: raises when no change may be made now.
        stored: waits, before a change is confirmed, until it survives this process; raises when it may not.
    """

    def __init__(
        self,
        store: MemoryStore,
        *,
        active: Callable[[], bool],
        check: Callable[[], None],
        stored: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._active = active
        self._check = check
        self._stored = stored

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add ``/set``, ``/get``, ``/expire``, ``/delete``, ``/get_prefix`` and ``/watch``."""
        router.add_post("/set", self._set)
        router.add_get("/get", self._get)
        router.add_get("/expire", self._expire)
        router.add_delete("/delete", self._delete)
        router.add_get("/get_prefix", self._get_prefix)
        router.add_get("/watch", self._watch)

    async def _set(self, request: web.Request) -> web.Response:
        item = await read_json(request, _SetRequest)
        self._check()
        try:
            done = await self._store.set(
                item.key,
                item.value or "",
                overwrite=bool(item.overwrite_if_exists),
                ttl_s=NO_TTL if item.ttl is None else item.ttl,
            )
        except StoreFullError as error:
            raise ApiError(507, f"{error}; delete keys or give them a ttl.", code="storage_full") from None
        await self._stored()
        return _result(done)

    async def _get(self, request: web.Request) -> web.Response:
        return _result(await self._store.get(_query(request, "key")))

    async def _expire(self, request: web.Request) -> web.Response:
        key, text = _query(request, "key"), _query(request, "ttl")
        try:
            ttl_s = float(text)
        except ValueError:
            raise bad_request("ttl must be a number of seconds.", param="ttl") from None
        self._check()
        renewed = await self._store.expire(key, ttl_s)
        await self._stored()
        return _result(renewed)

    async def _delete(self, request: web.Request) -> web.Response:
        key = _query(request, "key")
        self._check()
        deleted = await self._store.delete(key)
        await self._stored()
        return _result(deleted)

    async def _get_prefix(self, request: web.Request) -> web.Response:
        keys_only = is_set(request, "keys_only")
        return _result(await self._store.get_prefix(_query(request, "key_prefix"), keys_only=keys_only))

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        prefix = request.query.get("key_prefix", "")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        with self._store.watch(prefix) as watch:
            await response.prepare(request)
            while self._active():
                lines = b"\n"
                with anyio.move_on_after(WATCH_IDLE_S):
                    lines = b"".join(
                        msgspec.json.encode({"key": event.key, "value": event.value, "type": event.type.name}) + b"\n"
                        for event in await watch.drain()
                    )
                await response.write(lines)
        await response.write_eof()
        return response


def _query(request: web.Request, name: str) -> str:
    value = request.query.get(name)
    if value is None:
        raise bad_request(f"The query parameter {name} is missing.", param=name)
    return value


def _result(result: Any) -> web.Response:
    return json_response({"result": result}, 200 if result else 400)
