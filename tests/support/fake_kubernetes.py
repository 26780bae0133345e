"""A fake API server of Kubernetes: EndpointSlices of one namespace, listed in pages and watched."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import anyio
from aiohttp import web

__all__ = ["FakeKubernetes", "endpoint"]


def endpoint(address: str, *, ready: bool | None = True, terminating: bool | None = None) -> dict[str, Any]:
    """One endpoint of a slice; None leaves a condition unset."""
    conditions = {"ready": ready, "terminating": terminating}
    return {
        "addresses": [address],
        "conditions": {key: value for key, value in conditions.items() if value is not None},
        "nodeName": "node",
    }


class FakeKubernetes:
    """The API server; every change counts its resource version up and reaches the watchers.

    Attributes:
        versions: of ``discovery.k8s.io`` that it has.
        token: that it asks for.
        requests: query of each request, in order.
    """

    def __init__(self, service: str, *, versions: tuple[str, ...] = ("v1",), token: str = "token") -> None:
        self.service = service
        self.versions = versions
        self.token = token
        self.requests: list[dict[str, str]] = []
        self.refuse: tuple[int, str] | None = None
        self.page = 500
        self._version = 100
        self._oldest = 100
        self._slices: dict[str, dict[str, Any]] = {}
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._error: dict[str, Any] | None = None
        self._changed = anyio.Event()
        self._end = anyio.Event()
        self.watchers = 0

    def put(self, name: str, *endpoints: dict[str, Any], port: int = 8100, port_name: str = "http") -> None:
        """Make or change a slice."""
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._version += 1
        one = {
            "metadata": {
                "name": name,
                "resourceVersion": str(self._version),
                "labels": {"kubernetes.io/service-name": self.service},
            },
            "addressType": "IPv4",
            "endpoints": list(endpoints),
            "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
        }
        self._slices[name] = one
        self._tell({"type": kind, "object": one})

    def delete(self, name: str) -> None:
        """Remove a slice."""
        self._version += 1
        one = self._slices.pop(name)
        one["metadata"]["resourceVersion"] = str(self._version)
        self._tell({"type": "DELETED", "object": one})

    def bookmark(self) -> None:
        """Tell watchers how far they are, as happens about once a minute; other objects have changed meanwhile."""
        self._version += 10
        self._tell({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self._version)}}})

    def compact(self) -> None:
        """Forget the history: whoever asks for an older version is told 410."""
        self._history.clear()
        self._version += 1
        self._oldest = self._version

    def fail_watches(self, code: int) -> None:
        """Send every watcher an error event."""
        self._error = {"type": "ERROR", "object": {"kind": "Status", "code": code, "message": "too old"}}
        self.drop_watches()

    def drop_watches(self) -> None:
        """Close every watch."""
        self._end.set()
        self._end = anyio.Event()

    @property
    def version(self) -> int:
        """The resource version now."""
        return self._version

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """Serve, over TLS where a context is given; gives the base URL."""
        app = web.Application()
        for version in ("v1", "v1beta1"):
            app.router.add_get(f"/apis/discovery.k8s.io/{version}/namespaces/{{ns}}/endpointslices", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, ssl_context=context)
        await site.start()
        try:
            yield f"{'https' if context else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            self.drop_watches()
            await runner.cleanup()

    def _tell(self, event: dict[str, Any]) -> None:
        self._history.append((self._version, json.loads(json.dumps(event))))
        self._changed.set()
        self._changed = anyio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path.split("/")[3] not in self.versions:
            return web.Response(status=404, text="404 page not found")
        self.requests.append(dict(request.query))
        if self.refuse is not None:
            return self._status(*self.refuse)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return self._status(401, "Unauthorized")
        assert request.query["labelSelector"] == f"kubernetes.io/service-name={self.service}"
        if request.query.get("watch") == "1":
            return await self._watch(request)
        start = int(request.query.get("continue") or 0)
        names = sorted(self._slices)
        page = names[start : start + self.page]
        more = str(start + self.page) if start + self.page < len(names) else ""
        body = {
            "kind": "EndpointSliceList",
            "metadata": {"resourceVersion": str(self._version), **({"continue": more} if more else {})},
            "items": [self._slices[name] for name in page],
        }
        return web.json_response(body)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        assert request.query["allowWatchBookmarks"] == "true"
        assert int(request.query["timeoutSeconds"]) > 0
        if seen < self._oldest:
            return self._status(410, "too old resource version")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        end, position = self._end, 0
        self.watchers += 1
        try:
            while True:
                changed = self._changed
                for version, event in self._history[position:]:
                    if version > seen:
                        await response.write(json.dumps(event).encode() + b"\n")
                position = len(self._history)
                async with anyio.create_task_group() as racers:
                    for one in (changed, end):
                        racers.start_soon(_first, one, racers)
                if end.is_set():
                    if self._error is not None:
                        await response.write(json.dumps(self._error).encode() + b"\n")
                        self._error = None
                    return response
        finally:
            self.watchers -= 1

    def _status(self, code: int, message: str) -> web.Response:
        return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)


async def _first(event: anyio.Event, racers: anyio.abc.TaskGroup) -> None:
    await event.wait()
    racers.cancel_scope.cancel()
