"""A fake server of the mesh: it says of itself what a worker says, and computes nothing."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from kvmesh.net.auth import ApiKeys
from kvmesh.net.http import api_key_middleware, json_response
from kvmesh.net.service import Health, Service
from kvmesh.protocol.version import PROTOCOL_VERSION

__all__ = ["FakeWorker"]


class FakeWorker(Service):
    """A server that says what a worker says of itself."""

    def __init__(self, instance_id: str = "context-0", keys: ApiKeys | None = None, **fields: Any) -> None:
        super().__init__("context", middleware=[api_key_middleware(keys or ApiKeys())], drain_s=0.1)
        self.well = Health(True)
        self.running = 1
        self.info = {
            "instance_id": instance_id,
            "epoch": 5,
            "role": "context",
            "dialect": "kvmesh",
            "protocol": PROTOCOL_VERSION,
            "model": "tiny",
            "compat_digest": "d",
            "dp_size": 2,
            "tensor_parallel_size": 2,
            **fields,
        }
        self.app.router.add_get("/server_info", self._info)
        self.app.router.add_get("/stats", self._stats)

    def health(self) -> Health:
        return self.well

    async def _info(self, _request: web.Request) -> web.Response:
        return json_response(self.info)

    async def _stats(self, _request: web.Request) -> web.Response:
        return json_response({"running": self.running, "pages_total": 7, "iteration": 3})
